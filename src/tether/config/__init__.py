"""The settings of a run: frozen pydantic models, free of torch, so that `--help` is instant."""

from tether.config.recipes import RECIPES, Recipe, RLRecipe

__all__ = ["RECIPES", "RLRecipe", "Recipe"]
