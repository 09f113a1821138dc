"""Means, variances and whitening over the mask, and over nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from masked_grids import close, few, garbage, lay_out, masks, numbers, on_row, seeds, spoil

from tether.ops.masks import masked_mean, masked_sum, masked_variance, whiten

MASK = torch.tensor([[True, True, False], [True, False, True]])
X = torch.tensor([[1.0, 2.0, 1e30], [4.0, float("nan"), 5.0]], dtype=torch.float64)


def test_golden():
    # 1, 2, 4, 5: sum 12, mean 3, squares 4 + 1 + 1 + 4 = 10, variance 10/4 = 2.5 or 10/3 unbiased
    assert masked_sum(X, MASK) == 12.0
    assert masked_mean(X, MASK) == 3.0
    assert masked_variance(X, MASK) == 2.5
    close(masked_variance(X, MASK, unbiased=True), 10 / 3)


def test_whitening_golden():
    # (x - 3) / sqrt(2.5 + 0): -2/1.5811388300841898 = -1.2649110640673518, and half of that for -1
    a, b = 1.2649110640673518, 0.6324555320336759
    close(whiten(X, MASK, epsilon=0.0), [[-a, -b, 0.0], [b, 0.0, a]])
    close(whiten(X, MASK, epsilon=0.0, shift_mean=False), [[3 - a, 3 - b, 0.0], [3 + b, 0.0, 3 + a]])
    # epsilon is under the root: sqrt(2.5 + 1.5) = 2
    close(whiten(X, MASK, epsilon=1.5), [[-1.0, -0.5, 0.0], [0.5, 0.0, 1.0]])
    # unbiased: sqrt(10/3 + 2/3) = 2
    close(whiten(X, MASK, epsilon=2 / 3, unbiased=True), [[-1.0, -0.5, 0.0], [0.5, 0.0, 1.0]])


@few
@given(masks(), seeds, garbage, st.booleans(), st.booleans())
def test_against_a_slow_oracle(mask, seed, bad, shift_mean, unbiased):
    assume(not unbiased or int(mask.sum()) > 1)
    x = numbers(seed, *mask.shape)
    sampled = [x[b, t].item() for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t]]
    mean = math.fsum(sampled) / len(sampled)
    variance = math.fsum((value - mean) ** 2 for value in sampled) / (len(sampled) - unbiased)
    kept = 0.0 if shift_mean else mean
    rows = [[(v - mean) / math.sqrt(variance + 1e-8) + kept for v in on_row(x, mask, b)] for b in range(len(mask))]
    spoilt = spoil(x, mask, bad)
    close(masked_sum(spoilt, mask), math.fsum(sampled))
    close(masked_mean(spoilt, mask), mean)
    close(masked_variance(spoilt, mask, unbiased=unbiased), variance)
    # A deviation of 1e-16 over sqrt(1e-8) is 1e-12: the bound is that of a sum of rounding errors.
    close(whiten(spoilt, mask, shift_mean=shift_mean, unbiased=unbiased), lay_out(rows, mask), 1e-11)


@few
@given(masks(), seeds, garbage)
def test_whitened_numbers_have_mean_0_and_variance_1(mask, seed, bad):
    x = 3.0 * numbers(seed, *mask.shape) + 5.0
    assume(float(masked_variance(x, mask)) > 1e-3)
    whitened = whiten(spoil(x, mask, bad), mask, epsilon=0.0)
    close(masked_mean(whitened, mask), 0.0, 1e-11)
    close(masked_variance(whitened, mask), 1.0, 1e-11)
    close(whiten(x, mask, epsilon=0.0, shift_mean=False) - whitened, masked_mean(x, mask) * mask, 1e-11)
    close(whiten(2.0 * x + 7.0, mask, epsilon=0.0), whitened, 1e-10)  # neither scale nor origin matters
    assert (whitened[~mask] == 0.0).all()


def test_constant_numbers_whiten_to_nothing():
    mask = torch.tensor([[True, True, False]])
    assert whiten(torch.full((1, 3), 4.0), mask).tolist() == [[0.0, 0.0, 0.0]]
    assert whiten(torch.full((1, 3), 4.0), mask, shift_mean=False).tolist() == [[4.0, 4.0, 0.0]]


def test_a_mean_of_nothing_is_not_a_number():
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    assert math.isnan(masked_mean(torch.ones(2, 2), nothing))
    assert masked_sum(torch.ones(2, 2), nothing) == 0.0
    assert math.isnan(masked_variance(torch.ones(1, 2), torch.tensor([[True, False]]), unbiased=True))


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_gradients_never_come_from_off_the_mask(bad: float):
    x = X.masked_fill(~MASK, bad).requires_grad_()
    masked_mean(x**2, MASK).backward()
    # d/dx of (1/4) sum x^2 is x / 2 on the mask
    assert x.grad is not None
    close(x.grad[MASK], [0.5, 1.0, 2.0, 2.5])


def test_trap_2_padding_would_move_every_mean():
    x = X.masked_fill(~MASK, 0.0)  # even padding of zeros, the kindest
    assert x.mean() == 2.0  # 12/6, not 12/4 = 3
    naive = (x - x.mean()) / x.std(unbiased=False)
    assert (naive - whiten(X, MASK, epsilon=0.0))[MASK].abs().min() > 0.1
