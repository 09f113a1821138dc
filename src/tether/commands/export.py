"""`tether export`: a run's model, rollouts and metrics, for other tools."""

from __future__ import annotations

import argparse

from tether.errors import UsageError
from tether.reports.run_table import add_run_option

SUMMARY = "Take a run's model, rollouts or metrics out, for other tools."
EPILOG = """examples:
  tether export ppo --model my-model               the trained model, or its adapters, with the tokenizer
  tether export ppo --rollouts rollouts.parquet    one row a rollout, a list a token column
  tether export ppo --metrics metrics.csv          one row a step
  tether export ppo --to exported                  all three
  tether export ppo --merge --to my-model          one plain transformers folder, adapters merged, with a model card
  tether export ppo --gguf ppo.gguf --type q8_0    one file for llama.cpp and what is built on it
  tether export ppo --push me/my-model --private   the merged folder on the Hugging Face hub, with your HF_TOKEN
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether export` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_run_option(parser)
    parser.add_argument(
        "--to",
        metavar="DIR",
        help="all that the run has: model/, rollouts.jsonl, metrics.csv; with --merge or --push, the merged model",
    )
    parser.add_argument("--model", metavar="DIR", help="copy the model (or adapters) to this folder, which is new")
    parser.add_argument("--best", action="store_true", help="the model with the best held-out score, not the last")
    parser.add_argument(
        "--checkpoint",
        type=int,
        metavar="N",
        help="the model as it was after N steps; -1: the newest checkpoint",
    )
    _add_merged_options(parser)
    parser.add_argument("--rollouts", metavar="FILE", help=".parquet or .jsonl")
    parser.add_argument(
        "--step", type=int, action="append", metavar="N", help="rollouts of this step alone; repeatable"
    )
    parser.add_argument("--metrics", metavar="FILE", help=".csv or .jsonl")
    parser.add_argument("--force", action="store_true", help="overwrite the files of --rollouts and --metrics")


def _add_merged_options(parser: argparse.ArgumentParser) -> None:
    merged = parser.add_argument_group("the merged model")
    merged.add_argument(
        "--merge",
        action="store_true",
        help="write a plain transformers folder (adapters merged), loaded back and compared; by default merged/ in the "
        "run's folder",
    )
    merged.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the folder's weights (as the run held them)"
    )
    merged.add_argument("--gguf", metavar="FILE", help="write a GGUF file: llama, mistral, qwen2 and qwen3 models")
    merged.add_argument(
        "--type", choices=("f32", "f16", "q8_0"), default="f16", help="how the GGUF file stores matrices (f16)"
    )
    merged.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="push the merged folder to the Hugging Face hub, with HF_TOKEN or your login",
    )
    merged.add_argument("--private", action="store_true", help="with --push: a new repository is private")
    merged.add_argument("--license", metavar="ID", help="for the model card, such as apache-2.0 (the base model's)")


def run(options: argparse.Namespace) -> int:
    """Write and say where."""
    if options.private and not options.push:
        raise UsageError("--private goes with --push OWNER/NAME")
    from tether.progress import working

    with working(f"exporting {options.run}", announce=False, quiet=options.json, spinner=False):
        if options.merge or options.gguf or options.push:
            return _run_merged(options)
        if options.checkpoint is not None:
            from tether.train.resume import export_checkpoint

            return export_checkpoint(options)
        from tether.reports.export_data import export

        return export(options)


def _run_merged(options: argparse.Namespace) -> int:
    if options.rollouts or options.metrics or options.step:
        raise UsageError("--merge, --gguf and --push take the model alone: export rollouts and metrics by themselves")
    from tether.commands.export_model import export_model, print_written

    return print_written(export_model(options), options.json)
