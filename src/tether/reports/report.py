"""A run's report: what it says (`ReportContent`), as a page, as Markdown, and on disk."""

from __future__ import annotations

import os
from pathlib import Path

from tether.errors import StorageError
from tether.reports.charts import Chart, ChartGroup, Mark, Series, calibration_chart, group_charts, margin_histogram
from tether.reports.report_content import Figure, NextStep, ReportContent, ReportFinding, Sample, ScorePart
from tether.reports.report_html import render_html
from tether.reports.report_markdown import MarkdownReport, render_markdown

__all__ = [
    "Chart",
    "ChartGroup",
    "Figure",
    "Mark",
    "MarkdownReport",
    "NextStep",
    "ReportContent",
    "ReportFinding",
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

CHARTS = "charts"


def write_report(folder: Path, content: ReportContent) -> Path:
    """Write `report.html`, `report.md` and `charts/*.svg` into a folder; the path of the HTML file.

    Each file is whole or not there: it is written beside its place and then moved into it, the charts before the text
    that links to them.
    """
    page = render_html(content)
    text, charts = render_markdown(content, CHARTS)
    try:
        (folder / CHARTS if charts else folder).mkdir(parents=True, exist_ok=True)
        for name, svg in charts.items():
            _write(folder / CHARTS / name, svg)
        for old in (folder / CHARTS).glob("[0-9][0-9]-*.svg"):  # of a report that was here before
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
