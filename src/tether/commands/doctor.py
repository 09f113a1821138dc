"""`tether doctor`: examine a run and print the findings, or verify its files and records."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.commands.options import CommandParser, add_workspace_options
from tether.errors import StorageError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from tether.doctor.doctor import Examination
    from tether.doctor.findings import Finding
    from tether.store.recorded import RecordedRun

SUMMARY = "Say what is wrong with a run: what was seen, why it matters, and what to change."
EPILOG = """examples:
  tether doctor ppo                       examine the training of a run
  tether doctor ppo --verify              check every file and record of the run against its digest
  tether doctor ppo --verify --repair     and restore what the run keeps a copy of
  tether doctor --verify                  check every run, and the votes
  tether doctor ppo --rule my_rule.py:rule    add a rule of your own
"""


def doctor_command(words: list[str]) -> int:
    """Examine and print. Exit code 0 whatever was found; with --verify 6 if something is damaged."""
    parser = CommandParser("doctor", SUMMARY, EPILOG)
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run's name as `tether runs` lists it, or its folder; optional with --verify",
    )
    add_workspace_options(parser)
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="FILE.PY:NAME",
        help="a rule of your own: a function of the run that returns findings; can be given more than once",
    )
    parser.add_argument("--verify", action="store_true", help="check files and records against their digests instead")
    parser.add_argument("--repair", action="store_true", help="with --verify: restore what the run keeps a copy of")
    options = parser.parse_args(words)
    if options.repair and not options.verify:
        raise UsageError("--repair goes with --verify: tether doctor RUN --verify --repair")
    if options.verify and options.rule:
        raise UsageError("--rule looks at what training did, and --verify at files: give one of them")
    if options.verify:
        return _verify(options)
    if options.run is None:
        raise UsageError("say which run: tether doctor RUN; with --verify all of them are checked")
    return examine_and_print(options)


def _verify(options: argparse.Namespace) -> int:
    from tether.store.database.open import workspace_at
    from tether.store.folder import is_run
    from tether.store.read import store_of
    from tether.store.verify_run import run_folders, summary_lines, verify_run, verify_store

    workspace = workspace_at(*store_of(options.run or "", options.workspace))
    if options.run is None:
        folders = run_folders(workspace.directory)
    else:
        places = (Path(options.run).expanduser(), workspace.directory / options.run)
        folders = [place for place in places if is_run(place)][:1]
        if not folders:
            raise UsageError(f"there is no run at {places[0]}, nor at {places[1]}: `tether runs` lists what there is")
    results = [verify_run(workspace, folder, repair=options.repair) for folder in folders]
    results.append(verify_store(workspace))
    faults = sum(len(one.faults) for one in results)
    if options.json:
        print(json.dumps({"whole": not faults, "results": [one.as_json() for one in results]}))
    else:
        print("\n".join(summary_lines(results)))
    return StorageError.exit_code if faults else 0


# -- findings ---------------------------------------------------------------------------------------------------


STYLES = {"alarm": "bold red", "warning": "bold yellow", "note": "bold cyan"}
HEADINGS = {"alarm": "Alarms", "warning": "Warnings", "note": "Notes"}


def examine_and_print(options: argparse.Namespace) -> int:
    """Read a run, run every audit, and print the findings."""
    from tether.doctor.doctor import Doctor
    from tether.doctor.own_rules import own_rules
    from tether.reports.run_table import open_for, printing
    from tether.store.read import read_run

    rules = own_rules(options.rule, "--rule")
    with open_for(options) as opened:
        run = read_run(opened, options.run)
        examination = Doctor(rules=rules).examination(run)
    if options.json:
        print(json.dumps(examination_as_json(run, examination), allow_nan=False))
    else:
        with printing() as console:
            print_examination(console, run, examination)
    return 0


def examination_as_json(run: RecordedRun, examination: Examination) -> dict[str, Any]:
    """The findings, and what each audit without a finding looked at."""
    from tether.doctor.findings import Healthy, TooLittle

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
    """Print the findings by severity, then the healthy audits and those that lacked data."""
    from rich.markup import escape

    from tether.doctor.findings import SEVERITIES
    from tether.reports.safe_text import visible

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
    _print_other_audits(console, examination)


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    from tether.reports.safe_text import visible

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


def _print_other_audits(console: Console, examination: Examination) -> None:
    from tether.doctor.doctor import AUDITS
    from tether.doctor.findings import Healthy, TooLittle

    questions = {audit.name: audit.question for audit in AUDITS}
    healthy = {name: verdict.saw for name, verdict in examination.verdicts.items() if isinstance(verdict, Healthy)}
    lacking = {name: verdict.lacks for name, verdict in examination.verdicts.items() if isinstance(verdict, TooLittle)}
    if healthy:
        console.print(f"Healthy: {len(healthy)}", style="bold")
    for name, saw in healthy.items():
        console.print(f"  {questions.get(name, name)}  {saw}", style="dim", markup=False)
    if lacking:
        console.print(f"Not enough data to judge: {len(lacking)}", style="bold")
    for name, lacks in lacking.items():
        console.print(f"  {questions.get(name, name)}  Needs {lacks}.", style="dim", markup=False)
