"""A run's report as values (`ReportContent`), as one HTML page, and as Markdown with SVG charts beside it.

The HTML file needs nothing else: no script, no font, no request. All text passes through `escape`. The page's content
security policy also forbids scripts and requests, so an escaping bug could do no harm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

from tether.errors import StorageError
from tether.reports.chart_svg import chart_css
from tether.reports.charts import (
    Chart,
    ChartGroup,
    Mark,
    ParallelCoordinates,
    Picture,
    Series,
    calibration_chart,
    group_charts,
    margin_histogram,
    short,
)
from tether.reports.pictures_svg import draw_picture
from tether.reports.safe_text import duration, escape, fenced, markdown

Level = Literal["good", "note", "warning"]


@dataclass(frozen=True)
class Figure:
    """A formatted headline number, such as "87 %"; `detail` says what it is based on."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class ReportFinding:
    """A finding in words. The first sentence is emphasised."""

    level: Level
    text: str


@dataclass(frozen=True)
class ScorePart:
    """One part of the true rule on one sample: 0 is not met, 1 is met; values in between are shown as a number."""

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Sample:
    """The answers of two models to one held-out prompt, with the true score of each."""

    prompt: str
    before: str
    after: str
    before_score: float | None = None
    after_score: float | None = None
    parts: tuple[ScorePart, ...] = ()


@dataclass(frozen=True)
class ReportTable:
    """A table: its heading, one line about it, and its rows. The first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class NextStep:
    """A suggestion for what to do next, with a command if there is one."""

    title: str
    text: str
    command: str | None = None


@dataclass(frozen=True)
class ReportContent:
    """The content of a report. Only the title is required; empty parts are left out."""

    title: str
    subtitle: str = ""
    headline: tuple[Figure, ...] = ()
    findings: tuple[ReportFinding, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    charts: tuple[ChartGroup, ...] = ()
    samples: tuple[Sample, ...] = ()
    stages: tuple[tuple[str, float], ...] = ()
    recipe_text: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    next_steps: tuple[NextStep, ...] = ()
    before_name: str = "Before"
    after_name: str = "After"


# -- Markdown -----------------------------------------------------------------------------------------------------

_MARKDOWN_LEVELS = {"good": "✅", "note": "▫️", "warning": "⚠️"}


class MarkdownReport(NamedTuple):
    """The text, and the SVG of each chart by file name, for the folder that the text links to."""

    text: str
    charts: dict[str, str]


def render_markdown(content: ReportContent, charts_folder: str = "charts") -> MarkdownReport:
    """The report's text with links into `charts_folder`, and the files for that folder."""
    charts: dict[str, str] = {}
    blocks = [f"# {markdown(content.title)}", markdown(content.subtitle)]
    if content.headline:
        rows = [
            f"| {markdown(figure.label)} | **{markdown(figure.value)}** | {markdown(figure.detail)} |"
            for figure in content.headline
        ]
        blocks.append("\n".join(["| | | |", "|---|---|---|", *rows]))
    if content.findings:
        blocks.append("## What happened")
        blocks.append(
            "\n".join(f"- {_MARKDOWN_LEVELS[finding.level]} {markdown(finding.text)}" for finding in content.findings)
        )
    for table in content.tables:
        blocks += _markdown_table(table)
    if content.samples:
        blocks.append("## Before and after")
        for sample in content.samples:
            blocks += _markdown_sample(content, sample)
    blocks += _charts(content, charts_folder, charts)
    blocks += _endings(content)
    return MarkdownReport("\n\n".join(block for block in blocks if block) + "\n", charts)


def _markdown_table(table: ReportTable) -> list[str]:
    head = [f"| {' | '.join(map(markdown, table.columns))} |", f"|{'---|' * len(table.columns)}"]
    rows = [f"| {' | '.join(map(markdown, row))} |" for row in table.rows]
    return [f"## {markdown(table.title)}", markdown(table.note), "\n".join([*head, *rows])]


def _markdown_sample(content: ReportContent, sample: Sample) -> list[str]:
    blocks = ["---", f"**Prompt**\n\n{fenced(sample.prompt, 'text')}"]
    sides = (
        (content.before_name, sample.before, sample.before_score, [(part.name, part.before) for part in sample.parts]),
        (content.after_name, sample.after, sample.after_score, [(part.name, part.after) for part in sample.parts]),
    )
    for name, text, score, parts in sides:
        scored = f", true score {score:.2f}" if score is not None else ""
        signs = " · ".join(f"{markdown(part)} {part_sign(value)}" for part, value in parts)
        blocks.append(f"**{markdown(name)}**{scored}{f' ({signs})' if signs else ''}\n\n{fenced(text, 'text')}")
    return blocks


def part_sign(value: float) -> str:
    """A tick, a cross, or the number in between."""
    return "✓" if value >= 0.995 else "✗" if value <= 0.005 else short(value)


def _charts(content: ReportContent, folder: str, charts: dict[str, str]) -> list[str]:
    blocks: list[str] = []
    for group in content.charts:
        blocks += [f"## {markdown(group.question)}", markdown(group.answer)]
        for chart in group.charts:
            name = f"{len(charts) + 1:02d}-{_slug(chart.title)}.svg"
            charts[name] = draw_picture(chart, name=name.removesuffix(".svg"), standalone=True) + "\n"
            blocks.append(f"![{markdown(chart.title)}]({folder}/{name})")
            blocks.append(markdown(chart.note))
    return blocks


def _endings(content: ReportContent) -> list[str]:
    blocks: list[str] = []
    if content.stages:
        rows = [f"| {markdown(name)} | {duration(seconds)} |" for name, seconds in content.stages]
        whole = f"| **total** | **{duration(sum(seconds for _, seconds in content.stages))}** |"
        blocks += ["## Where the time went", "\n".join(["| stage | time |", "|---|---:|", *rows, whole])]
    if content.next_steps:
        blocks.append("## What to do next")
        for step in content.next_steps:
            blocks.append(f"**{markdown(step.title)}** — {markdown(step.text)}")
            blocks.append(fenced(step.command, "sh") if step.command else "")
    if content.recipe_text:
        blocks += ["## The recipe", fenced(content.recipe_text, "yaml")]
    if content.environment:
        rows = [f"| {markdown(name)} | {markdown(value)} |" for name, value in content.environment.items()]
        blocks += ["## Where it ran", "\n".join(["| | |", "|---|---|", *rows])]
    return blocks


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40].strip("-") or "chart"


# -- HTML ---------------------------------------------------------------------------------------------------------

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_LEVELS = {"good": ("✓", "Good"), "note": ("·", "Note"), "warning": ("!", "Warning")}
_MARK = (
    '<svg class="mark" viewBox="0 0 26 14" aria-hidden="true"><path d="M4 10C9 10 11 3 21 4"/>'
    '<circle class="post" cx="4" cy="10" r="2.6"/><circle class="end" cx="21.5" cy="4" r="2.6"/></svg>'
)


@cache
def _css() -> str:
    style = files("tether.reports").joinpath("report_style.css").read_text(encoding="utf-8")
    return f"{style}\n{chart_css()}"


def render_html(content: ReportContent) -> str:
    """The whole page."""
    sections = [
        ("happened", "What happened", _findings(content.findings)),
        ("tables", "", "".join(map(_table, content.tables))),
        ("samples", "Before and after", _samples(content)),
        ("curves", "", "".join(_group(group, place) for place, group in enumerate(content.charts))),
        ("time", "Where the time went", _stages(content.stages)),
        ("next", "What to do next", _next_steps(content)),
        ("made", "How it was made", _made(content)),
    ]
    names = {
        "happened": "Findings",
        "tables": "Tables",
        "samples": "Samples",
        "curves": "Curves",
        "time": "Time",
        "next": "Next",
    }
    links = "".join(f'<a href="#{key}">{names[key]}</a>' for key, _, body in sections if body and key in names)
    main = "".join(_section(key, title, body) for key, title, body in sections if body)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="Tether">
<title>{escape(content.title)}</title>
<link rel="icon" href="data:,">
<style>
{_css()}
</style>
</head>
<body>
<header>
<div class="top"><span class="brand">{_MARK}Tether</span><nav aria-label="Parts of this report">{links}</nav></div>
<h1>{escape(content.title)}</h1>
{f'<p class="subtitle">{escape(content.subtitle)}</p>' if content.subtitle else ""}
{_headline(content)}
</header>
<main>
{main}
</main>
<footer>Made by Tether. This page is one file: it loads nothing, runs nothing, and can be sent as it is.</footer>
</body>
</html>
"""


def _section(key: str, title: str, body: str) -> str:
    heading = f"<h2>{title}</h2>" if title else ""
    return f'<section id="{key}">{heading}{body}</section>\n'


def _headline(content: ReportContent) -> str:
    if not content.headline:
        return ""
    figures = "".join(
        f'<div class="figure"><dt>{escape(figure.label)}</dt><dd class="number">{escape(figure.value)}</dd>'
        + (f'<dd class="detail">{escape(figure.detail)}</dd>' if figure.detail else "")
        + "</div>"
        for figure in content.headline
    )
    return f'<dl class="headline">{figures}</dl>'


def _findings(findings: tuple[ReportFinding, ...]) -> str:
    if not findings:
        return ""
    items: list[str] = []
    for finding in findings:
        sign, word = _LEVELS[finding.level]
        first, stop, rest = finding.text.partition(". ")
        items.append(
            f'<li class="{finding.level}"><span class="sign" aria-hidden="true">{sign}</span>'
            f'<p><span class="unseen">{word}: </span><strong>{escape(first + stop.strip())}</strong> {escape(rest)}</p>'
            "</li>"
        )
    return f'<ul class="findings">{"".join(items)}</ul>'


def _table(table: ReportTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table.rows
    )
    note = f'<p class="lead">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="group"><h2>{escape(table.title)}</h2>{note}<div class="wide"><table class="rows"><thead><tr>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div></div>\n"
    )


def _samples(content: ReportContent) -> str:
    scored = any(sample.after_score is not None for sample in content.samples)
    lead = '<p class="lead">Scores and their parts are by the true rule.</p>' if scored else ""
    return lead + "".join(_sample(content, sample) for sample in content.samples) if content.samples else ""


def _sample(content: ReportContent, sample: Sample) -> str:
    before = [(part.name, part.before) for part in sample.parts]
    after = [(part.name, part.after) for part in sample.parts]
    return (
        f'<article class="sample"><h3 class="prompt" dir="auto">{escape(sample.prompt)}</h3><div class="sides">'
        f"{_side('before', content.before_name, sample.before, sample.before_score, before)}"
        f"{_side('after', content.after_name, sample.after, sample.after_score, after)}</div></article>\n"
    )


def _side(style: str, name: str, text: str, score: float | None, parts: list[tuple[str, float]]) -> str:
    scored = f'<span class="score" title="score by the true rule">{score:.2f}</span>' if score is not None else ""
    body = f"<p>{escape(text)}</p>" if text.strip() else '<p class="nothing">(an empty answer)</p>'
    chips = "".join(_chip(part, value) for part, value in parts)
    listed = f'<ul class="chips">{chips}</ul>' if chips else ""
    return (
        f'<div class="side {style}"><h4>{escape(name)}{scored}</h4>'
        f'<div class="answer" dir="auto">{body}</div>{listed}</div>'
    )


def _chip(name: str, value: float) -> str:
    sign = part_sign(value)
    style, word = {"✓": ("met", "met"), "✗": ("unmet", "not met")}.get(sign, ("partly", "partly met"))
    said = f'<span class="unseen">, {word}</span>'
    return f'<li class="{style}"><span aria-hidden="true">{sign}</span>{escape(name)}{said}</li>'


def _group(group: ChartGroup, place: int) -> str:
    charts = "".join(_figure(chart, f"chart-{place}-{number}") for number, chart in enumerate(group.charts))
    answer = f'<p class="lead">{escape(group.answer)}</p>' if group.answer else ""
    return f'<div class="group"><h2>{escape(group.question)}</h2>{answer}<div class="charts">{charts}</div></div>\n'


def _figure(chart: Picture, name: str) -> str:
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    broad = ' class="broad"' if isinstance(chart, ParallelCoordinates) else ""
    return (
        f"<figure{broad}><figcaption><h3>{escape(chart.title)}</h3>{note}</figcaption>"
        f"{draw_picture(chart, name=name)}</figure>\n"
    )


def _stages(stages: tuple[tuple[str, float], ...]) -> str:
    """One row per stage; each bar starts where the previous one ended."""
    known = [(name, seconds if 0.0 <= seconds < 1e9 else 0.0) for name, seconds in stages]
    whole = sum(seconds for _, seconds in known)
    rows: list[str] = []
    begun = 0.0
    for (name, seconds), (_, said) in zip(known, stages, strict=True):
        left, width = (100.0 * begun / whole, 100.0 * seconds / whole) if whole else (0.0, 0.0)
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="track"><div style="margin-left:{left:.2f}%;'
            f'width:{width:.2f}%"></div></td><td>{duration(said)}</td></tr>'
        )
        begun += seconds
    if not rows:
        return ""
    total = f'<tr class="total"><th scope="row">All of it</th><td></td><td>{duration(whole)}</td></tr>'
    return f'<table class="stages"><tbody>{"".join(rows)}{total}</tbody></table>'


def _next_steps(content: ReportContent) -> str:
    if not content.next_steps:
        return ""
    items = "".join(
        f"<li><h3>{escape(step.title)}</h3><p>{escape(step.text)}</p>"
        + (f"<pre><code>{escape(step.command)}</code></pre>" if step.command else "")
        + "</li>"
        for step in content.next_steps
    )
    return f'<ol class="next">{items}</ol>'


def _made(content: ReportContent) -> str:
    recipe = environment = ""
    if content.recipe_text:
        recipe = (
            "<details><summary>The recipe, with every setting</summary>"
            f"<pre><code>{escape(content.recipe_text)}</code></pre></details>"
        )
    if content.environment:
        rows = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in content.environment.items()
        )
        environment = f'<dl class="plain">{rows}</dl>'
    return environment + recipe


__all__ = [
    "Chart",
    "ChartGroup",
    "Figure",
    "Mark",
    "MarkdownReport",
    "NextStep",
    "ReportContent",
    "ReportFinding",
    "ReportTable",
    "Sample",
    "ScorePart",
    "Series",
    "calibration_chart",
    "group_charts",
    "margin_histogram",
    "render_html",
    "render_markdown",
    "write_report",
]


# -- files --------------------------------------------------------------------------------------------------------

CHARTS = "charts"


def write_report(folder: Path, content: ReportContent) -> Path:
    """Write `report.html`, `report.md` and `charts/*.svg` into a folder; returns the path of the HTML file.

    Each file is written under a temporary name and renamed, the charts before the text that links to them.
    """
    page = render_html(content)
    text, charts = render_markdown(content, CHARTS)
    try:
        (folder / CHARTS if charts else folder).mkdir(parents=True, exist_ok=True)
        for name, svg in charts.items():
            _write(folder / CHARTS / name, svg)
        for old in (folder / CHARTS).glob("[0-9][0-9]-*.svg"):  # left by an earlier report
            if old.name not in charts:
                old.unlink()
        _write(folder / "report.md", text)
        _write(folder / "report.html", page)
    except OSError as error:
        raise StorageError(f"cannot write the report to {folder} ({error.strerror})") from error
    return folder / "report.html"


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
