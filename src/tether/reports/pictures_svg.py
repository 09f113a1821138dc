"""Heat maps and parallel coordinates as SVG text, in the style of `chart_svg`, and one function for all pictures."""

from __future__ import annotations

from tether.reports.chart_svg import FONT, MARGIN, WIDTH, chart_css, draw_text, render_svg
from tether.reports.charts import Chart, HeatMap, ParallelCoordinates, Picture, short, text_width
from tether.reports.safe_text import escape

CELL_HEIGHT = 34.0
PARALLEL_HEIGHT = 200.0
PARALLEL_WIDTH = 844.0  # two charts and the space between them
STRONGEST = 0.62  # opacity of the best cell, below which text on it stays readable


def draw_picture(picture: Picture, *, name: str = "chart", standalone: bool = False) -> str:
    """A picture of any kind as one `<svg>` element; `name` must be unique on a page."""
    if isinstance(picture, Chart):
        return render_svg(picture, name=name, standalone=standalone)
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
    if isinstance(picture, HeatMap):
        width, height, parts = _heat_map(picture)
        described = _describe_heat_map(picture)
    else:
        width, height, parts = _parallel(picture)
        described = _describe_parallel(picture)
    return _framed(picture.title, f"{described} {picture.note}".strip(), name, (width, height), parts, standalone)


def _framed(
    title: str, described: str, name: str, size: tuple[float, float], parts: list[str], standalone: bool
) -> str:
    edge, head = (MARGIN, 22.0) if standalone else (0.0, 0.0)
    width, height = size[0] + 2 * edge, size[1] + head + 2 * edge
    own = f' xmlns="http://www.w3.org/2000/svg" width="{1.4 * width:g}" height="{1.4 * height:g}"' if standalone else ""
    lines = [
        f'<svg{own} class="chart" viewBox="{-edge:g} {-edge - head:g} {width:g} {height:g}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">{escape(title)}</title>',
        f'<desc id="{name}-desc">{escape(described)}</desc>',
    ]
    if standalone:
        lines.append(f"<style>{chart_css()}</style>")
        lines.append(f'<rect class="paper" x="{-edge:g}" y="{-edge - head:g}" width="{width:g}" height="{height:g}"/>')
        lines.append(draw_text(0, 13 - head, title, "head"))
    return "\n".join([*lines, *parts, "</svg>"])


# -- heat maps ----------------------------------------------------------------------------------------------------


def _heat_map(picture: HeatMap) -> tuple[float, float, list[str]]:
    known = [value for row in picture.cells for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    left = 10.0 + max((text_width(label, FONT) for label in picture.rows), default=0.0)
    top = 22.0
    width = (WIDTH - left) / max(len(picture.columns), 1)
    parts = [draw_text(0, 12, f"↑ {picture.y_label}", "soft")]
    for row, values in enumerate(reversed(picture.cells)):  # the lowest value is at the bottom
        y = top + CELL_HEIGHT * row
        parts.append(draw_text(left - 6, y + 21, picture.rows[-1 - row], "soft", "end"))
        for column, value in enumerate(values):
            x = left + width * column
            place = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{CELL_HEIGHT - 2:.1f}" rx="3"'
            if value is None:
                parts.append(f'<rect class="grid" fill="none" {place}/>')
                continue
            part = (value - low) / (high - low) if high > low else 0.5
            parts.append(f'<rect class="fill s0" fill-opacity="{0.05 + (STRONGEST - 0.05) * part:.3f}" {place}/>')
            style = "head" if value == high else ""
            parts.append(draw_text(x + width / 2, y + 21, short(value), style, "middle"))
    base = top + CELL_HEIGHT * len(picture.rows)
    parts += [
        draw_text(left + width * (place + 0.5), base + 15, label, "soft", "middle")
        for place, label in enumerate(picture.columns)
    ]
    parts.append(draw_text(WIDTH, base + 31, f"{picture.x_label} →", "soft", "end"))
    return WIDTH, base + 36.0, parts


def _describe_heat_map(picture: HeatMap) -> str:
    words = [
        f"{picture.y_label} {row}, {picture.x_label} {column}: {short(value)}."
        for row, values in zip(picture.rows, picture.cells, strict=True)
        for column, value in zip(picture.columns, values, strict=True)
        if value is not None
    ]
    return " ".join(words[:100])


# -- parallel coordinates -----------------------------------------------------------------------------------------


def _parallel(picture: ParallelCoordinates) -> tuple[float, float, list[str]]:
    many = len(picture.axes)
    left, right, top = 34.0, PARALLEL_WIDTH - 64.0, 42.0
    gap = (right - left) / max(many - 1, 1)
    base = top + PARALLEL_HEIGHT
    parts: list[str] = []
    order = sorted(range(len(picture.lines)), key=lambda place: picture.strengths[place])  # the best on top
    for place in order:
        strength = picture.strengths[place]
        points = " ".join(
            f"{left + gap * axis:.1f},{base - PARALLEL_HEIGHT * part:.1f}"
            for axis, part in enumerate(picture.lines[place])
        )
        best = place == order[-1]
        parts.append(
            f'<polyline class="thread s{1 if best else 0}" stroke-opacity="{1 if best else 0.12 + 0.6 * strength:.2f}" '
            f'stroke-width="{2.6 if best else 1.3}" points="{points}"><title>{escape(picture.names[place])}</title>'
            "</polyline>"
        )
    for axis, about in enumerate(picture.axes):
        x = left + gap * axis
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{base:.1f}"/>')
        anchor = "" if axis == 0 else "end" if axis == many - 1 else "middle"
        edge = 0.0 if axis == 0 else PARALLEL_WIDTH if axis == many - 1 else x
        parts.append(draw_text(edge, top - (26 if axis % 2 else 11), about.label, "halo", anchor))
        for part, label in about.ticks:
            y = base - PARALLEL_HEIGHT * part
            parts.append(f'<line class="axis" x1="{x - 3:.1f}" x2="{x + 3:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(draw_text(x + 6, y + 4, label, "soft halo"))
    return PARALLEL_WIDTH, base + 14.0, parts


def _describe_parallel(picture: ParallelCoordinates) -> str:
    return f"{len(picture.lines)} settings over {', '.join(axis.label for axis in picture.axes)}."
