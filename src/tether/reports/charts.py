"""What a chart says: its title, the question it answers, its series. `chart_svg` draws it.

Charts are values: they hold numbers and words and know nothing of a page. Points that are not finite are left out when
drawn, and a line breaks there rather than bridge the gap.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Kind = Literal["line", "dots", "bars"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points under one name. Bars stand on zero at their x, as wide as the closest two are apart."""

    name: str
    points: tuple[Point, ...]
    kind: Kind = "line"


@dataclass(frozen=True)
class Mark:
    """A thin line across the chart at one value of an axis, with a word on it: a target, a peak, a bound."""

    axis: Literal["x", "y"]
    value: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """One chart. `question` is what its group asks; `note` is how to read it, in a sentence."""

    title: str
    question: str
    series: tuple[Series, ...]
    y_label: str = ""
    note: str = ""
    x_label: str = "step"
    marks: tuple[Mark, ...] = ()
    y_range: tuple[float | None, float | None] = (None, None)  # None: from the points
    diagonal: bool = False  # both axes share a range, with the line x = y drawn


@dataclass(frozen=True)
class ChartGroup:
    """The charts that answer one question, and the answer in words where there is one."""

    question: str
    charts: tuple[Chart, ...]
    answer: str = ""


def group_charts(charts: Iterable[Chart], answers: dict[str, str] | None = None) -> tuple[ChartGroup, ...]:
    """Charts by their question, in the order in which the questions first come up."""
    groups: dict[str, list[Chart]] = {}
    for chart in charts:
        groups.setdefault(chart.question, []).append(chart)
    return tuple(ChartGroup(name, tuple(members), (answers or {}).get(name, "")) for name, members in groups.items())


def margin_histogram(margins: Sequence[float], *, question: str, bins: int = 20) -> Chart:
    """How far apart a reward model puts held-out pairs: score of the chosen answer less that of the rejected one.

    Zero is an edge between two bins, so every bar lies wholly on one side: ranked right, or ranked wrong.
    """
    known = [margin for margin in margins if math.isfinite(margin)]
    width = max((abs(margin) for margin in known), default=0.0) * 2.0 / max(bins, 2) or 1.0
    counts = Counter(
        max(math.ceil(margin / width) - 1, 0) if margin > 0.0 else min(math.floor(margin / width), -1)
        for margin in known
    )
    bars = {place: ((place + 0.5) * width, float(count)) for place, count in sorted(counts.items())}
    right = tuple(bar for place, bar in bars.items() if place >= 0)
    wrong = tuple(bar for place, bar in bars.items() if place < 0)
    share = sum(margin > 0.0 for margin in known) / len(known) if known else 0.0
    return Chart(
        title="Margins on held-out pairs",
        question=question,
        series=(Series("ranked right", right, "bars"), Series("ranked wrong", wrong, "bars")),
        y_label="pairs",
        x_label="score of chosen − score of rejected",
        note=f"{share:.0%} of {len(known)} pairs are ranked as the rater ranked them." if known else "",
        marks=(Mark("x", 0.0),),
    )


def calibration_chart(predicted: Sequence[float], happened: Sequence[float], *, question: str, bins: int = 8) -> Chart:
    """Predicted probabilities against how often the thing happened, in bins of like count; on the diagonal is right."""
    if len(predicted) != len(happened):
        raise ValueError(f"{len(predicted)} predictions cannot be held against {len(happened)} outcomes")
    pairs = sorted(pair for pair in zip(predicted, happened, strict=True) if all(map(math.isfinite, pair)))
    bins = max(1, min(bins, len(pairs)))
    edges = [round(len(pairs) * place / bins) for place in range(bins + 1)]
    points: list[Point] = []
    for low, high in pairwise(edges):
        if part := pairs[low:high]:
            points.append((sum(p for p, _ in part) / len(part), sum(h for _, h in part) / len(part)))
    return Chart(
        title="Is its confidence earned?",
        question=question,
        series=(Series("held-out pairs", tuple(points), "dots"),),
        y_label="how often it was right",
        x_label="how sure it was",
        note="Below the diagonal it is surer than it should be; above, less sure.",
        diagonal=True,
    )
