"""Where everything of a chart goes: its scales, its ticks, the rows of its legend, its colours."""

from __future__ import annotations

from dataclasses import dataclass

from tether.reports.chart_scale import (
    Scale,
    drawable,
    nice_ticks,
    runs_of,
    short,
    text_width,
    tick_label,
    x_bounds,
    y_bounds,
)
from tether.reports.charts import Chart, Point, Series

WIDTH, HEIGHT = 400.0, 224.0
FONT = 11.0
GREY = 5  # the last colour of the style


@dataclass(frozen=True)
class Plot:
    """Where things are: the two scales, and the row at which each row of words above the plot stands."""

    x: Scale
    y: Scale
    x_ticks: list[float]
    y_ticks: list[float]
    legend: list[list[tuple[int, Series]]]
    top: float  # of the words
    colours: list[int]  # of the series


def plan(chart: Chart, heading: float) -> Plot:
    """Where everything of a chart goes, below a heading of so many pixels."""
    low, high = y_bounds(chart)
    x_low, x_high = x_bounds(chart)
    if chart.diagonal:
        low, high = x_low, x_high = _around(min(low, x_low), max(high, x_high))
    y_ticks = nice_ticks(low, high, 4)
    left = 8.0 + max((text_width(label, FONT) for label in tick_labels(y_ticks)), default=0.0)
    ends = [text_width(short(run[-1][1]), FONT) for _, run in line_ends(chart)]
    right = WIDTH - (14.0 + max(ends) if ends else 6.0)
    legend = _legend_rows(chart)
    top = heading + (22.0 if chart.y_label else 8.0) + 17.0 * len(legend)
    bottom = heading + HEIGHT - (34.0 if chart.x_label else 20.0)
    whole = all(x == int(x) for series in chart.series for x, y in series.points if drawable(x))
    x_ticks = nice_ticks(x_low, x_high, 5, whole=whole and not any(s.kind == "bars" for s in chart.series))
    x, y = Scale(x_low, x_high, left, right), Scale(low, high, bottom, top)
    return Plot(x, y, x_ticks, y_ticks, legend, heading, _colours(chart))


def _colours(chart: Chart) -> list[int]:
    """A colour for each series; dots behind a line are what it was smoothed from, and stay grey."""
    behind = any(series.kind == "line" for series in chart.series)
    raw = [behind and series.kind == "dots" for series in chart.series]
    turns = [place - sum(raw[:place]) for place in range(len(raw))]
    return [GREY if grey else turn % GREY for grey, turn in zip(raw, turns, strict=True)]


def _around(low: float, high: float) -> tuple[float, float]:
    """The range of probabilities where the values look like them: a whole of 0 to 1, or its upper half."""
    if low >= -0.05 and high <= 1.05:
        return (0.45 if low >= 0.45 else 0.0), 1.0
    return low, high


def line_ends(chart: Chart) -> list[tuple[int, list[Point]]]:
    """(place, last run) of each line: where its last value is written."""
    lines = [(place, runs_of(series.points)) for place, series in enumerate(chart.series) if series.kind == "line"]
    return [(place, runs[-1]) for place, runs in lines if runs]


def tick_labels(ticks: list[float]) -> list[str]:
    """Ticks as they are written."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0 if ticks else 1.0
    return [tick_label(tick, step) for tick in ticks]


def _legend_rows(chart: Chart) -> list[list[tuple[int, Series]]]:
    """Which series stand in which row of the legend; none for a single series, which the title names."""
    if len(chart.series) < 2:
        return []
    rows: list[list[tuple[int, Series]]] = [[]]
    used = 0.0
    for place, series in enumerate(chart.series):
        width = 30.0 + text_width(series.name, FONT)
        if rows[-1] and used + width > WIDTH:
            rows.append([])
            used = 0.0
        rows[-1].append((place, series))
        used += width
    return rows
