"""`tether plan`: the memory, steps and seconds that a recipe will take, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tether.commands.options import CommandParser
from tether.commands.plan_cluster import add_cluster_options, print_cluster_plan, wants_cluster
from tether.errors import UsageError

SUMMARY = "Estimate the memory, optimiser steps and seconds of a recipe, before anything is loaded."

EPILOG = """A flag sets one key of the recipe, as for tether train: tether plan recipes/ppo.yaml --roles.mode lora

examples:
  tether plan recipes/tiny-ppo.yaml
  tether plan recipes/ppo-verifiable.yaml --memory 24GiB --device cuda
  tether plan recipes/ppo-verifiable.yaml --gpus 64 --nodes 8 --link 400Gb --price 2.5
  tether plan recipes/ppo-verifiable.yaml --gpus 64 --samplers 24 --lag 1 --simulate --svg scaling.svg
"""


def plan_command(words: list[str]) -> int:
    """Print the plan; exit code 0 whether or not the run fits."""
    parser = CommandParser("plan", SUMMARY, EPILOG)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's file, or a method's name for its defaults")
    parser.add_argument("--device", metavar="NAME", help="plan for this device (default: the recipe's model.device)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="plan for this much memory, such as 24GiB (default: all of it)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="assume prompts of N tokens (default: measure the recipe's own)"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="plan one of N processes (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    add_cluster_options(parser)
    options, flags = parser.parse_known_args(words)
    if options.prompt_tokens is not None and options.prompt_tokens < 1:
        raise UsageError(f"--prompt-tokens {options.prompt_tokens}: a prompt has at least 1 token")
    if options.ranks is not None and options.ranks < 1:
        raise UsageError(f"--ranks {options.ranks}: a run has at least 1 process")
    return print_plan(options, flags)


def print_plan(options: argparse.Namespace, flags: list[str]) -> int:
    """Plan the recipe that the options name, and print it."""
    import torch

    from tether.config.recipe_file import recipe_named
    from tether.models.precision import resolve_dtype, with_precision
    from tether.plan.machine import machine_for, planned_device
    from tether.plan.plan import advice, make_plan
    from tether.plan.prompt_lengths import lengths_of
    from tether.plan.table import plan_text
    from tether.plan.workload import shape_of
    from tether.reports.run_table import printing
    from tether.store.find import find_model

    recipe = recipe_named(options.recipe, flags)
    path = find_model(recipe.model.path)
    shape = shape_of(path)
    if wants_cluster(options):
        recipe = with_precision(recipe, torch.device("cuda"))
        return print_cluster_plan(options, recipe, shape, lengths_of(recipe, path, options.prompt_tokens))
    if (options.ranks or 1) > 1:
        from tether.distributed.group_ranks import check_recipe

        check_recipe(recipe)  # raises where training would raise
    device = planned_device(options.device or recipe.model.device)
    resolve_dtype(recipe.model.dtype, device)  # raises where training would raise
    recipe = with_precision(recipe, device)
    machine = machine_for(str(device), recipe.model.dtype, options.memory)
    lengths = lengths_of(recipe, path, options.prompt_tokens)
    plan = make_plan(recipe, shape, lengths, machine, ranks=options.ranks or 1)
    alone, together = advice(recipe, plan) if not plan.fits else ([], [])
    if options.json:
        changes = {"changes": [asdict(change) for change in alone], "together": [asdict(each) for each in together]}
        print(json.dumps(plan.as_json() | (changes if not plan.fits else {})))
        return 0
    with printing() as console:
        for part in plan_text(plan, alone=alone, together=together):
            console.print(part)
    return 0
