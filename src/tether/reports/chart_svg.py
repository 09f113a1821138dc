"""Charts drawn as SVG text with only the standard library.

A chart is readable without colour (each series has its own marker), by a screen reader (a title and a description), in
light and dark mode, and at the width of a phone. `standalone` makes a file with its own style and heading; otherwise
the page provides `chart_css()` and the heading.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise

from tether.reports.charts import (
    Chart,
    Point,
    Scale,
    Series,
    bar_width,
    drawable,
    nice_ticks,
    runs_of,
    short,
    text_width,
    thinned,
    tick_label,
    x_bounds,
    y_bounds,
)
from tether.reports.safe_text import escape

WIDTH, HEIGHT = 400.0, 224.0
FONT = 11.0
GREY = 5  # the last colour of the style


@dataclass(frozen=True)
class Plot:
    """The layout of a chart: its two scales, and the positions of the text rows above the plot."""

    x: Scale
    y: Scale
    x_ticks: list[tuple[float, str]]
    y_ticks: list[float]
    legend: list[list[tuple[int, Series]]]
    top: float  # of the text rows
    colours: list[int]  # of the series


def plan(chart: Chart, heading: float) -> Plot:
    """The layout of a chart below a heading of `heading` pixels."""
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
    nice = nice_ticks(x_low, x_high, 5, whole=whole and not any(s.kind == "bars" for s in chart.series))
    x_ticks = list(chart.x_ticks) or list(zip(nice, tick_labels(nice), strict=True))
    x, y = Scale(x_low, x_high, left, right), Scale(low, high, bottom, top)
    return Plot(x, y, x_ticks, y_ticks, legend, heading, _colours(chart))


def _colours(chart: Chart) -> list[int]:
    """A colour for each series; the raw dots behind a smoothed line are grey."""
    behind = any(series.kind == "line" for series in chart.series)
    raw = [behind and series.kind == "dots" for series in chart.series]
    turns = [place - sum(raw[:place]) for place in range(len(raw))]
    return [GREY if grey else turn % GREY for grey, turn in zip(raw, turns, strict=True)]


def _around(low: float, high: float) -> tuple[float, float]:
    """The range 0 to 1, or 0.5 to 1, if the values look like probabilities."""
    if low >= -0.05 and high <= 1.05:
        return (0.45 if low >= 0.45 else 0.0), 1.0
    return low, high


def line_ends(chart: Chart) -> list[tuple[int, list[Point]]]:
    """(index, last segment) of each line, where its last value is written."""
    lines = [(place, runs_of(series.points)) for place, series in enumerate(chart.series) if series.kind == "line"]
    return [(place, runs[-1]) for place, runs in lines if runs]


def tick_labels(ticks: list[float]) -> list[str]:
    """The text of each tick."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0 if ticks else 1.0
    return [tick_label(tick, step) for tick in ticks]


def _legend_rows(chart: Chart) -> list[list[tuple[int, Series]]]:
    """The series in each row of the legend; empty for a single series, which the title names."""
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


# -- drawing ------------------------------------------------------------------------------------------------------

MARGIN = 10.0  # around a standalone chart
MAX_HITS = 120


@cache
def chart_css() -> str:
    """The style of every chart."""
    return files("tether.reports").joinpath("chart_style.css").read_text(encoding="utf-8")


def render_svg(chart: Chart, *, name: str = "chart", standalone: bool = False) -> str:
    """A chart as one `<svg>` element; `name` must be unique on a page."""
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
    plot = plan(chart, heading=22.0 if standalone else 0.0)
    height = HEIGHT + plot.top
    edge = MARGIN if standalone else 0.0
    size = (WIDTH + 2 * edge, height + 2 * edge)
    own = f' xmlns="http://www.w3.org/2000/svg" width="{1.4 * size[0]:g}" height="{1.4 * size[1]:g}"'
    parts = [
        f'<svg{own if standalone else ""} class="chart" viewBox="{-edge:g} {-edge:g} {size[0]:g} {size[1]:g}" '
        f'role="img" aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{escape(chart.title)}</title>',
        f'<desc id="{name}-desc">{escape(describe(chart))}</desc>',
    ]
    if standalone:
        parts.append(f"<style>{chart_css()}</style>")
        parts.append(f'<rect class="paper" x="{-edge:g}" y="{-edge:g}" width="{size[0]:g}" height="{size[1]:g}"/>')
        parts.append(draw_text(0, 13, chart.title, "head"))
    if any(runs_of(series.points) for series in chart.series):
        parts += [*_axes(chart, plot), *_legend(chart, plot), *_marks(chart, plot), *_every_series(chart, plot)]
        parts += [] if standalone else _hits(chart, plot)
    else:
        parts += [
            f'<rect class="grid" fill="none" x=".5" y="{plot.top + 8:g}" width="{WIDTH - 1:g}" height="190" rx="4"/>',
            draw_text(WIDTH / 2, plot.top + 107, "no data was recorded for this chart", "soft", "middle"),
        ]
    return "\n".join([*parts, "</svg>"])


def describe(chart: Chart) -> str:
    """A description of a chart: where each series starts and ends, and its extremes."""
    words: list[str] = []
    for series in chart.series:
        points = [point for run in runs_of(series.points) for point in run]
        if not points:
            words.append(f"{series.name}: no data.")
        elif series.kind == "line":
            (first_x, first), (last_x, last) = points[0], points[-1]
            low, high = min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])
            words.append(
                f"{series.name}: {short(first)} at {chart.x_label} {short(first_x)}, {short(last)} at {short(last_x)}; "
                f"lowest {short(low[1])} at {short(low[0])}, highest {short(high[1])} at {short(high[0])}."
            )
        else:
            listed = ", ".join(f"{short(y)} at {short(x)}" for x, y in points[:30])
            words.append(f"{series.name}: {listed}{', and more' if len(points) > 30 else ''}.")
    return " ".join([*words, chart.note]).strip()


def _axes(chart: Chart, plot: Plot) -> list[str]:
    left, right, base = plot.x.start, plot.x.end, plot.y.start
    parts: list[str] = []
    for tick, label in zip(plot.y_ticks, tick_labels(plot.y_ticks), strict=True):
        y = plot.y(tick)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(draw_text(left - 6, y + 3.8, label, "soft", "end"))
    parts.append(f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{base:.1f}" y2="{base:.1f}"/>')
    for tick, label in plot.x_ticks:
        x = plot.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:.1f}" y2="{base + 4:.1f}"/>')
        parts.append(draw_text(x, base + 15, label, "soft", "middle"))
    if chart.x_label:
        parts.append(draw_text(right, base + 30, f"{chart.x_label} →", "soft", "end"))
    if chart.y_label:
        parts.append(draw_text(0, plot.top + 10, f"↑ {chart.y_label}", "soft"))
    return parts


def _legend(chart: Chart, plot: Plot) -> list[str]:
    parts: list[str] = []
    for row, members in enumerate(plot.legend):
        x, y = 0.0, plot.top + (25.0 if chart.y_label else 10.0) + 17.0 * row
        for place, series in members:
            if series.kind == "line":
                parts.append(f'<path class="line s{plot.colours[place]}" d="M{x:.1f} {y - 4:.1f}h14"/>')
            parts.append(_shape(plot.colours[place], series.kind, x + 7.0, y - 4.0))
            parts.append(draw_text(x + 19.0, y, series.name))
            x += 32.0 + text_width(series.name, FONT)
    return parts


def _marks(chart: Chart, plot: Plot) -> list[str]:
    left, right, base, top = plot.x.start, plot.x.end, plot.y.start, plot.y.end
    parts: list[str] = []
    if chart.diagonal:
        parts.append(f'<path class="diagonal" d="M{left:.1f} {base:.1f}L{right:.1f} {top:.1f}"/>')
    for mark in chart.marks:
        if not drawable(mark.value):
            continue
        if mark.axis == "x":
            x = plot.x(mark.value)
            parts.append(f'<path class="mark" d="M{x:.1f} {top:.1f}V{base:.1f}"/>')
            before = x + text_width(mark.label, FONT) + 6 > right
            parts.append(
                draw_text(x - 5 if before else x + 5, base - 6, mark.label, "soft halo", "end" if before else "")
            )
        else:
            y = plot.y(mark.value)
            parts.append(f'<path class="mark" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
            ends = [[abs(plot.y(run[place][1]) - y) for _, run in line_ends(chart)] for place in (0, -1)]
            after = min(ends[1], default=0.0) > min(ends[0], default=0.0)  # the side that is further from the lines
            place, anchor = (right - 4, "end") if after else (left + 5, "")
            parts.append(draw_text(place, y + 13 if y - 5 < top + 8 else y - 5, mark.label, "soft halo", anchor))
    return parts


def _every_series(chart: Chart, plot: Plot) -> list[str]:
    parts: list[str] = []
    width = bar_width(chart.series)
    over_dots = any(series.kind == "line" for series in chart.series)
    for colour, series in zip(plot.colours, chart.series, strict=True):
        runs = runs_of(series.points)
        parts += _band(colour, series, plot)
        if series.kind == "bars":
            parts += [_bar(colour, point, width, plot) for run in runs for point in run]
        elif series.kind == "dots":
            faint = " faint" if over_dots else ""
            size = 2.2 if over_dots else 4.2
            parts += [
                f'<circle class="dot fill{faint} s{colour}" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="{size}"/>'
                for run in runs
                for x, y in thinned(run)
            ]
        else:
            for run in runs:
                path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in thinned(run))
                parts.append(f'<polyline class="line s{colour}" points="{path}"/>')
                parts += [_shape(colour, "line", plot.x(run[0][0]), plot.y(run[0][1]))] if len(run) == 1 else []
    return parts + _end_labels(chart, plot)


def _band(colour: int, series: Series, plot: Plot) -> list[str]:
    """The interval of a series: an area along a line, error bars at dots."""
    rows = [(plot.x(x), plot.y(low), plot.y(high)) for x, low, high in series.band if drawable(low) and drawable(high)]
    if series.kind == "dots":
        return [
            f'<path class="line bounds s{colour}" d="M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {low:.1f}h8'
            f'M{x - 4:.1f} {high:.1f}h8"/>'
            for x, low, high in rows
        ]
    edge = [f"{x:.1f},{high:.1f}" for x, _, high in rows] + [f"{x:.1f},{low:.1f}" for x, low, _ in reversed(rows)]
    return [f'<polygon class="fill area s{colour}" points="{" ".join(edge)}"/>'] if rows else []


def _end_labels(chart: Chart, plot: Plot) -> list[str]:
    """The last value of each line at its end; overlapping labels are moved apart."""
    ends = sorted((plot.y(run[-1][1]), place, run[-1]) for place, run in line_ends(chart))
    parts: list[str] = []
    rows: list[float] = []
    for y, _, _ in ends:
        rows.append(max(y, rows[-1] + 12.5) if rows else y)
    spill = max(0.0, rows[-1] - plot.y.start) if rows else 0.0
    for row, (y, place, (x, value)) in zip(rows, ends, strict=True):
        parts.append(_shape(plot.colours[place], "line", plot.x(x), y))
        parts.append(draw_text(plot.x.end + 8, row - spill + 4, short(value), f"value s{plot.colours[place]}"))
    return parts


def _bar(colour: int, point: Point, width: float, plot: Plot) -> str:
    left, right = plot.x(point[0] - width / 2.0), plot.x(point[0] + width / 2.0)
    ends = sorted((plot.y(0.0), plot.y(point[1])))
    return (
        f'<rect class="bar fill s{colour}" x="{left + 0.75:.1f}" y="{ends[0]:.1f}" '
        f'width="{max(right - left - 1.5, 1.0):.1f}" height="{ends[1] - ends[0]:.1f}"/>'
    )


def _shape(colour: int, kind: str, x: float, y: float) -> str:
    """The marker of a series: circle, square, triangle, diamond in turn, so that colour is not needed."""
    style = f'class="dot fill s{colour}"'
    if kind == "bars":
        return f'<rect {style} x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" rx="1.5"/>'
    if kind == "dots" or colour % 4 == 0:
        return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    paths = {
        1: f"M{x - 3.6:.1f} {y - 3.6:.1f}h7.2v7.2h-7.2z",
        2: f"M{x:.1f} {y - 4.8:.1f}l4.6 8h-9.2z",
        3: f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
    }
    return f'<path {style} d="{paths[colour % 4]}"/>'


def _hits(chart: Chart, plot: Plot) -> list[str]:
    """Invisible columns whose tooltips show the value of every series; browsers need no script for this."""
    values: dict[float, list[str]] = {}
    for series in chart.series:
        for x, y in (point for run in runs_of(series.points) for point in run):
            values.setdefault(x, []).append(f"{series.name}: {short(y)}")
    names = dict(chart.x_ticks)
    xs = sorted(values)
    xs = xs[:: -(-len(xs) // MAX_HITS)] if xs else xs
    pixels = [plot.x(x) for x in xs]
    middles = [(one + two) / 2.0 for one, two in pairwise(pixels)]
    edges = [plot.x.start, *middles, plot.x.end]
    top, height = plot.y.end, plot.y.start - plot.y.end
    return [
        f'<g class="hit"><title>{escape(f"{chart.x_label} {names.get(x, short(x))}")}&#10;'
        f"{escape('; '.join(values[x]))}</title>"
        f'<line x1="{pixel:.1f}" x2="{pixel:.1f}" y1="{top:.1f}" y2="{top + height:.1f}"/>'
        f'<rect x="{low:.1f}" y="{top:.1f}" width="{max(high - low, 0.0):.1f}" height="{height:.1f}"/></g>'
        for x, pixel, low, high in zip(xs, pixels, edges, edges[1:], strict=False)
    ]


def draw_text(x: float, y: float, words: str, style: str = "", anchor: str = "") -> str:
    """A text element; empty where there are no words."""
    named = f' class="{style}"' if style else ""
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{placed}>{escape(words)}</text>' if words else ""
