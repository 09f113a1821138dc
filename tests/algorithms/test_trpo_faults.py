"""TRPO's step is skipped, counted and written down like any other, and starts again when memory runs out."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tether.config.load import load_recipe
from tether.models.roles import ActorCritic
from tether.train.build import build_rl, load_policy
from tether.train.rl import train_rl

FLAGS = [
    *("--run.steps", "1", "--rollout.prompts_per_step", "8", "--rollout.max_new_tokens", "4"),
    *("--trpo.cg_iterations", "2", "--trpo.critic_epochs", "1"),
]


def build(*flags: str):
    recipe = load_recipe("trpo", None, [*FLAGS, *flags])
    return build_rl(recipe, load_policy(recipe))


class PoisonedOnce:
    """An objective whose loss in the first micro-batch is not a number."""

    def __init__(self, inner):
        self.inner, self.size, self.calls = inner, inner.size, 0

    def __call__(self, outputs, batch):
        loss = self.inner(outputs, batch)
        self.calls += 1
        return dataclasses.replace(loss, total=loss.total * math.nan) if self.calls == 1 else loss


def test_one_bad_micro_batch_is_not_left_out_of_the_gradient_but_skips_the_step():
    parts = build("--optimizer.micro_batch_tokens", "64")
    plain = parts.algorithm.objective
    algorithm = dataclasses.replace(parts.algorithm, objective=lambda coefficients: PoisonedOnce(plain(coefficients)))
    faults = []
    parts.learner.on_fault = faults.append
    before = parts.learner.flat_parameters("policy")
    (result,) = train_rl(dataclasses.replace(parts, algorithm=algorithm))
    assert result.metrics["skipped_steps"] == 1
    assert torch.equal(parts.learner.flat_parameters("policy"), before)
    assert parts.learner.skipped_in_a_row == len(faults) == 1
    assert faults[0].findings[0].tensor == "loss"


def test_a_curvature_that_is_not_finite_skips_the_step(monkeypatch):
    from tether.algorithms import trpo

    monkeypatch.setattr(trpo.TrustRegion, "curvature", lambda self, vector, damping: vector * math.inf)
    parts = build()
    before = parts.learner.flat_parameters("policy")
    (result,) = train_rl(parts)
    assert result.metrics["skipped_steps"] == 1
    assert torch.equal(parts.learner.flat_parameters("policy"), before)


def test_a_batch_that_is_not_finite_is_refused_once():
    parts = build()
    with torch.no_grad():
        next(parts.roles.reference.backbone.parameters()).fill_(math.nan)
    before = parts.learner.state(copy=True)
    (result,) = train_rl(parts)
    assert result.metrics["skipped_steps"] == parts.learner.skipped_in_a_row == 1
    assert all(torch.equal(tensor, before.tensors[name]) for name, tensor in parts.learner.state().tensors.items())


@pytest.mark.parametrize("call", [0, 2, 4])
def test_out_of_memory_in_the_trust_region_starts_the_move_again(monkeypatch, call):
    (expected,) = train_rl(build("--optimizer.micro_batch_tokens", "64"))
    calls = []
    plain = ActorCritic.distributions

    def distributions(self, batch):
        calls.append(len(batch))
        if len(calls) - 1 == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, batch)

    monkeypatch.setattr(ActorCritic, "distributions", distributions)
    parts = build("--optimizer.micro_batch_tokens", "128")
    (result,) = train_rl(parts)
    assert parts.learner.micro_batch_tokens < 128
    assert result.metrics["out_of_memory"] == 1
    for name in ("approx_kl_after", "surrogate_gain", "step_fraction"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3)
