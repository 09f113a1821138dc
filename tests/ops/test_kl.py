"""KL estimators against exact divergences, and the controllers against hand-worked steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import close, few, numbers, seeds
from torch import Tensor

from tether.ops.kl import AdaptiveKL, Estimator, FixedKL, ProportionalKL, exact_kl, kl_estimate

sizes = st.integers(2, 8)


def distribution(seed: int, vocabulary: int) -> Tensor:
    return torch.log_softmax(2.0 * numbers(seed, vocabulary), dim=-1)


@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [
        ("k1", 0.6931471805599453),  # d = log 0.5 - log 0.25 = log 2
        ("k2", 0.2402265069591007),  # (log 2)^2 / 2
        ("k3", 0.1931471805599453),  # 1/2 - 1 + log 2
    ],
)
def test_estimators_golden(estimator: Estimator, wanted: float):
    p, q = torch.tensor([0.5]).double().log(), torch.tensor([0.25]).double().log()
    close(kl_estimate(p, q, estimator), [wanted])


def test_exact_golden():
    # 1/2 log(0.5/0.25) + 1/2 log(0.5/0.75) = 1/2 log(4/3);   reversed: 1/4 log(1/2) + 3/4 log(3/2)
    p, q = torch.tensor([0.5, 0.5]).double().log(), torch.tensor([0.25, 0.75]).double().log()
    close(exact_kl(p, q), 0.14384103622589045)
    close(exact_kl(q, p), 0.25 * math.log(0.5) + 0.75 * math.log(1.5))


@few
@given(st.floats(-20, 20), st.floats(-20, 20))
def test_which_estimators_are_never_negative(a: float, b: float):
    p, q = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert kl_estimate(p, q, "k2") >= 0.0
    assert kl_estimate(p, q, "k3") >= -1e-12
    assert kl_estimate(p, q, "k1") == -kl_estimate(q, p, "k1")
    for estimator in ("k1", "k2", "k3"):
        assert kl_estimate(p, p, estimator) == 0.0


@few
@given(st.floats(-1e-6, 1e-6))
def test_k3_keeps_its_digits_near_zero(d: float):
    # exp(-d) - 1 + d = d^2/2 - ...: in single precision "exp(-d) - 1" loses every digit of it; expm1 never goes below 0
    single = kl_estimate(torch.tensor(d), torch.tensor(0.0), "k3")
    assert 0.0 <= float(single) <= d * d + 1e-13


@few
@given(seeds, sizes)
def test_expectations_over_the_whole_vocabulary(seed: int, vocabulary: int):
    log_p, log_q = distribution(seed, vocabulary), distribution(seed + 1, vocabulary)
    p, q = log_p.exp().tolist(), log_q.exp().tolist()
    by_definition = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert by_definition >= 0.0
    close(exact_kl(log_p, log_q), by_definition)
    for estimator in ("k1", "k3"):
        close((log_p.exp() * kl_estimate(log_p, log_q, estimator)).sum(), by_definition)
    assert exact_kl(log_p, log_p) == 0.0


@few
@given(seeds, sizes)
def test_gradients_of_the_estimates_of_kl_from_old_to_new(seed: int, vocabulary: int):
    # Tokens from old, gradient with respect to new: the mean gradients of k1 and of k3 are that of the exact KL.
    logits = numbers(seed, vocabulary).requires_grad_()
    old = distribution(seed + 1, vocabulary)
    (exact,) = torch.autograd.grad(exact_kl(old, torch.log_softmax(logits, -1)), logits)
    close(exact, logits.detach().softmax(-1) - old.exp())  # p_new - p_old, by hand
    for estimator in ("k1", "k3"):
        mean = (old.exp() * kl_estimate(old, torch.log_softmax(logits, -1), estimator)).sum()
        close(torch.autograd.grad(mean, logits)[0], exact)


def test_exact_kl_keeps_leading_shapes():
    log_p, log_q = (torch.log_softmax(numbers(seed, 2, 3, 5), -1) for seed in (1, 2))
    found = exact_kl(log_p, log_q)
    assert found.shape == (2, 3)
    close(found[1, 2], exact_kl(log_p[1, 2], log_q[1, 2]))
    assert (found > 0.0).all()


def test_exact_kl_of_a_token_that_p_never_draws():
    # 0 log 0 is 0: a truncated or masked vocabulary gives log p = -inf. KL = 1 log(1/0.5).
    log_p, log_q = torch.tensor([0.0, -torch.inf]), torch.tensor([0.5, 0.5]).log()
    close(exact_kl(log_p, log_q), math.log(2.0), 1e-6)


def test_trap_4_signs_of_the_naive_estimates():
    # old = (1/2, 1/2), new = (1/4, 3/4): KL(old || new) = 0.1438. The mean of new - old is its negative. On a
    # batch that drew only the second token the mean log ratio is log(0.5/0.75) < 0; k3 is 1.5 - 1 - log 1.5 > 0.
    old, new = torch.tensor([0.5, 0.5]).double().log(), torch.tensor([0.25, 0.75]).double().log()
    assert (old.exp() * (new - old)).sum() == pytest.approx(-0.14384103622589045)
    batch = torch.tensor([1, 1, 1])
    assert kl_estimate(old[batch], new[batch], "k1").mean() < 0.0
    close(kl_estimate(old[batch], new[batch], "k3").mean(), 0.5 - math.log(1.5))


def test_fixed():
    assert FixedKL(0.1).after(99.0, 8) == FixedKL(0.1)


@pytest.mark.parametrize(
    ("kl", "coef"),
    [(0.01, 0.1), (0.0199, 0.1), (0.0201, 0.2), (0.03, 0.2), (0.0449, 0.2), (0.0451, 0.4), (1.0, 0.4)],
)
def test_adaptive_halves_below_and_doubles_above(kl: float, coef: float):
    # target 0.03: below 0.03/1.5 = 0.02 halve, above 0.03*1.5 = 0.045 double
    assert AdaptiveKL(0.2, target=0.03).after(kl, 8) == AdaptiveKL(coef, target=0.03)


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (6.0, 0.2),  # on target: as it was
        (6.6, 0.2 * 1.00064),  # error 0.1: 1 + 0.1*64/10000
        (60.0, 0.2 * 1.00128),  # error 9, clipped to 0.2: 1 + 0.2*64/10000
        (0.0, 0.2 * 0.99872),  # error -1, clipped to -0.2
        (-6.0, 0.2 * 0.99872),
    ],
)
def test_proportional_moves_with_the_clipped_error(kl: float, coef: float):
    after = ProportionalKL(0.2, target=6.0, horizon=10_000).after(kl, 64)
    assert after.coef == pytest.approx(coef, rel=1e-14)
    assert (after.target, after.horizon) == (6.0, 10_000)


def test_controllers_compose_and_do_not_change_in_place():
    first = AdaptiveKL(1.0, target=1.0)
    assert first.after(9.0, 1).after(9.0, 1).after(0.1, 1).coef == 2.0
    assert first.coef == 1.0
