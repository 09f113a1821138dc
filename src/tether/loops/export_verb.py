"""`tether export`: a run's model, rollouts and metrics, for other tools."""

from __future__ import annotations

import argparse

from tether.runs.verb_options import add_run_option

SUMMARY = "Take a run's model, rollouts or metrics out, for other tools."
EPILOG = """examples:
  tether export ppo --model my-model               the trained model, or its adapters, with the tokenizer
  tether export ppo --rollouts rollouts.parquet    one row a rollout, a list a token column
  tether export ppo --metrics metrics.csv          one row a step
  tether export ppo --to exported                  all three
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether export` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_run_option(parser)
    parser.add_argument("--to", metavar="DIR", help="all that the run has: model/, rollouts.jsonl, metrics.csv")
    parser.add_argument("--model", metavar="DIR", help="copy the model (or adapters) to this folder, which is new")
    parser.add_argument("--best", action="store_true", help="the model with the best held-out score, not the last")
    parser.add_argument(
        "--checkpoint",
        type=int,
        metavar="N",
        help="with --model: as it was after N steps; -1: the newest checkpoint",
    )
    parser.add_argument("--rollouts", metavar="FILE", help=".parquet or .jsonl")
    parser.add_argument(
        "--step", type=int, action="append", metavar="N", help="rollouts of this step alone; repeatable"
    )
    parser.add_argument("--metrics", metavar="FILE", help=".csv or .jsonl")


def run(options: argparse.Namespace) -> int:
    """Write and say where."""
    if options.checkpoint is not None:
        from tether.loops.resume import export_checkpoint

        return export_checkpoint(options)
    from tether.runs.export import export

    return export(options)
