"""A report for people (tables) and for programs (JSON)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tether.conformance.runner import ConformanceReport, NotClaimed

SHOWN_FAILURES = 40


def _json_safe(value: Any) -> Any:
    """The value itself, or its text where JSON has no word for it (NaN, infinity, foreign objects)."""
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def report_json(report: ConformanceReport) -> dict[str, Any]:
    """The report as plain data. `failed` counts cases; `failures` has one entry for each case and dtype."""
    return {
        "target": report.target,
        "dtypes": list(report.dtypes),
        "cases": report.cases,
        "passed": report.passed,
        "failed": report.failed_cases,
        "families": {name: asdict(result) for name, result in report.families.items()},
        "failures": [_json_safe(asdict(failure)) for failure in report.failed],
        "not_claimed": [asdict(item) for item in report.not_claimed],
        "partly_claimed": [asdict(item) for item in report.partly_claimed],
    }


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _family_table(report: ConformanceReport) -> Table:
    table = Table(title=f"Conformance of {report.target or 'the adapter'} in {' and '.join(report.dtypes)}")
    table.add_column("family", no_wrap=True)
    for heading in ("cases", "passed", "failed", "not claimed"):
        table.add_column(heading, justify="right")
    for name, result in report.families.items():
        style = "red" if result.failed else "dim" if not result.passed else None
        counts = [str(n) if n else "" for n in (result.cases, result.passed, result.failed, result.not_claimed)]
        table.add_row(name, *counts, style=style)
    return table


def _failure_table(report: ConformanceReport) -> Table:
    table = Table(title="Failures: the first place of each result that differs")
    for heading in ("family", "case", "method", "dtype", "place", "expected", "actual", "tolerance"):
        table.add_column(heading)
    for failure in report.failed[:SHOWN_FAILURES]:
        place = failure.path if failure.places == 1 else f"{failure.path} and {failure.places - 1} more"
        numbers = (_short(failure.expected), _short(failure.actual), f"{failure.tolerance:g}")
        cells = (failure.family, failure.case, failure.method, failure.dtype, place, *numbers)
        # Text, not markup: a path such as advantages[1][3] would be read as a style.
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _print_not_claimed(console: Console, heading: str, items: list[NotClaimed]) -> None:
    if not items:
        return
    console.print(Text(heading))
    for (method, reason), count in sorted(Counter((item.method, item.reason) for item in items).items()):
        console.print(Text(f"  {method} ({count}): {reason}"))


def render(report: ConformanceReport, console: Console) -> None:
    """Print the families, the failures, and what was not claimed."""
    console.print(_family_table(report))
    if report.failed:
        console.print(_failure_table(report))
        hidden = len(report.failed) - SHOWN_FAILURES
        if hidden > 0:
            console.print(f"and {hidden} more; --json lists them all")
    _print_not_claimed(console, "Not claimed:", report.not_claimed)
    _print_not_claimed(console, "Claimed in part:", report.partly_claimed)
    claimed = report.cases - len(report.not_claimed)
    verdict = "nothing failed" if not report.failed else f"{report.failed_cases} failed"
    families = f"{len(report.families)} families"
    console.print(f"{report.cases} cases in {families}, {claimed} claimed, {report.passed} passed, {verdict}.")
