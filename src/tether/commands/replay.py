"""`tether replay`: the same answers, credited another way."""

from __future__ import annotations

import argparse

from tether.reports.run_table import add_run_option

SUMMARY = "Recompute advantages and losses of a step's stored answers under other settings; nothing is generated."
EPILOG = """examples:
  tether replay ppo --step 10                    with nothing changed: the stored advantages, to the bit
  tether replay ppo --step 10 --ppo.lam 1.0 --ppo.gamma 0.99
  tether replay ppo --step 10 --kl.coef 0 --ppo.whiten_advantages false
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether replay` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_run_option(parser)
    parser.add_argument("--step", type=int, metavar="N", help="the step; by default the last whose answers were kept")


def run(options: argparse.Namespace) -> int:
    """Replay and print."""
    from tether.train.replay import replay

    return replay(options)
