"""`tether report`: a run as a page with its curves."""

from __future__ import annotations

import argparse

from tether.reports.run_table import add_run_option

SUMMARY = "Write a run's report: report.html, which needs nothing else, and report.md with its charts."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether report` can be told."""
    add_run_option(parser)
    parser.add_argument("--to", metavar="DIR", help="where to write it; by default the run's own folder")


def run(options: argparse.Namespace) -> int:
    """Write and say where."""
    from tether.reports.run_report import report

    return report(options)
