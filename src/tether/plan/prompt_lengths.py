"""How long the prompts or records of a recipe are, before a model is loaded."""

from __future__ import annotations

from tether.config.recipes import Recipe, RLRecipe
from tether.data.prompts import PromptRule
from tether.errors import ConfigError, TetherError
from tether.hub.catalog import EMBEDDED, cached_model
from tether.models.tokenizer import read_tokenizer
from tether.plan.workload import ASSUMED_PROMPT, PROMPTS_LOOKED_AT, Lengths
from tether.rewards.tasks import prompts_without_code


def lengths_of(recipe: Recipe, path: str, given: int | None = None) -> Lengths:
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
        return Lengths.assumed(ASSUMED_PROMPT, f"assumed, because the prompts cannot be read here ({reason})")
