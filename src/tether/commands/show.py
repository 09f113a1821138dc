"""`tether show`: one run, one of its steps, or one answer token by token."""

from __future__ import annotations

import argparse

from tether.reports.run_table import add_run_option

SUMMARY = "Show what a run recorded: all of it in short, one step's answers, or one answer token by token."
EPILOG = """examples:
  tether show ppo                        the run: settings, where it came from, last metrics, events
  tether show ppo --diff ppo-2           the settings in which the two differ, and their last metrics
  tether show ppo --step 10              the answers of step 10 with their scores
  tether show ppo --step 10 --sample 3   answer 3, token by token, coloured by advantage
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether show` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_run_option(parser)
    parser.add_argument(
        "--diff", action="append", metavar="RUN", help="compare its settings with this run's; repeatable"
    )
    parser.add_argument("--step", type=int, metavar="N", help="a step; -1 is the last whose answers were kept")
    parser.add_argument("--sample", type=int, metavar="K", help="a sample of that step; by default of the last one")


def run(options: argparse.Namespace) -> int:
    """Read and print."""
    from tether.reports.run_table import show

    return show(options)
