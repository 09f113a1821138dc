"""From the words of `tether plan` to a plan on the screen."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import yaml

from tether.config.load import load_recipe
from tether.config.read_yaml import read_mapping
from tether.config.recipes import RECIPES, Recipe, RLRecipe
from tether.data.prompts import PromptRule
from tether.errors import ConfigError, TetherError
from tether.hub.catalog import EMBEDDED, cached_model
from tether.models.precision import resolve_dtype, with_precision
from tether.models.tokenizer import read_tokenizer
from tether.plan.machine import machine_for, planned_device
from tether.plan.plan import advice, make_plan
from tether.plan.table import plan_text
from tether.plan.workload import ASSUMED_PROMPT, PROMPTS_LOOKED_AT, Lengths, shape_of
from tether.reports.run_table import printing
from tether.rewards.tasks import prompts_without_code
from tether.store.find import find_model


def show_plan(options: argparse.Namespace) -> int:
    """Plan the recipe that the options name, and print it."""
    recipe = recipe_named(options.recipe, options.flags)
    path = find_model(recipe.model.path)
    shape = shape_of(path)
    device = planned_device(options.device or recipe.model.device)
    resolve_dtype(recipe.model.dtype, device)  # refuses what training would refuse
    recipe = with_precision(recipe, device)
    machine = machine_for(str(device), recipe.model.dtype, options.memory)
    lengths = lengths_of(recipe, path, options.prompt_tokens)
    plan = make_plan(recipe, shape, lengths, machine)
    alone, together = advice(recipe, plan) if not plan.fits else ([], [])
    if options.json:
        changes = {"changes": [asdict(change) for change in alone], "together": [asdict(each) for each in together]}
        print(json.dumps(plan.as_json() | (changes if not plan.fits else {})))
        return 0
    with printing() as console:
        for part in plan_text(plan, alone=alone, together=together):
            console.print(part)
    return 0


def recipe_named(name: str, flags: list[str]) -> Recipe:
    """The recipe of a file, which says its method, or a method's defaults."""
    if name in RECIPES:
        return load_recipe(name, None, flags)
    return load_recipe(method_of(name), name, flags)


def method_of(path: str) -> str:
    """What the file says after `method:`."""
    if not Path(path).is_file():
        raise ConfigError(f"{path} is neither a recipe's file nor a method ({', '.join(RECIPES)})")
    loader, top = read_mapping(path)
    try:
        for key, value in top.value if top is not None else ():
            if loader.construct_plain(key) == "method":
                method = str(loader.construct_plain(value))
                if method in RECIPES:
                    return method
                raise ConfigError(f"method in {path} is {method}: choose one of {', '.join(RECIPES)}")
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML file ({error})") from error
    finally:
        loader.dispose()
    raise ConfigError(f"{path} does not say its method: add a line such as `method: ppo`")


def lengths_of(recipe: Recipe, path: str, given: int | None) -> Lengths:
    """How long prompts or records are: as given, as the recipe's own prompts are, or assumed."""
    if given is not None:
        return Lengths.assumed(given, "as given")
    if not isinstance(recipe, RLRecipe):
        return Lengths.of_records(recipe)
    try:
        if path in EMBEDDED and cached_model(path) is None:
            raise ConfigError(f"{path} is not in the cache yet")  # a plan downloads nothing
        model = read_tokenizer(path)
        rule = PromptRule.of(recipe.data, model.context_length, recipe.rollout.max_new_tokens)
        asked = prompts_without_code(recipe.task, recipe.data)[:PROMPTS_LOOKED_AT]
        return Lengths.of(rule.apply(asked, model.tokenizer, "prompts").prompts, model.tokenizer)
    except (TetherError, OSError, ValueError, ImportError) as error:
        reason = str(error).partition("\n")[0][:80]
        return Lengths.assumed(ASSUMED_PROMPT, f"assumed, for the prompts cannot be read here ({reason})")
