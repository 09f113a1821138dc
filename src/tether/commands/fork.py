"""`tether fork`: what would have come of it with other settings?"""

from __future__ import annotations

import argparse

SUMMARY = "Continue from one of a run's checkpoints with changed settings, as a run of its own."
EPILOG = """examples:
  tether fork ppo --step 40 --ppo.clip_range 0.1
  tether fork ppo --run.name gentle --optimizer.policy_lr 1e-6
Every key of the recipe is a flag; what is not given stays as it was.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether fork` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", help="the run's folder, or its name as `tether runs` lists it")
    parser.add_argument("--step", type=int, metavar="N", help="after so many steps; by default the newest checkpoint")
    parser.add_argument("--workspace", metavar="DIR", default="runs", help="the folder of runs (runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON line a step")
    parser.add_argument("--nproc", metavar="N", help="train with N processes on this machine (docs/distributed.md)")


def run(options: argparse.Namespace) -> int:
    """Fork."""
    from tether.train.resume import fork_run

    return fork_run(options.run, options.workspace, options.step, options.flags, json_output=options.json)
