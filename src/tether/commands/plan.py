"""`tether plan`: what a run will cost, before anything is loaded."""

from __future__ import annotations

import argparse

from tether.errors import UsageError

SUMMARY = "Say what a recipe will cost in memory, optimiser steps and seconds, before anything is loaded."

EPILOG = """A flag sets one key of the recipe, as for tether train: tether plan recipes/ppo.yaml --roles.mode lora

examples:
  tether plan recipes/tiny-ppo.yaml
  tether plan recipes/ppo-verifiable.yaml --memory 24GiB --device cuda
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `tether plan` can be told."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's file, or a method's name for its defaults")
    parser.add_argument("--device", metavar="NAME", help="plan for this device (by default the recipe's model.device)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="plan for so much memory, such as 24GiB (by default all of it)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="prompts of N tokens (by default the recipe's own are looked at)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(options: argparse.Namespace) -> int:
    """Print the plan; 0 whether or not it fits."""
    if options.prompt_tokens is not None and options.prompt_tokens < 1:
        raise UsageError(f"--prompt-tokens {options.prompt_tokens}: a prompt has at least 1 token")
    from tether.commands.plan_run import show_plan

    return show_plan(options)
