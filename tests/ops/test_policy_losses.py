"""Policy losses case by case, with their gradients; the value loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masked_grids import close, few, numbers, seeds
from torch import Tensor

from tether.ops.losses import (
    clip_cases,
    clip_loss,
    kl_penalty_loss,
    reinforce_loss,
    unclipped_loss,
    value_loss,
)

ratios = st.floats(0.05, 6.0)
advantages = st.floats(-5.0, 5.0)
clips = st.sampled_from([0.1, 0.2, 0.28, 0.5])
dual_clips = st.sampled_from([None, 1.1, 3.0])


def grid(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def clip_loss_by_definition(ratio: float, a: float, low: float, high: float, dual: float | None = None) -> float:
    objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    if dual is not None and a < 0:
        objective = max(objective, dual * a)
    return -objective


def loss_and_slope(ratio: float, a: float, low: float, high: float, dual: float | None = None) -> tuple[float, float]:
    """The loss at a ratio, and its derivative by the new log-prob."""
    old = grid(-2.0)
    new = (old + math.log(ratio)).requires_grad_()
    loss = clip_loss(new, old, grid(a), clip_low=low, clip_high=high, dual_clip=dual)
    loss.sum().backward()
    assert new.grad is not None
    return loss.item(), new.grad.item()


@pytest.mark.parametrize(
    ("ratio", "a", "loss", "slope"),
    [
        (1.5, 2.0, -2.4, 0.0),  # A > 0, above: min(3, 1.2*2 = 2.4); the clip binds
        (0.5, 2.0, -1.0, -1.0),  # A > 0, below: min(1, 0.8*2 = 1.6) = 1; it does not, slope -r A
        (1.5, -2.0, 3.0, 3.0),  # A < 0, above: min(-3, -2.4) = -3; it does not
        (0.5, -2.0, 1.6, 0.0),  # A < 0, below: min(-1, -1.6) = -1.6; the clip binds
        (1.1, 2.0, -2.2, -2.2),  # inside
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_the_four_cases_golden(ratio: float, a: float, loss: float, slope: float):
    assert loss_and_slope(ratio, a, 0.2, 0.2) == pytest.approx((loss, slope), abs=1e-12)


def test_the_two_sides_of_the_clip_are_set_apart():
    # clip_high 0.5, clip_low 0.1: r = 1.4 is inside, r = 0.8 is outside
    assert loss_and_slope(1.4, 1.0, 0.1, 0.5) == pytest.approx((-1.4, -1.4))
    assert loss_and_slope(0.8, -1.0, 0.1, 0.5) == pytest.approx((0.9, 0.0))


@settings(max_examples=100, deadline=None)
@given(ratios, advantages, clips, clips, dual_clips)
def test_clip_loss_its_gradient_and_its_cases(ratio, a, low, high, dual):
    edges = [1 - low, 1 + high] + ([dual] if dual else [])
    assume(all(abs(ratio - edge) > 1e-6 for edge in edges) and abs(a) > 1e-6)  # no slope at a kink
    loss, slope = loss_and_slope(ratio, a, low, high, dual)
    assert loss == pytest.approx(clip_loss_by_definition(ratio, a, low, high, dual), abs=1e-12)
    binds = (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low) or (a < 0 and dual and ratio > dual)
    assert slope == pytest.approx(0.0 if binds else -ratio * a, abs=1e-12)
    assert bool(binds) == (slope == 0.0)

    new, old = grid(math.log(ratio)), grid(0.0)
    cases = clip_cases(new, old, grid(a), clip_low=low, clip_high=high, dual_clip=dual)
    assert bool(cases.clipped) == (slope == 0.0)
    found = [bool(case) for case in (cases.positive_high, cases.positive_low, cases.negative_high, cases.negative_low)]
    above, below = ratio > 1 + high, ratio < 1 - low
    assert found == [a > 0 and above, a > 0 and below, a < 0 and above, a < 0 and below]


@few
@given(seeds, clips)
def test_the_clip_is_a_pessimistic_bound(seed, clip):
    new, old, a = (0.5 * numbers(seed + k, 3, 4) for k in range(3))
    clipped, plain = clip_loss(new, old, a, clip_low=clip, clip_high=clip), unclipped_loss(new, old, a)
    assert (clipped >= plain - 1e-15).all()
    inside = ((new - old).exp() - 1).abs() <= clip
    close(clipped[inside], plain[inside])
    close(clip_loss(old, old, a, clip_low=clip, clip_high=clip), -a)  # at ratio 1


def test_no_advantage_no_loss_no_case():
    new, old, zero = grid(0.0, 2.0, -1.0), grid(0.0, 0.0, 0.0), grid(0.0, 0.0, 0.0)  # ratios 1, 7.4, 0.37
    assert not clip_loss(new, old, zero, clip_low=0.2, clip_high=0.2).any()
    cases = clip_cases(new, old, zero, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert not any(bool(case.any()) for case in vars(cases).values())


@few
@given(st.floats(1.3, 1e6), st.floats(-5.0, -0.01))
def test_trap_6_bad_actions_are_punished_without_bound(ratio, a):
    loss, slope = loss_and_slope(ratio, a, 0.2, 0.2)
    assert loss == pytest.approx(-ratio * a, rel=1e-12)  # not (1 + eps)|A|
    assert slope == pytest.approx(-ratio * a, rel=1e-12)
    bounded, _ = loss_and_slope(ratio, a, 0.2, 0.2, dual=3.0)
    assert bounded == pytest.approx(min(-ratio * a, -3.0 * a), rel=1e-12)


def test_trap_6_golden():
    # r = 1000, A = -1: the loss is 1000, not 1.2 as "clipped to [1 - eps, 1 + eps]" would have it; dual clip c = 3: 3
    assert loss_and_slope(1000.0, -1.0, 0.2, 0.2)[0] == pytest.approx(1000.0)
    assert loss_and_slope(1000.0, -1.0, 0.2, 0.2, dual=3.0) == pytest.approx((3.0, 0.0))
    assert loss_and_slope(1000.0, 1.0, 0.2, 0.2, dual=3.0) == pytest.approx((-1.2, 0.0))  # A > 0: no dual clip


def test_unclipped_and_reinforce_golden():
    # r = exp(log 2) = 2: loss -2 A.   -A log pi: -3 * log 0.5 = 2.0794415416798357
    close(unclipped_loss(grid(math.log(0.5)), grid(math.log(0.25)), grid(3.0)), [[-6.0]])
    close(reinforce_loss(grid(math.log(0.5)), grid(3.0)), [[2.0794415416798357]])


@few
@given(seeds)
def test_at_ratio_one_every_surrogate_has_the_policy_gradient(seed):
    old, a = -numbers(seed, 2, 3).abs(), numbers(seed + 1, 2, 3)
    losses = {
        "reinforce": lambda new: reinforce_loss(new, a),
        "unclipped": lambda new: unclipped_loss(new, old, a),
        "clip": lambda new: clip_loss(new, old, a, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
        "penalty": lambda new: kl_penalty_loss(new, old, a, beta=0.7, estimator="k3"),
    }
    for loss in losses.values():
        new = old.clone().requires_grad_()
        close(torch.autograd.grad(loss(new).sum(), new)[0], -a)


@pytest.mark.parametrize(
    ("estimator", "kl"),
    [("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 2 - 1 - math.log(2))],
)
def test_kl_penalty_golden(estimator, kl):
    # new 0.5, old 0.25: r = 2, A = 3, loss -6 + 0.1 * k(old || new), where d = log old - log new = -log 2
    found = kl_penalty_loss(grid(math.log(0.5)), grid(math.log(0.25)), grid(3.0), beta=0.1, estimator=estimator)
    close(found, [[-6.0 + 0.1 * kl]])


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [
        (2.0, 1.0, 0.0, None, 2.0),  # (2 - 0)^2 / 2
        (2.0, 1.0, 0.0, 0.5, 2.0),  # clipped to 1.5: 1.125, the larger stays
        (2.0, 1.0, 3.0, 0.5, 1.125),  # plain (2 - 3)^2/2 = 0.5; clipped to 1.5: (1.5 - 3)^2/2 = 1.125
        (-2.0, 1.0, -3.0, 0.5, 6.125),  # plain 0.5; clipped to 0.5: 3.5^2/2
        (1.2, 1.0, 3.0, 0.5, 1.62),  # inside: 1.8^2 / 2
    ],
)
def test_value_loss_golden(value, old, target, clip, loss):
    close(value_loss(grid(value), grid(old), grid(target), clip=clip), [[loss]])


@few
@given(seeds, st.sampled_from([0.1, 0.5, 10.0]))
def test_the_value_clip_only_removes_an_incentive(seed, clip):
    values, old, returns = (2.0 * numbers(seed + k, 3, 4) for k in range(3))
    values.requires_grad_()
    loss = value_loss(values, old, returns, clip=clip)
    (slope,) = torch.autograd.grad(loss.sum(), values)
    for v, o, target, found, rise in zip(
        *(x.flatten().tolist() for x in (values, old, returns, loss, slope)), strict=True
    ):
        clipped = o + min(max(v - o, -clip), clip)
        plain, other = (v - target) ** 2 / 2, (clipped - target) ** 2 / 2
        assert found == pytest.approx(max(plain, other), abs=1e-12)
        kept = abs(v - o) <= clip or plain >= other
        assert rise == pytest.approx(v - target if kept else 0.0, abs=1e-12)
