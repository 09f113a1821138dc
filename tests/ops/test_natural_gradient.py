"""Conjugate gradients, Fisher-vector products and the line search."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_grids import close, numbers, seeds
from torch import Tensor

from tether.ops.kl import exact_kl
from tether.ops.trust_region import LineSearch, conjugate_gradient, fisher_vector_product, line_search, step_scale

few = settings(max_examples=25, deadline=None)


def positive_definite(seed: int, size: int) -> Tensor:
    root = numbers(seed, size, size)
    return root @ root.T + 0.5 * torch.eye(size, dtype=torch.float64)


def test_conjugate_gradient_golden():
    # [[4, 1], [1, 3]] x = [1, 2]: x = [1/11, 7/11]. First step: r.r = 5, r.Ar = [1,2].[6,7] = 20, so x1 = r/4.
    matrix, vector = torch.tensor([[4.0, 1.0], [1.0, 3.0]]).double(), torch.tensor([1.0, 2.0]).double()
    close(conjugate_gradient(lambda x: matrix @ x, vector, iterations=1), [0.25, 0.5])
    close(conjugate_gradient(lambda x: matrix @ x, vector, iterations=2), [1 / 11, 7 / 11])


@few
@given(seeds, st.integers(1, 12))
def test_conjugate_gradient_solves_random_systems(seed, size):
    matrix, vector = positive_definite(seed, size), numbers(seed + 1, size)
    calls = []

    def product(x: Tensor) -> Tensor:
        calls.append(x)
        return matrix @ x

    solution = conjugate_gradient(product, vector, iterations=3 * size)
    close(solution, torch.linalg.solve(matrix, vector), 1e-7)
    assert (matrix @ solution - vector).norm() <= 1e-9 * vector.norm()
    assert len(calls) <= 3 * size


def test_conjugate_gradient_knows_when_to_stop():
    calls = []

    def identity(x: Tensor) -> Tensor:
        calls.append(x)
        return x

    vector = numbers(1, 5)
    assert torch.equal(conjugate_gradient(identity, vector, iterations=50), vector)
    assert len(calls) == 1
    assert not conjugate_gradient(identity, torch.zeros(5), iterations=50).any()  # no gradient, no step, no NaN
    assert len(calls) == 1


@few
@given(seeds, st.integers(2, 8), st.floats(1e-3, 10.0))
def test_a_scaled_step_reaches_the_bound_of_the_quadratic_model(seed, size, max_kl):
    matrix, direction = positive_definite(seed, size), numbers(seed + 1, size)
    step = step_scale(direction, matrix @ direction, max_kl=max_kl) * direction
    assert float(step @ matrix @ step) / 2 == pytest.approx(max_kl, rel=1e-12)


def test_step_scale_golden_and_without_curvature():
    # s = [3, 4], A s = s: s.As = 25; sqrt(2 * 0.5 / 25) = 0.2
    s = torch.tensor([3.0, 4.0])
    assert step_scale(s, s, max_kl=0.5) == pytest.approx(0.2)
    for image in (0.0 * s, -s, float("nan") * s):
        assert step_scale(s, image, max_kl=0.5) == 0.0


# A softmax policy over 3 actions in 4 states, logits = features @ weight + bias: its Fisher matrix can be written out.

FEATURES = numbers(11, 4, 2)


def parameters(seed: int) -> list[Tensor]:
    return [numbers(seed, 2, 3).requires_grad_(), numbers(seed + 1, 3).requires_grad_()]


def log_policy(weight: Tensor, bias: Tensor, features: Tensor = FEATURES) -> Tensor:
    return torch.log_softmax(features @ weight + bias, dim=-1)


def fisher_as_outer_products(weight: Tensor, bias: Tensor) -> Tensor:
    """mean over states of sum_a p(a|s) g g^T, g = grad log p(a|s): with onehot(a) - p for the logits, by hand."""
    fisher = torch.zeros(9, 9, dtype=torch.float64)
    for features, logs in zip(FEATURES, log_policy(weight, bias).detach(), strict=True):
        for action in range(3):
            slope = torch.eye(3, dtype=torch.float64)[action] - logs.exp()
            g = torch.cat([torch.outer(features, slope).reshape(-1), slope])
            fisher += logs[action].exp() * torch.outer(g, g) / len(FEATURES)
    return fisher


@few
@given(seeds)
def test_fisher_vector_product_against_the_written_out_matrix(seed):
    weight, bias = parameters(seed)
    vector = numbers(seed + 2, 9)

    def kl_over(states: slice):
        def share() -> Tensor:
            new = log_policy(weight, bias, FEATURES[states])
            return exact_kl(new.detach(), new).sum() / len(FEATURES)

        return share

    wanted = fisher_as_outer_products(weight, bias) @ vector
    close(fisher_vector_product([kl_over(slice(0, 4))], [weight, bias], vector), wanted)
    micro = [kl_over(slice(0, 1)), kl_over(slice(1, 4))]
    close(fisher_vector_product(micro, [weight, bias], vector), wanted)  # any split gives the same

    def mean_kl(flat: Tensor) -> Tensor:
        old = log_policy(weight, bias).detach()
        return exact_kl(old, log_policy(flat[:6].view(2, 3), flat[6:])).mean()

    flat = torch.cat([weight.detach().reshape(-1), bias.detach()])
    hessian = torch.autograd.functional.hessian(mean_kl, flat)
    assert isinstance(hessian, Tensor)
    close(hessian @ vector, wanted, 1e-10)
    assert float(vector @ wanted) >= 0.0
    assert weight.grad is None and bias.grad is None  # nothing is left behind


@few
@given(seeds)
def test_the_natural_step_has_the_kl_it_was_scaled_to(seed):
    # For a small bound the quadratic model is the KL: direction F^-1 g, scaled, gives KL(old || new) = bound.
    weight, bias = (parameter.detach() for parameter in parameters(seed))
    fisher = fisher_as_outer_products(weight, bias) + 1e-3 * torch.eye(9, dtype=torch.float64)
    gradient, bound = numbers(seed + 2, 9), 1e-8
    direction = conjugate_gradient(lambda x: fisher @ x, gradient, iterations=40)
    exact_fisher = fisher_as_outer_products(weight, bias)
    step = step_scale(direction, exact_fisher @ direction, max_kl=bound) * direction
    if float(step.norm()) > 1e-2:
        return  # too flat for the quadratic model
    new = log_policy(weight + step[:6].view(2, 3), bias + step[6:])
    assert float(exact_kl(log_policy(weight, bias), new).mean()) == pytest.approx(bound, rel=0.02)


def search(trials: list[tuple[float, float]], max_kl: float = 0.1, before: float = 1.0, b: float = 0.5) -> LineSearch:
    fractions = []

    def trial(fraction: float) -> tuple[float, float]:
        fractions.append(fraction)
        return trials[len(fractions) - 1]

    found = line_search(trial, surrogate_before=before, max_kl=max_kl, backtrack=b, max_backtracks=len(trials) - 1)
    assert fractions == [b**k for k in range(len(fractions))]
    return found


def test_line_search_golden():
    # Full step: KL too large. Half: no gain. Quarter: gain 0.2 within the bound.
    assert search([(3.0, 0.2), (0.9, 0.05), (1.2, 0.02)]) == LineSearch(0.25, 1.2, 0.02)
    assert search([(1.1, 0.1)]) == LineSearch(1.0, 1.1, 0.1)  # on the bound is within it
    assert not search([(1.0, 0.0)]).accepted  # no gain at all is no step
    assert search([(5.0, 0.2), (5.0, 0.11)]) == LineSearch(0.0, 1.0, 0.0)


anything = st.one_of(st.floats(-2.0, 4.0), st.just(float("nan")), st.sampled_from([math.inf, -math.inf]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(anything, anything), min_size=1, max_size=6), st.floats(0.01, 2.0))
def test_line_search_takes_the_first_trial_that_will_do_and_none_past_the_bound(trials, max_kl):
    found = search(trials, max_kl=max_kl)
    good = [k for k, (gain, kl) in enumerate(trials) if gain > 1.0 and kl <= max_kl]
    assert found.accepted == bool(good)
    if good:
        assert found == LineSearch(0.5 ** good[0], *trials[good[0]])
        assert found.kl <= max_kl and found.surrogate > 1.0
    else:
        assert found == LineSearch(0.0, 1.0, 0.0)


@pytest.mark.parametrize("bad", [(math.nan, 0.0), (2.0, math.nan), (math.nan, math.nan), (2.0, math.inf)])
def test_line_search_refuses_what_is_not_a_number(bad: tuple[float, float]):
    assert not search([bad]).accepted
    assert search([bad, (1.5, 0.05)]).fraction == 0.5
