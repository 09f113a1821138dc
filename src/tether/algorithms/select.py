"""Build the algorithm that a recipe selects: the only place that maps a method's name to its algorithm."""

from __future__ import annotations

from dataclasses import replace

from tether.algorithms.algorithm import Algorithm
from tether.algorithms.grpo import grpo
from tether.algorithms.ppo import ppo
from tether.algorithms.reinforce import reinforce
from tether.algorithms.rloo import rloo
from tether.algorithms.trpo import trpo
from tether.config.recipes import GRPORecipe, PPORecipe, ReinforceRecipe, RLOORecipe, RLRecipe, TRPORecipe


def build_algorithm(recipe: RLRecipe) -> Algorithm:
    """The algorithm of a recipe that learns from rollouts."""
    algorithm = _by_method(recipe)
    advantage_settings = replace(
        algorithm.advantage_settings, importance_sampling_cap=recipe.rollout.importance_sampling_cap
    )
    return replace(algorithm, advantage_settings=advantage_settings)


def _by_method(recipe: RLRecipe) -> Algorithm:
    match recipe:
        case PPORecipe():
            return ppo(recipe.ppo, recipe.kl, recipe.reward)
        case ReinforceRecipe():
            return reinforce(recipe.reinforce, recipe.kl, recipe.reward)
        case RLOORecipe():
            return rloo(recipe.rloo, recipe.kl, recipe.reward)
        case GRPORecipe():
            return grpo(recipe.grpo, recipe.kl, recipe.reward)
        case TRPORecipe():
            return trpo(recipe.trpo, recipe.kl, recipe.reward)
        case _:
            raise ValueError(f"{recipe.method} does not learn from rollouts")
