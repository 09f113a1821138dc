"""`tether chat`: its options, read before torch is imported."""

from __future__ import annotations

import argparse

from tether.commands.eval import add_model_options, count

SUMMARY = "Talk to a model in the terminal; with --compare, to two at once, side by side."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether chat` can be told."""
    parser.epilog = "/new begins a new conversation; Ctrl-D or Ctrl-C leaves. Questions may also come from a pipe."
    parser.add_argument("model", metavar="MODEL", help="a run's folder, a model's folder, a name or a Hugging Face id")
    parser.add_argument("--compare", metavar="OTHER", help="a second model, which is asked the same")
    parser.add_argument("--system", metavar="TEXT", help="a system message, before the first question")
    parser.add_argument("--once", metavar="QUESTION", help="ask this one question, print the answer, and leave")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (0.7)")
    parser.add_argument("--max-new-tokens", type=count, default=256, metavar="N", help="longest answer (256)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed, the same answers (0)")
    add_model_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON line for each question")


def run(options: argparse.Namespace) -> int:
    """Talk until the person leaves."""
    from tether.store.find import find_model, find_run_or_model

    for name in (options.model, options.compare):  # before torch is imported: a path that is not there is told at once
        if name is not None:
            find_model(find_run_or_model(name))
    from tether.commands.chat_session import chat

    return chat(options)
