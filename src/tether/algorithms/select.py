"""Build the algorithm that a recipe selects: the only place that maps a method's name to its algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tether.algorithms.algorithm import Algorithm, Overlong
from tether.algorithms.grpo import grpo
from tether.algorithms.ppo import ppo
from tether.algorithms.reinforce import reinforce
from tether.algorithms.rloo import rloo
from tether.algorithms.trpo import trpo
from tether.config.recipes import RLRecipe

BUILDERS: dict[str, Callable[..., Algorithm]] = {
    "ppo": ppo,
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
    "trpo": trpo,
}
"""By method: a function from its own section of the recipe, `kl` and `reward` to its algorithm."""


def build_algorithm(recipe: RLRecipe) -> Algorithm:
    """The algorithm of the recipe's method; `recipe.algorithm`, which is code, takes its place when a run begins."""
    if recipe.method not in BUILDERS:
        raise ValueError(f"{recipe.method} does not learn from rollouts")
    own: Any = getattr(recipe, recipe.method)
    algorithm = BUILDERS[recipe.method](own, recipe.kl, recipe.reward)
    buffer, rollout = recipe.reward.overlong_buffer, recipe.rollout
    advantage_settings = replace(
        algorithm.advantage_settings,
        importance_sampling_cap=rollout.importance_sampling_cap,
        importance_sampling=rollout.importance_sampling,
        overlong=None if buffer is None else Overlong(rollout.max_new_tokens, buffer, recipe.reward.overlong_penalty),
    )
    return replace(algorithm, advantage_settings=advantage_settings)
