"""The importance weight in whole runs: every method takes it, and where engine and trainer agree nothing changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tether.config.load import load_recipe
from tether.protocols import RolloutEngine
from tether.train.build import build_rl, load_policy
from tether.train.rl import train_rl

SMALL = [
    *("--run.steps", "2", "--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "4"),
    *("--rollout.samples_per_prompt", "2", "--optimizer.policy_lr", "3e-3"),
]
METHODS = {"ppo": [], "reinforce": [], "rloo": [], "grpo": [], "trpo": ["--trpo.cg_iterations", "2"]}


class Told(RolloutEngine):
    """An engine that says of its log-probs what `change` makes of them."""

    def __init__(self, engine, change):
        self.engine, self.change, self.policy_version = engine, change, 0

    def generate(self, prompts, sampling, *, samples_per_prompt, seed):
        rollouts = self.engine.generate(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)
        return [self._told(rollout) for rollout in rollouts]

    def _told(self, rollout):
        said = self.change(rollout.behavior_logprobs).masked_fill(~rollout.response_mask, 0.0)
        return dataclasses.replace(rollout, behavior_logprobs=said, untruncated_logprobs=said)


def run(method: str, *flags: str, change=None):
    recipe = load_recipe(method, None, [*SMALL, *METHODS[method], *flags])
    parts = build_rl(recipe, load_policy(recipe))
    if change is not None:
        parts = dataclasses.replace(parts, engine=Told(parts.engine, change))
    metrics = [result.metrics for result in train_rl(parts)]
    return metrics, {name: value.clone() for name, value in parts.roles.actor.state_dict().items()}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_from_weighed_tokens(method):
    _, plain = run(method)
    metrics, weighed = run(method, "--rollout.importance_sampling_cap", "2", change=lambda said: said + 0.5)
    assert metrics[0]["importance/mean"] == pytest.approx(torch.tensor(-0.5).exp().item(), rel=1e-4)
    assert any(not torch.equal(plain[name], weighed[name]) for name in plain)


def test_a_cap_cuts_what_lies_above_it():
    metrics, _ = run("ppo", "--rollout.importance_sampling_cap", "1.5", change=lambda said: said - 1.0)
    assert metrics[0]["importance/mean"] == 1.5
    assert metrics[0]["importance/truncated"] == 1.0


@pytest.mark.parametrize("kind", ["sequence", "masked"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_every_kind_of_weight(method, kind):
    flags = ("--rollout.importance_sampling_cap", "2", "--rollout.importance_sampling", kind)
    agreeing, _ = run(method, *flags)
    assert agreeing[0]["importance/mean"] == pytest.approx(1.0, abs=1e-4)
    metrics, _ = run(method, *flags, change=lambda said: said - 1.0)  # every ratio is e
    if kind == "masked":
        assert (metrics[0]["importance/mean"], metrics[0]["importance/masked"]) == (0.0, 1.0)
    else:
        assert (metrics[0]["importance/mean"], metrics[0]["importance/truncated"]) == (2.0, 1.0)


def test_off_by_default():
    metrics, _ = run("ppo")
    assert "importance/mean" not in metrics[0]
    assert metrics[0]["sampler_kl"] < 1e-9
