"""A run examined and the findings printed: for people, the gravest first; for programs, as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from tether.doctor.doctor import AUDITS, Doctor, Examination
from tether.doctor.findings import SEVERITIES, Finding, Healthy, TooLittle
from tether.doctor.own_rules import own_rules
from tether.reports.run_table import open_for, printing
from tether.reports.safe_text import visible
from tether.store.read import read_run
from tether.store.recorded import RecordedRun

STYLES = {"alarm": "bold red", "warning": "bold yellow", "note": "bold cyan"}
HEADINGS = {"alarm": "Alarms", "warning": "Warnings", "note": "Notes"}


def examine_and_print(options: argparse.Namespace) -> int:
    """Read a run, ask every audit, and say what they found."""
    rules = own_rules(options.rule, "--rule")
    with open_for(options) as opened:
        run = read_run(opened, options.run)
        examination = Doctor(rules=rules).examination(run)
    if options.json:
        print(json.dumps(as_json(run, examination), allow_nan=False))
    else:
        with printing() as console:
            print_examination(console, run, examination)
    return 0


def as_json(run: RecordedRun, examination: Examination) -> dict[str, Any]:
    """The findings, and what every other audit looked at."""
    verdicts = examination.verdicts.items()
    return {
        "run": run.name,
        "method": run.method,
        "steps": len(run.metrics),
        "findings": [finding.as_json() for finding in examination.findings],
        "healthy": {name: verdict.saw for name, verdict in verdicts if isinstance(verdict, Healthy)},
        "too_little_data": {name: verdict.lacks for name, verdict in verdicts if isinstance(verdict, TooLittle)},
    }


def print_examination(console: Console, run: RecordedRun, examination: Examination) -> None:
    """Findings by severity, then what was looked at and what could not be."""
    findings = examination.findings
    title = f"{run.name}: {run.method}, {len(run.metrics)} steps"
    console.print(f"[bold]{escape(visible(title))}[/bold]")
    if not findings:
        console.print("No findings.", style="green")
    for severity in SEVERITIES:
        group = [finding for finding in findings if finding.severity == severity]
        if group:
            console.print(f"\n{HEADINGS[severity]}", style=STYLES[severity])
            for finding in group:
                _print_finding(console, finding)
    _print_the_rest(console, examination)


def _print_finding(console: Console, finding: Finding) -> None:
    console.print(f"  [{STYLES[finding.severity]}]{escape(finding.title)}[/] [dim]({escape(finding.audit)})[/dim]")
    lines = [("saw", finding.saw), *([("why", finding.why)] if finding.why else [])]
    lines += [("change" if place == 0 else "", cure) for place, cure in enumerate(finding.change)]
    lines += [("example" if place == 0 else "", text) for place, text in enumerate(finding.examples)]
    lines += [("more", f"{finding.link}   curve: {finding.metric}" if finding.metric else finding.link)]
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", min_width=7)
    table.add_column()
    for label, text in lines:
        table.add_row(label, escape(visible(text)))
    console.print(Padding(table, (0, 0, 1, 4)))


def _print_the_rest(console: Console, examination: Examination) -> None:
    questions = {audit.name: audit.question for audit in AUDITS}
    healthy = {name: said.saw for name, said in examination.verdicts.items() if isinstance(said, Healthy)}
    lacking = {name: said.lacks for name, said in examination.verdicts.items() if isinstance(said, TooLittle)}
    if healthy:
        console.print(f"Looked at and found in order: {len(healthy)}", style="bold")
    for name, saw in healthy.items():
        console.print(f"  {questions.get(name, name)}  {saw}", style="dim", markup=False)
    if lacking:
        console.print(f"Not judged, for want of data: {len(lacking)}", style="bold")
    for name, lacks in lacking.items():
        console.print(f"  {questions.get(name, name)}  Needs {lacks}.", style="dim", markup=False)
