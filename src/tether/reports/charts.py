"""The content of a chart: its title, the question it answers, its series, ranges and ticks. `chart_svg` draws it.

A chart is a value that knows nothing about pages. Points that are not finite are left out, and a line has a gap there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

Kind = Literal["line", "dots", "bars"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Named points. Bars start at zero; they are as wide as the smallest distance between two of them.

    `band` holds (x, low, high): a shaded area around a line, an error bar at a dot.
    """

    name: str
    points: tuple[Point, ...]
    kind: Kind = "line"
    band: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True)
class Mark:
    """A thin line across the chart at one value of an axis, with a label: a target, a peak, a bound."""

    axis: Literal["x", "y"]
    value: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """One chart. `question` is the question of its group; `note` explains in one sentence how to read it."""

    title: str
    question: str
    series: tuple[Series, ...]
    y_label: str = ""
    note: str = ""
    x_label: str = "step"
    marks: tuple[Mark, ...] = ()
    y_range: tuple[float | None, float | None] = (None, None)  # None: from the points
    diagonal: bool = False  # both axes share a range, and the line x = y is drawn
    x_ticks: tuple[tuple[float, str], ...] = ()  # (place, label); empty: round numbers


@dataclass(frozen=True)
class HeatMap:
    """Values of two settings as shaded cells: `cells[row][column]`, None where there is no value."""

    title: str
    question: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    x_label: str
    y_label: str
    note: str = ""


@dataclass(frozen=True)
class ParallelAxis:
    """One axis of parallel coordinates: (place from 0 to 1, label) of each tick."""

    label: str
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class ParallelCoordinates:
    """One line for each setting, through its places (0 to 1) on the axes; `strengths` (0 to 1) say how good each is."""

    title: str
    question: str
    axes: tuple[ParallelAxis, ...]
    lines: tuple[tuple[float, ...], ...]
    strengths: tuple[float, ...]
    names: tuple[str, ...]
    note: str = ""


Picture: TypeAlias = Chart | HeatMap | ParallelCoordinates


@dataclass(frozen=True)
class ChartGroup:
    """The charts that answer one question, and the answer in words if there is one."""

    question: str
    charts: tuple[Picture, ...]
    answer: str = ""


def group_charts(charts: Iterable[Picture], answers: dict[str, str] | None = None) -> tuple[ChartGroup, ...]:
    """Charts grouped by question, in the order in which the questions first appear."""
    groups: dict[str, list[Picture]] = {}
    for chart in charts:
        groups.setdefault(chart.question, []).append(chart)
    return tuple(ChartGroup(name, tuple(members), (answers or {}).get(name, "")) for name, members in groups.items())


def margin_histogram(margins: Sequence[float], *, question: str, bins: int = 20) -> Chart:
    """Histogram of a reward model's margins on held-out pairs: score of the chosen minus score of the rejected answer.

    Zero is an edge between two bins, so every bar is either ranked correctly or ranked wrongly.
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
    """Predicted probability against observed frequency, in bins of similar size; the diagonal is perfect."""
    if len(predicted) != len(happened):
        raise ValueError(f"{len(predicted)} predictions do not match {len(happened)} outcomes")
    pairs = sorted(pair for pair in zip(predicted, happened, strict=True) if all(map(math.isfinite, pair)))
    bins = max(1, min(bins, len(pairs)))
    edges = [round(len(pairs) * place / bins) for place in range(bins + 1)]
    points: list[Point] = []
    for low, high in pairwise(edges):
        if part := pairs[low:high]:
            points.append((sum(p for p, _ in part) / len(part), sum(h for _, h in part) / len(part)))
    return Chart(
        title="Is it calibrated?",
        question=question,
        series=(Series("held-out pairs", tuple(points), "dots"),),
        y_label="observed frequency",
        x_label="predicted probability",
        note="Below the diagonal the model is overconfident; above it, underconfident.",
        diagonal=True,
    )


# -- ranges, ticks and numbers ------------------------------------------------------------------------------------

LARGEST = 1e100  # larger values are treated as infinite: differences could overflow
MINUS = "\N{MINUS SIGN}"


def drawable(value: float) -> bool:
    """Whether a value can be placed on an axis."""
    return math.isfinite(value) and abs(value) <= LARGEST


@dataclass(frozen=True)
class Scale:
    """Maps a range of values to a range of pixels; `low` is below `high`, `start` and `end` may be in either order."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value, clamped to the ends."""
        part = (value - self.low) / (self.high - self.low)
        return self.start + min(max(part, 0.0), 1.0) * (self.end - self.start)


def value_range(values: Sequence[float], *, from_zero: bool = False, pad: float = 0.06) -> tuple[float, float]:
    """A range that holds the values with some padding; a constant gets padding on both sides."""
    known = [value for value in values if drawable(value)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    if from_zero or 0.0 <= low < 0.5 * high or 0.0 >= high > 0.5 * low:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)) or high - low < 1e-100:
        room = abs(high) * 0.1 or 1.0
        return low - room, high + room
    room = pad * (high - low)
    return (low if low == 0.0 else low - room), (high if high == 0.0 else high + room)


def y_bounds(chart: Chart) -> tuple[float, float]:
    """The range of a chart's y axis: its own, or one that holds its points and horizontal marks."""
    values = [y for series in chart.series for x, y in series.points if drawable(x)]
    values += [end for series in chart.series for _, *ends in series.band for end in ends]
    values += [mark.value for mark in chart.marks if mark.axis == "y"]
    low, high = value_range(values, from_zero=any(series.kind == "bars" for series in chart.series))
    low = low if chart.y_range[0] is None else chart.y_range[0]
    high = high if chart.y_range[1] is None else chart.y_range[1]
    return (low, high) if low < high else (low, low + 1.0)


def x_bounds(chart: Chart) -> tuple[float, float]:
    """The range of a chart's x axis: tight around lines, padded beside dots and bars."""
    points = [(x, series) for series in chart.series for x, y in series.points if drawable(x) and drawable(y)]
    xs = [x for x, _ in points]
    if not xs:
        return 0.0, 1.0
    half = bar_width(chart.series) / 2.0 if any(series.kind == "bars" for _, series in points) else 0.0
    low, high = min(xs) - half, max(xs) + half
    xs += [mark.value for mark in chart.marks if mark.axis == "x" and drawable(mark.value)]
    low, high = min([low, *xs]), max([high, *xs])
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = max(1.0, 1e-6 * abs(low))
        return low - room, high + room
    room = 0.04 * (high - low) if all(series.kind == "dots" for _, series in points) else 0.0
    return low - room, high + room


def bar_width(every: Sequence[Series]) -> float:
    """The width of bars: the smallest distance between two of them in any series; 1 if there is only one."""
    xs = sorted({x for series in every if series.kind == "bars" for x, y in series.points if drawable(x)})
    return min((high - low for low, high in pairwise(xs)), default=1.0)


def nice_ticks(low: float, high: float, about: int = 5, *, whole: bool = False) -> list[float]:
    """About `about` round values within [low, high], with a step of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(about, 1)
    if not rough > 0.0 or not math.isfinite(rough):
        return []
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((size * power for size in (1.0, 2.0, 5.0, 10.0)), key=lambda size: abs(math.log(size / rough)))
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [place * step for place in range(first, min(last, first + 50) + 1)]


def tick_label(value: float, step: float) -> str:
    """A tick with as many digits as the step needs."""
    size = max(abs(value), step)
    if size >= 1e6 or size < 1e-3:
        return short(0.0 if abs(value) < step * 1e-6 else value)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{digits}f}".replace("-", MINUS) if abs(value) >= step * 1e-6 else "0"


def interval_text(value: float, low: float, high: float) -> str:
    """0.62 [0.55, 0.69], with digits that match the width of the interval."""
    width = high - low
    digits = 1 if width >= 10 else 4 if 0 < width < 0.02 else 2
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def short(value: float) -> str:
    """A value with two or three digits, for a label: 0.81, 12.4, 1,240, 3e-5."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    size = abs(value)
    if size != 0.0 and (size >= 1e6 or size < 1e-3):
        mantissa, power = f"{value:.1e}".split("e")
        text = f"{mantissa.removesuffix('.0')}e{int(power)}"
    elif size >= 100.0 or value == int(value):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{1 if size >= 10.0 else 2 if size >= 0.1 else 3}f}"
    return text.replace("-", MINUS)


def text_width(text: str, size: float) -> float:
    """Approximate width of text in a system font; wide scripts count double."""
    return sum(1.0 if ord(letter) > 0x2E7F else 0.6 for letter in text) * size


def runs_of(points: Sequence[Point]) -> list[list[Point]]:
    """The points in order of x, split at every value that cannot be drawn."""
    runs: list[list[Point]] = [[]]
    for x, y in sorted((point for point in points if drawable(point[0])), key=lambda point: point[0]):
        if drawable(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def thinned(points: list[Point], most: int = 600) -> list[Point]:
    """Reduce a line to about `most` points; each segment keeps its minimum and maximum, so no spike is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    kept = [points[0]]
    for start in range(0, len(points), size):
        piece = points[start : start + size]
        ends = {min(piece, key=lambda point: point[1]), max(piece, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]
