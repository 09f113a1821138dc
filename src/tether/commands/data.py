"""`tether data`: what Tether understands of a file of records, before anything is trained on it."""

from __future__ import annotations

import argparse

from tether.commands.eval import add_reading_options, count

SUMMARY = (
    "Show what is understood of your data: shape, lengths, examples with the trained tokens marked, what is dropped."
)
METHODS = ("sft", "reward", "dpo", "ppo", "grpo", "rloo", "reinforce", "trpo")

EPILOG = """A flag sets one key of the recipe, as for tether train: --data.max_length 512 --data.system_prompt Hi

examples:
  tether data demonstrations.jsonl
  tether data prompts.parquet --method ppo --model runs/sft --columns prompt=question
  tether data openai/gsm8k --config main --split test --columns prompt=question
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether data` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "source",
        nargs="+",
        metavar="FILE_OR_ID",
        help="a file, a glob, the folder of a saved dataset, or a dataset's id; several are read as one",
    )
    parser.add_argument("--method", choices=METHODS, help="what it is for (by default told from the columns)")
    parser.add_argument("--model", metavar="MODEL", help="whose tokenizer and template (smollm2-135m, or tiny-bytes)")
    add_reading_options(parser)
    parser.add_argument("--examples", type=count, default=3, metavar="N", help="examples to show (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Read, and print what was understood."""
    from tether.commands.data_run import show_data

    return show_data(options)
