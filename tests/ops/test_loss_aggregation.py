"""Which mean a loss is, and that no split into micro-batches changes it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import close, few, garbage, masks, numbers, seeds, spoil

from tether.ops.losses import Aggregation

MODES = [Aggregation("token"), Aggregation("sequence"), Aggregation("fixed", fixed_length=7)]
MASK = torch.tensor([[False, True, True, True], [False, True, False, False]])
LOSSES = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 10.0, 9.0, 9.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("aggregation", "total", "size"),
    [
        (Aggregation("token"), 16.0, 4.0),  # 1 + 2 + 3 + 10 over 4 tokens: 4
        (Aggregation("sequence"), 12.0, 2.0),  # (1 + 2 + 3)/3 + 10/1 over 2 rows: 6
        (Aggregation("fixed", fixed_length=5), 16.0, 10.0),  # 16 over 2 rows of 5: 1.6
    ],
)
def test_golden(aggregation: Aggregation, total: float, size: float):
    assert aggregation.total(LOSSES, MASK).item() == total
    assert aggregation.size(MASK) == size


@few
@given(masks(max_rows=6), seeds, garbage, st.sampled_from(MODES), st.data())
def test_any_split_into_micro_batches_gives_the_same_number(mask, seed, bad, aggregation, data):
    losses = spoil(numbers(seed, *mask.shape), mask, bad)
    size = aggregation.size(mask)
    whole = aggregation.total(losses, mask) / size
    parts = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
    split = sum(aggregation.total(losses[parts == part], mask[parts == part]) / size for part in range(3))
    close(whole, torch.as_tensor(split))
    assert sum(aggregation.size(mask[parts == part]) for part in range(3)) == size  # sizes add up, as over ranks


@few
@given(masks(max_rows=6), seeds, garbage)
def test_against_a_slow_oracle(mask, seed, bad):
    losses = numbers(seed, *mask.shape)
    rows = [losses[b][mask[b]].tolist() for b in range(len(mask))]
    spoilt = spoil(losses, mask, bad)
    means = {mode.over: float(mode.total(spoilt, mask) / mode.size(mask)) for mode in MODES}
    flat = [value for row in rows for value in row]
    assert means["token"] == pytest.approx(math.fsum(flat) / len(flat), abs=1e-12)
    assert means["sequence"] == pytest.approx(sum(math.fsum(row) / len(row) for row in rows) / len(rows), abs=1e-12)
    assert means["fixed"] == pytest.approx(math.fsum(flat) / (7 * len(rows)), abs=1e-12)


@few
@given(masks(max_rows=6), seeds, st.sampled_from(MODES))
def test_the_gradient_too_is_that_of_the_whole(mask, seed, aggregation):
    losses = numbers(seed, *mask.shape).requires_grad_()
    size = aggregation.size(mask)
    (whole,) = torch.autograd.grad(aggregation.total(losses, mask) / size, losses)
    for row in range(len(mask)):
        (aggregation.total(losses[row : row + 1], mask[row : row + 1]) / size).backward()
    assert losses.grad is not None
    close(losses.grad, whole)
    weights = {"token": 1.0, "fixed": 1.0, "sequence": 1.0 / mask.sum(dim=1, keepdim=True).double()}[aggregation.over]
    close(whole, mask.double() * weights / size)


def test_equal_lengths_make_token_and_sequence_means_equal():
    mask = torch.tensor([[False, True, True], [True, True, False]])
    losses = numbers(3, 2, 3)
    token, sequence = (float(mode.total(losses, mask) / mode.size(mask)) for mode in MODES[:2])
    assert token == pytest.approx(sequence, abs=1e-15)


def test_a_row_without_tokens_adds_nothing():
    empty = torch.zeros(1, 4, dtype=torch.bool)
    for mode in MODES:
        assert mode.total(LOSSES[:1], empty).item() == 0.0
    token, sequence, fixed = (mode.size(torch.cat([MASK, empty])) for mode in MODES)
    assert (token, sequence) == (4.0, 2.0)  # it is no sequence to average over
    assert fixed == 21.0  # 3 rows of 7: the divisor of this mode does not depend on lengths


def test_a_mean_of_micro_batch_means_is_another_number():
    # 16/4 = 4 over tokens; the mean of the rows' means is (2 + 10)/2 = 6: what naive accumulation computes.
    token = Aggregation("token")
    naive = sum(token.total(LOSSES[b : b + 1], MASK[b : b + 1]) / token.size(MASK[b : b + 1]) for b in range(2)) / 2
    assert float(naive) == 6.0
    assert float(token.total(LOSSES, MASK) / token.size(MASK)) == 4.0
