"""`tether sample`: its options, read before torch is imported."""

from __future__ import annotations

import argparse

from tether.commands.eval import add_model_options, count

SUMMARY = "Sample several answers to each prompt, as records to annotate or to train on."
EPILOG = """examples:
  tether sample runs/sft prompts.jsonl -n 4 --out answers.jsonl
  tether sample runs/sft prompts.jsonl -n 4 --reward runs/reward --out ranked.jsonl     for tether train reward
  tether sample runs/sft prompts.jsonl -n 4 --reward runs/reward --pairs --out pairs.jsonl    for tether train dpo
  tether sample smollm2-135m prompts.jsonl -n 2 --pairs --reward '{kind: length, max: 40}'
Stop it with Ctrl-C; the same command again continues FILE where it stopped.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether sample` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a model's folder, a name or a Hugging Face id")
    parser.add_argument("prompts", metavar="PROMPTS", help="a file with a `prompt` or `messages` in each record")
    parser.add_argument("-n", "--samples", type=count, default=4, metavar="N", help="answers to each prompt (4)")
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="write pairs: with --reward the best answer against the worst, else two answers to be judged",
    )
    parser.add_argument(
        "--reward",
        metavar="PART_OR_FOLDER",
        help="ranks the answers: a reward model's folder, or a part as in a recipe: ended, '{kind: length, max: 40}'",
    )
    parser.add_argument("--out", metavar="FILE", help="a .jsonl file, continued where it exists; by default stdout")
    parser.add_argument("--limit", type=count, metavar="N", help="only the first N prompts")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens of mass P (1)")
    parser.add_argument("--max-new-tokens", type=count, default=128, metavar="N", help="longest answer (128)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed, the same answers (0)")
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object; needs --out")


def run(options: argparse.Namespace) -> int:
    """Sample and write."""
    from tether.commands.sample_run import sample_and_write

    return sample_and_write(options)
