"""A report as Markdown, for a repository or an issue; its charts are SVG files beside it."""

from __future__ import annotations

import re
from typing import NamedTuple

from tether.reports.chart_scale import short
from tether.reports.chart_svg import render_svg
from tether.reports.report_content import ReportContent, Sample
from tether.reports.safe_text import duration, fenced, markdown

_LEVELS = {"good": "✅", "note": "▫️", "warning": "⚠️"}


class MarkdownReport(NamedTuple):
    """The text, and the SVG of each chart by its file's name, for the folder that the text links to."""

    text: str
    charts: dict[str, str]


def render_markdown(content: ReportContent, charts_folder: str = "charts") -> MarkdownReport:
    """The report's text with links into `charts_folder`, and the files that must be there."""
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
        blocks.append("\n".join(f"- {_LEVELS[finding.level]} {markdown(finding.text)}" for finding in content.findings))
    if content.samples:
        blocks.append("## Before and after")
        for sample in content.samples:
            blocks += _sample(content, sample)
    blocks += _charts(content, charts_folder, charts)
    blocks += _endings(content)
    return MarkdownReport("\n\n".join(block for block in blocks if block) + "\n", charts)


def _sample(content: ReportContent, sample: Sample) -> list[str]:
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
    """How far a part of the rule is met: a tick, a cross, or the number between."""
    return "✓" if value >= 0.995 else "✗" if value <= 0.005 else short(value)


def _charts(content: ReportContent, folder: str, charts: dict[str, str]) -> list[str]:
    blocks: list[str] = []
    for group in content.charts:
        blocks += [f"## {markdown(group.question)}", markdown(group.answer)]
        for chart in group.charts:
            name = f"{len(charts) + 1:02d}-{_slug(chart.title)}.svg"
            charts[name] = render_svg(chart, name=name.removesuffix(".svg"), standalone=True) + "\n"
            blocks.append(f"![{markdown(chart.title)}]({folder}/{name})")
            blocks.append(markdown(chart.note))
    return blocks


def _endings(content: ReportContent) -> list[str]:
    blocks: list[str] = []
    if content.stages:
        rows = [f"| {markdown(name)} | {duration(seconds)} |" for name, seconds in content.stages]
        whole = f"| **all of it** | **{duration(sum(seconds for _, seconds in content.stages))}** |"
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
