"""Log-ratios that float32 cannot exponentiate: losses and gradients stay finite, and nothing else changes by a bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether.algorithms.objectives import Clip, KLPenalty, PolicyObjective, Surrogate, Unclipped
from tether.ops.kl import MAX_LOG_RATIO, kl_estimate, log_ratio
from tether.ops.losses import clip_cases, clip_loss, kl_penalty_loss, truncated_importance, unclipped_loss
from tether.types import Experience, TokenOutputs

LOW, HIGH, BETA = 0.2, 0.3, 0.7
log_ratios = st.floats(-1e4, 1e4, width=32)
within = st.floats(-1e4, MAX_LOG_RATIO, width=32)
advantages = st.floats(-5.0, 5.0, width=32)
Number = tuple[float, float]


def with_slope(loss: Callable[[Tensor], Tensor], log_ratio_: float) -> Number:
    """A loss and its derivative by the new log-prob, in float32, where the old one is 0."""
    new = torch.tensor([[log_ratio_]], requires_grad=True)
    value = loss(new)
    (slope,) = torch.autograd.grad(value.sum(), new)
    return value.item(), slope.item()


def ratio_by_hand(x: float) -> Number:
    """exp(min(x, 20)) and its derivative."""
    return math.exp(min(x, 20.0)), math.exp(x) if x <= 20.0 else 0.0


def clip_by_hand(x: float, a: float, dual: float | None) -> Number:
    ratio, slope = ratio_by_hand(x)
    objective, grad = ratio * a, slope * a
    for bound, binds in ((1 + HIGH, a > 0 and ratio > 1 + HIGH), (1 - LOW, a < 0 and ratio < 1 - LOW)):
        if binds:
            objective, grad = bound * a, 0.0
    if dual is not None and a < 0 and dual * a > objective:
        objective, grad = dual * a, 0.0
    return -objective, -grad


def k3_by_hand(d: float) -> Number:
    """exp(-d) - 1 + d, and its derivative by d, with d no lower than -20."""
    held = max(d, -20.0)
    return math.expm1(-held) + held, -math.expm1(-d) if d >= -20.0 else 0.0


def agree(found: Number, expected: Number) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert math.isfinite(ours)
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-5)  # exp() of a float32 near 20 is off by 20 x 6e-8 x 2


old = torch.zeros(1, 1)


@settings(max_examples=150, deadline=None)
@given(x=log_ratios, a=advantages, dual=st.sampled_from([None, 3.0]))
def test_the_clip_is_finite_and_what_it_says(x: float, a: float, dual: float | None):
    advantage = torch.tensor([[a]])
    options = {"clip_low": LOW, "clip_high": HIGH, "dual_clip": dual}
    near_edge = any(abs(x - math.log(edge)) < 1e-5 for edge in (1 - LOW, 1 + HIGH, 3.0))
    if not near_edge:
        agree(with_slope(lambda new: clip_loss(new, old, advantage, **options), x), clip_by_hand(x, a, dual))
    cases = clip_cases(torch.tensor([[x]]), old, advantage, **options)
    assert not (cases.positive_high & cases.positive_low).any()


@settings(max_examples=150, deadline=None)
@given(x=log_ratios, a=advantages)
def test_the_unclipped_surrogate_and_the_penalty(x: float, a: float):
    advantage, (ratio, slope) = torch.tensor([[a]]), ratio_by_hand(x)
    agree(with_slope(lambda new: unclipped_loss(new, old, advantage), x), (-ratio * a, -slope * a))
    penalty, pull = k3_by_hand(-x)
    found = with_slope(lambda new: kl_penalty_loss(new, old, torch.zeros(1, 1), beta=BETA, estimator="k3"), x)
    agree(found, (BETA * penalty, -BETA * pull))
    for estimator in ("k1", "k2", "k3"):
        found = with_slope(
            lambda new, estimator=estimator: kl_penalty_loss(new, old, advantage, beta=BETA, estimator=estimator), x
        )
        assert all(map(math.isfinite, found))


@settings(max_examples=150, deadline=None)
@given(x=log_ratios)
def test_k3_is_finite_never_negative_and_pulls_from_above(x: float):
    agree(with_slope(lambda new: kl_estimate(new, old, "k3"), x), k3_by_hand(x))
    value, pull = with_slope(lambda new: kl_estimate(new, old, "k3"), x)
    assert value >= 0.0 and (x < 1.0 or pull > 0.6)  # a policy far above its reference is still drawn back


@settings(max_examples=100, deadline=None)
@given(x=within, a=advantages, seed=st.integers(0, 99))
def test_up_to_the_clamp_no_bit_changes(x: float, a: float, seed: int):
    draws = torch.Generator().manual_seed(seed)
    old_logprobs = -3.0 * torch.rand(1, 1, generator=draws)
    advantage = torch.tensor([[a]])

    def plain(new: Tensor) -> dict[str, Tensor]:
        ratio, d = torch.exp(new - old_logprobs), new - old_logprobs
        clipped = ratio.clamp(1 - LOW, 1 + HIGH)
        return {
            "clip": torch.maximum(-ratio * advantage, -clipped * advantage),
            "unclipped": -ratio * advantage,
            "k3": torch.expm1(d) - d,
            "weight": torch.exp(new - old_logprobs).clamp(max=2.0),
        }

    def ours(new: Tensor) -> dict[str, Tensor]:
        return {
            "clip": clip_loss(new, old_logprobs, advantage, clip_low=LOW, clip_high=HIGH),
            "unclipped": unclipped_loss(new, old_logprobs, advantage),
            "k3": kl_estimate(old_logprobs, new, "k3"),
            "weight": truncated_importance(new, old_logprobs, cap=2.0),
        }

    start = (old_logprobs + x).clamp(max=float(old_logprobs) + MAX_LOG_RATIO - 1e-3)
    for name in ("clip", "unclipped", "k3", "weight"):
        pairs = []
        for losses in (plain, ours):
            new = start.clone().requires_grad_()
            loss = losses(new)[name]
            pairs.append((loss.detach(), *torch.autograd.grad(loss.sum(), new)))
        assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True)), name


def experience(logprobs: list[float], reference: float = -1.0) -> tuple[TokenOutputs, Experience]:
    """One row of answers whose old log-probs are -1; the first token is the prompt's."""
    new = torch.tensor([[0.0, *logprobs]], requires_grad=True)
    shape, row = new.shape, torch.zeros(1)
    mask = torch.tensor([[False, *([True] * len(logprobs))]])
    batch = Experience(
        tokens=torch.zeros(shape, dtype=torch.long), attention_mask=torch.ones(shape, dtype=torch.bool),
        response_mask=mask, behavior_logprobs=-torch.ones(shape), untruncated_logprobs=-torch.ones(shape), scores=row,
        group_ids=row.long(), truncated=row.bool(), old_logprobs=-torch.ones(shape),
        ref_logprobs=torch.full(shape, reference), values=None, final_values=None, entropy=torch.ones(shape),
        top_tokens=None, top_logprobs=None,
        rewards=torch.zeros(shape), advantages=torch.ones(shape), returns=None,
    )  # fmt: skip
    return TokenOutputs(new, torch.ones(shape), None), batch


@pytest.mark.parametrize("surrogate", [Clip(0.2, 0.2), Unclipped(), KLPenalty(1.0, "k3")], ids=["clip", "none", "k3"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_objective_counts_the_tokens_it_clamped(surrogate: Surrogate, sign: float):
    outputs, batch = experience([-0.9, 100.0, 1e4, -1e4])
    batch = replace(batch, advantages=sign * batch.advantages)
    loss = PolicyObjective(surrogate, entropy_coef=0.01)(outputs, batch)
    (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
    assert torch.isfinite(loss.total) and torch.isfinite(gradient).all()
    found = loss.metrics.values()
    assert found["ratio_clamped"] == 0.5 and all(map(math.isfinite, found.values()))


def test_a_kl_to_the_reference_in_the_loss_is_counted_too():
    outputs, batch = experience([-0.9, -200.0], reference=-0.5)
    for kl_coef, share in ((0.0, 0.0), (0.1, 0.5)):
        loss = PolicyObjective(Clip(0.2, 0.2), kl_coef=kl_coef, kl_estimator="k3")(outputs, batch)
        assert loss.metrics.mean("ratio_clamped") == share
        (gradient,) = torch.autograd.grad(loss.total, outputs.logprobs)
        assert torch.isfinite(gradient).all()


def test_the_bound_itself_has_a_gradient():
    new = torch.tensor([MAX_LOG_RATIO, MAX_LOG_RATIO + 0.01], requires_grad=True)
    (slope,) = torch.autograd.grad(log_ratio(new, torch.zeros(2)).sum(), new)
    assert slope.tolist() == [1.0, 0.0]
