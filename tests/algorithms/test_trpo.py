"""TRPO keeps its promises over many updates of a real model."""

from __future__ import annotations

import dataclasses

from tether.config.load import load_recipe
from tether.train.build import build_rl, load_policy
from tether.train.rl import train_rl

FLAGS = [
    *("--run.steps", "50", "--kl.apply_to", "none"),
    *("--rollout.prompts_per_step", "16", "--rollout.max_new_tokens", "4"),
    *("--trpo.cg_iterations", "4", "--trpo.critic_epochs", "1", "--trpo.max_kl", "0.02", "--trpo.damping", "0.01"),
]


def test_fifty_updates_stay_within_the_bound_and_never_lose_surrogate():
    recipe = load_recipe("trpo", None, FLAGS)
    accepted, kls, gains = 0, [], []
    for result in train_rl(build_rl(recipe, load_policy(recipe))):
        kls.append(result.metrics["approx_kl_after"])
        gains.append(result.metrics["surrogate_gain"])
        accepted += int(result.metrics["steps"])
        assert result.metrics["approx_kl_after"] <= recipe.trpo.max_kl
    assert len(kls) == 50
    assert accepted >= 40  # the promise is not kept by standing still
    assert all(gain > 0 for gain, kl in zip(gains, kls, strict=True) if kl > 0)
    assert all(gain == 0 for gain, kl in zip(gains, kls, strict=True) if kl == 0)


def test_an_impossible_bound_leaves_the_policy_where_it_was():
    recipe = load_recipe("trpo", None, [*FLAGS, "--trpo.max_backtracks", "0", "--run.steps", "1"])
    parts = build_rl(recipe, load_policy(recipe))
    settings = recipe.trpo.model_copy(update={"max_kl": 1e-30})
    update = dataclasses.replace(parts.algorithm.update, settings=settings)
    parts = dataclasses.replace(parts, algorithm=dataclasses.replace(parts.algorithm, update=update))
    before = parts.learner.flat_parameters("policy")
    (result,) = train_rl(parts)
    assert result.metrics["step_fraction"] == 0
    assert result.metrics["approx_kl_after"] == 0
    assert bool((parts.learner.flat_parameters("policy") == before).all())
