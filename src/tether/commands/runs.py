"""`tether runs`: the runs of a workspace, the latest first."""

from __future__ import annotations

import argparse

from tether.reports.run_table import add_workspace_options

SUMMARY = "List the runs of a workspace: how far each came, its score, and what it was made from."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether runs` can be told."""
    add_workspace_options(parser)
    parser.add_argument("--tag", action="append", metavar="TAG", help="only runs with this tag; may be given again")
    parser.add_argument("--group", metavar="NAME", help="only runs of this group")


def run(options: argparse.Namespace) -> int:
    """Read and print."""
    from tether.reports.run_table import print_runs

    return print_runs(options)
