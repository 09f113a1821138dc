"""The pictures of a sweep: main effects, heat maps, parallel coordinates, and the curve of each setting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tether.reports.charts import (
    Chart,
    HeatMap,
    Mark,
    ParallelAxis,
    ParallelCoordinates,
    Picture,
    Series,
    nice_ticks,
    short,
)
from tether.sweeps.design import differing
from tether.sweeps.manifest import SweepManifest
from tether.sweeps.ranking import KeyEffect, RankedSetting, ranked
from tether.sweeps.results import TrialResult
from tether.sweeps.student_t import MeanInterval, mean_interval
from tether.sweeps.variation import Variation, in_words, shown

EFFECT, TOGETHER, LEARNED = (
    "What does each setting change?",
    "How do settings act together?",
    "How did each setting learn?",
)
MAX_CURVES = 24
MAX_LINES = 6  # of one chart
BINS = 4  # of a range, in a heat map
MAX_HEAT_MAPS = 3


def effect_charts(
    manifest: SweepManifest, judged: Sequence[RankedSetting], effects: Sequence[KeyEffect]
) -> list[Picture]:
    """One chart for each key: the mean of each value with its interval, or a dot for each drawn setting."""
    by_key = {effect.key: effect for effect in effects}
    charts: list[Picture] = []
    ordered = sorted(manifest.variations, key=lambda each: -by_key[each.key].span if each.key in by_key else 0.0)
    for variation in ordered:
        effect = by_key.get(variation.key)
        chart = _levels_chart(manifest, effect) if effect is not None else _drawn_chart(manifest, variation, judged)
        if chart is not None:
            charts.append(chart)
    return charts


def _levels_chart(manifest: SweepManifest, effect: KeyEffect) -> Chart | None:
    known = [(place, each.interval) for place, each in enumerate(effect.values) if each.interval is not None]
    if not known:
        return None
    own = next((place for place, each in enumerate(effect.values) if each.values[effect.key] == effect.own), None)
    lost = [shown(each.values[effect.key]) for each in effect.values if each.diverged]
    over = "" if manifest.sampler == "one-at-a-time" else "Mean over the settings with this value. "
    note = f"Diverged with some seeds: {', '.join(lost)}." if lost else over.strip()
    return Chart(
        title=effect.key,
        question=EFFECT,
        series=(
            Series(
                effect.key,
                tuple((float(place), interval.mean) for place, interval in known),
                "dots",
                tuple(_bar(place, interval) for place, interval in known if interval.low is not None),
            ),
        ),
        y_label=manifest.metric,
        x_label=effect.key,
        note=note,
        marks=(Mark("x", float(own), "recipe"),) if own is not None else (),
        x_ticks=tuple((float(place), shown(each.values[effect.key])) for place, each in enumerate(effect.values)),
    )


def _bar(x: float, interval: MeanInterval) -> tuple[float, float, float]:
    assert interval.low is not None and interval.high is not None
    return (float(x), interval.low, interval.high)


def _drawn_chart(manifest: SweepManifest, variation: Variation, judged: Sequence[RankedSetting]) -> Chart | None:
    """The settings that a sampler drew, by their value of one key."""
    known = [(float(each.values[variation.key]), each.interval) for each in judged if each.interval is not None]
    if not known:
        return None
    place = math.log10 if variation.log else float
    return Chart(
        title=variation.key,
        question=EFFECT,
        series=(
            Series(
                variation.key,
                tuple((place(value), interval.mean) for value, interval in known),
                "dots",
                tuple(_bar(place(value), interval) for value, interval in known if interval.low is not None),
            ),
        ),
        y_label=manifest.metric,
        x_label=variation.key,
        note="One dot for each setting; the other keys differ as well.",
        x_ticks=tuple((place(tick), short(tick)) for tick in range_ticks(variation)),
    )


def range_ticks(variation: Variation) -> list[float]:
    """Round values of a range; of a logarithmic one 1, 2 and 5 times powers of ten, or fewer where it is long."""
    if not variation.log:
        return nice_ticks(variation.low, variation.high, 4, whole=variation.whole)
    powers = range(math.floor(math.log10(variation.low)), math.ceil(math.log10(variation.high)) + 1)
    sizes = (1.0, 2.0, 5.0) if len(powers) <= 3 else (1.0, 3.0) if len(powers) <= 4 else (1.0,)
    every = [size * 10.0**power for power in powers for size in sizes]
    return [tick for tick in every if variation.low <= tick * 1.0000001 and tick <= variation.high * 1.0000001]


# -- interactions -------------------------------------------------------------------------------------------------


def interaction_charts(
    manifest: SweepManifest, judged: Sequence[RankedSetting], effects: Sequence[KeyEffect]
) -> list[Picture]:
    """Heat maps of pairs of keys, and parallel coordinates of all."""
    if len(manifest.variations) < 2:
        return []
    spans = {effect.key: effect.span for effect in effects}
    ordered = sorted(manifest.variations, key=lambda each: -spans.get(each.key, math.inf))
    pairs = [] if manifest.sampler == "one-at-a-time" else list(itertools.combinations(ordered, 2))
    maps = [heat_map(manifest, judged, one, other) for one, other in pairs[:MAX_HEAT_MAPS]]
    lines = _parallel(manifest, judged)
    return [*maps, *([lines] if lines is not None else [])]


def heat_map(manifest: SweepManifest, judged: Sequence[RankedSetting], across: Variation, up: Variation) -> HeatMap:
    """The mean of the settings in each cell; ranges are cut into equal parts."""
    columns, rows = _cells_of(across), _cells_of(up)
    inside: dict[tuple[int, int], list[float]] = {}
    for each in judged:
        if each.interval is not None and not each.diverged:
            place = (_cell(up, each.values[up.key]), _cell(across, each.values[across.key]))
            inside.setdefault(place, []).append(each.interval.mean)
    cells = tuple(
        tuple(
            sum(found) / len(found) if (found := inside.get((row, column))) else None for column in range(len(columns))
        )
        for row in range(len(rows))
    )
    others = len(manifest.variations) - 2
    note = f"{manifest.metric}, darker is higher" + (f"; mean over the other {others} keys." if others else ".")
    return HeatMap(f"{_last(across.key)} and {_last(up.key)}", TOGETHER, columns, rows, cells, across.key, up.key, note)


def _cells_of(variation: Variation) -> tuple[str, ...]:
    if not variation.is_range:
        return tuple(shown(value) for value in _sorted_values(variation))
    edges = [_value_at(variation, place / BINS) for place in range(BINS + 1)]
    return tuple(f"{shown(low)}–{shown(high)}" for low, high in itertools.pairwise(edges))


def _sorted_values(variation: Variation) -> list[Any]:
    numbers = all(isinstance(value, int | float) for value in variation.values)
    return sorted(variation.values) if numbers else list(variation.values)


def _cell(variation: Variation, value: Any) -> int:
    if not variation.is_range:
        return _sorted_values(variation).index(value)
    return min(BINS - 1, int(_part(variation, float(value)) * BINS))


def _part(variation: Variation, value: float) -> float:
    """Where a value lies in its range, from 0 to 1."""
    if variation.log:
        return math.log(value / variation.low) / math.log(variation.high / variation.low)
    return (value - variation.low) / (variation.high - variation.low)


def _value_at(variation: Variation, part: float) -> float:
    if variation.log:
        return float(f"{variation.low * (variation.high / variation.low) ** part:.3g}")
    return float(f"{variation.low + part * (variation.high - variation.low):.4g}")


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _parallel(manifest: SweepManifest, judged: Sequence[RankedSetting]) -> ParallelCoordinates | None:
    known = [each for each in judged if each.interval is not None]
    if len(known) < 2:
        return None
    means = [each.interval.mean for each in known if each.interval is not None]
    low, high = min(means), max(means)
    worth = [(mean - low) / (high - low) if high > low else 0.5 for mean in means]
    strengths = [1.0 - part for part in worth] if manifest.direction == "min" else worth
    axes = [_axis(variation) for variation in manifest.variations]
    axes.append(ParallelAxis(manifest.metric, ((0.0, short(low)), (1.0, short(high)))))
    lines = [
        (*(_height(variation, each.values[variation.key]) for variation in manifest.variations), worth[place])
        for place, each in enumerate(known)
    ]
    names = tuple(f"{in_words(each.values)}: {short(mean)}" for each, mean in zip(known, means, strict=True))
    note = "One line for each setting; the best is orange, and better ones are stronger."
    return ParallelCoordinates("All settings", TOGETHER, tuple(axes), tuple(lines), tuple(strengths), names, note)


def _axis(variation: Variation) -> ParallelAxis:
    if variation.is_range:
        ticks = tuple((_part(variation, tick), short(tick)) for tick in range_ticks(variation))
        return ParallelAxis(_last(variation.key), ticks)
    values = _sorted_values(variation)
    ticks = tuple((place / max(len(values) - 1, 1), shown(value)) for place, value in enumerate(values))
    return ParallelAxis(_last(variation.key), ticks)


def _height(variation: Variation, value: Any) -> float:
    if variation.is_range:
        return _part(variation, float(value))
    values = _sorted_values(variation)
    return values.index(value) / max(len(values) - 1, 1) if value in values else 0.5


# -- curves -------------------------------------------------------------------------------------------------------


def setting_curves(
    manifest: SweepManifest, judged: Sequence[RankedSetting], results: Sequence[TrialResult], own: Mapping[str, Any]
) -> list[Picture]:
    """The curve of each setting with its interval over seeds: by key where one key is varied at a time."""
    curves = {number: setting_curve(results, number) for number in range(len(manifest.settings))}
    if manifest.sampler == "one-at-a-time":
        return _curves_by_key(manifest, judged, curves, own)
    order = [each for each in ranked(judged, manifest.direction) if curves[each.number]][:MAX_CURVES]
    charts: list[Picture] = []
    for each in order:
        series = [_curve("this setting", curves[each.number], banded=True)]
        if each is not order[0]:
            series.append(_curve("the best setting", curves[order[0].number], banded=False))
        title = differing(each.values, {})
        charts.append(
            Chart(title, LEARNED, tuple(series), manifest.metric, "The best setting." if each is order[0] else "")
        )
    return charts


def setting_curve(results: Sequence[TrialResult], number: int) -> list[tuple[int, MeanInterval]]:
    """The mean over seeds with its interval, at the steps that all seeds with any value recorded."""
    mine = [dict(result.points) for result in results if result.trial.setting == number and result.points]
    shared = sorted(set.intersection(*(set(points) for points in mine))) if mine else []
    found: list[tuple[int, MeanInterval]] = []
    for step in shared:
        values = [points[step] for points in mine if math.isfinite(points[step])]
        if values:
            found.append((step, mean_interval(values)))
    return found


def _curve(name: str, points: Sequence[tuple[int, MeanInterval]], *, banded: bool) -> Series:
    band = tuple(_bar(step, interval) for step, interval in points if banded and interval.low is not None)
    return Series(name, tuple((float(step), interval.mean) for step, interval in points), "line", band)


def _curves_by_key(
    manifest: SweepManifest,
    judged: Sequence[RankedSetting],
    curves: Mapping[int, Sequence[tuple[int, MeanInterval]]],
    own: Mapping[str, Any],
) -> list[Picture]:
    charts: list[Picture] = []
    for variation in manifest.variations:
        key = variation.key
        mine = [
            each
            for each in judged
            if curves[each.number] and all(each.values[other] == own[other] for other in each.values if other != key)
        ]
        shown_settings = sorted(mine, key=lambda each: each.number)[:MAX_LINES]
        series = [_curve(shown(each.values[key]), curves[each.number], banded=True) for each in shown_settings]
        if series:
            charts.append(Chart(key, LEARNED, tuple(series), manifest.metric, "The first is the recipe's own value."))
    return charts
