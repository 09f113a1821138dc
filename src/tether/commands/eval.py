"""`tether eval`: its options, read before torch is imported."""

from __future__ import annotations

import argparse

SUMMARY = "Measure a model on prompts, alone or against another, each number with its 95 % interval."
EPILOG = """examples:
  tether eval runs/ppo                                     on the task it was trained on
  tether eval runs/ppo --against runs/sft --prompts held_out.jsonl --judge runs/reward
  tether eval runs/ppo --against smollm2-135m --prompts held_out.jsonl --judge mine:rule --judge http://host/judge
  tether eval runs/ppo --metric my_metric.py:politeness
  tether eval smollm2-135m --task reasoning-gym:chain_sum --task-options '{min_digits: 1, max_digits: 1}'
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether eval` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a model's folder, a name or a Hugging Face id")
    parser.add_argument("--against", metavar="OTHER", help="a second model, on the same prompts and random draws")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--prompts",
        metavar="FILE",
        help="records with `prompt`: a file, a glob, a saved dataset's folder, a dataset's id",
    )
    add_reading_options(asked)
    asked.add_argument(
        "--task", metavar="NAME", help="a task: its held-out prompts, and its score; by default the run's"
    )
    asked.add_argument("--task-options", metavar="YAML", help="what the task is made with, such as '{max_digits: 1}'")
    asked.add_argument("--limit", type=count, metavar="N", help="only the first N prompts")
    judged = parser.add_argument_group("how answers are judged")
    judged.add_argument(
        "--judge",
        action="append",
        default=[],
        metavar="WHO",
        help="who says which answer is better: task, package.module:function of (prompt, completion, answer), the "
        "folder of a reward model, or the address of a judge (http://...); may be given more than once",
    )
    judged.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="FILE.PY:NAME",
        help="a metric of your own, reported beside the others: a function of (prompt, completion, **columns) that "
        "gives a number; can be given more than once",
    )
    judged.add_argument("--judge-token-env", metavar="NAME", help="the variable that holds a remote judge's token")
    judged.add_argument("--judge-timeout", type=float, default=30.0, metavar="S", help="seconds for one request (30)")
    sampled = parser.add_argument_group("how answers are sampled")
    sampled.add_argument("--samples", type=count, default=1, metavar="N", help="answers to each prompt (1)")
    sampled.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; by default the run's, or 1")
    sampled.add_argument("--max-new-tokens", type=count, metavar="N", help="by default the run's, or 128")
    sampled.add_argument("--seed", type=int, default=0, metavar="S", help="everything random follows from it (0)")
    add_model_options(parser)
    parser.add_argument("--answers", metavar="FILE", help="write every answer, with its scores, to this .jsonl file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_reading_options(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """How records are read; `tether data` has these too."""
    parser.add_argument(
        "--columns",
        action="append",
        metavar="FIELD=COLUMN",
        help="which column is which field, such as prompt=question",
    )
    parser.add_argument("--split", metavar="NAME", help="split of a dataset (train)")
    parser.add_argument("--config", metavar="NAME", help="configuration of a dataset that is named by its id")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """How models are held; `tether chat` has these too."""
    held = parser.add_argument_group("how models are held")
    held.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="precision; auto is bfloat16 on a CUDA device that computes in it, else float32",
    )
    held.add_argument("--device", default="auto", help="auto picks CUDA, then MPS, then CPU")
    held.add_argument(
        "--max-num-seqs", type=count, metavar="N", help="answers decoded at once (64; on a GPU what fits)"
    )


def run(options: argparse.Namespace) -> int:
    """Evaluate and print."""
    from tether.store.find import find_model, find_run_or_model

    for name in (options.model, options.against):  # before torch is imported: a path that is not there is told at once
        if name is not None:
            find_model(find_run_or_model(name))
    from tether.commands.eval_run import evaluate_and_print

    return evaluate_and_print(options)


def count(text: str) -> int:
    """An option's whole number of at least 1."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return number
