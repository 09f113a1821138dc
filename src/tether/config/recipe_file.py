"""Which method a recipe's file is for, and its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from tether.config.control_recipe import ControlRecipe
from tether.config.load import load_recipe, load_settings
from tether.config.read_yaml import in_one_line, read_mapping
from tether.config.recipes import RECIPES, Recipe
from tether.errors import ConfigError


def recipe_named(name: str, flags: Sequence[str]) -> Recipe:
    """The recipe of a file, or the defaults of a method; flags win."""
    if name in RECIPES:
        return load_recipe(name, None, flags)
    return load_recipe(method_of(name), name, flags)


def any_recipe_named(name: str, flags: Sequence[str]) -> Recipe | ControlRecipe:
    """The same, for `method: control` as well."""
    if name not in RECIPES and method_of(name, ControlRecipe.method) == ControlRecipe.method:
        return load_settings(ControlRecipe, name, flags)
    return recipe_named(name, flags)


def method_of(path: str, *further: str) -> str:
    """The value of `method:` in a recipe's file: a method of `tether train`, or one of the `further` ones."""
    if not Path(path).is_file():
        raise ConfigError(f"{path} is neither a recipe's file nor a method ({', '.join(RECIPES)})")
    loader, top = read_mapping(path)
    try:
        for key, value in top.value if top is not None else ():
            if loader.construct_plain(key) == "method":
                method = str(loader.construct_plain(value))
                if method in RECIPES or method in further:
                    return method
                raise ConfigError(f"method in {path} is {method}: choose one of {', '.join((*RECIPES, *further))}")
    except yaml.YAMLError as error:
        raise ConfigError(in_one_line(error, path)) from error
    finally:
        loader.dispose()
    raise ConfigError(f"{path} does not say its method: add a line such as `method: ppo`")
