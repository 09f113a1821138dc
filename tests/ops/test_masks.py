"""Masks and positions, from lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import few, masks

from tether.ops.masks import last_index, masks_from_lengths, position_ids


def test_positions_golden():
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    wanted = [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 1, 1, 1], [0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]
    assert position_ids(real).tolist() == wanted
    assert position_ids(real.bool()).tolist() == wanted


@few
@given(masks())
def test_positions_count_real_tokens_from_0(mask):
    positions = position_ids(mask)
    for row in range(len(mask)):
        assert positions[row][mask[row]].tolist() == list(range(int(mask[row].sum())))
    assert (positions >= 0).all() and (positions < mask.shape[1]).all()


def test_trap_11_column_numbers_are_not_positions():
    left = torch.tensor([[False, False, True, True]])
    assert position_ids(left)[left].tolist() == [0, 1]
    assert torch.arange(4)[left[0]].tolist() == [2, 3]  # the same tokens would be read as if two stood before them


def test_masks_golden():
    # prompts of 2 and 1, answers of 1 and 3, in 5 columns
    prompts, answers = torch.tensor([2, 1]), torch.tensor([1, 3])
    attention, response = masks_from_lengths(prompts, answers, 5, "left")
    assert attention.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert response.int().tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]
    attention, response = masks_from_lengths(prompts, answers, 5, "right")
    assert attention.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert response.int().tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 1, 0]]


@few
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from(["left", "right"]),
)
def test_masks_from_lengths_one_place_at_a_time(lengths, spare, side):
    width = max(p + r for p, r in lengths) + spare
    prompts, answers = torch.tensor([p for p, _ in lengths]), torch.tensor([r for _, r in lengths])
    attention, response = masks_from_lengths(prompts, answers, width, side)
    assert attention.dtype == response.dtype == torch.bool
    for row, (p, r) in enumerate(lengths):
        kinds = "p" * p + "r" * r
        kinds = kinds.rjust(width) if side == "left" else kinds.ljust(width)
        assert attention[row].tolist() == [kind != " " for kind in kinds]
        assert response[row].tolist() == [kind == "r" for kind in kinds]


@few
@given(masks())
def test_last_index_one_place_at_a_time(mask):
    for row, found in zip(mask.tolist(), last_index(mask).tolist(), strict=True):
        assert found == max(column for column, sampled in enumerate(row) if sampled)


def test_last_index_of_nothing():
    assert last_index(torch.zeros(2, 3, dtype=torch.bool)).tolist() == [-1, -1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_trap_12_a_mask_from_token_ids_loses_the_end_token(side):
    # The answer ends with the end id, which is also the pad id. Lengths know better than ids.
    end = 0
    tokens = torch.tensor([[5, 6, 7, end, end, end]] if side == "right" else [[end, end, 5, 6, 7, end]])
    attention, response = masks_from_lengths(torch.tensor([2]), torch.tensor([2]), 6, side)
    assert tokens[attention].tolist() == [5, 6, 7, end]
    assert tokens[response].tolist() == [7, end]
    assert tokens[tokens != end].tolist() == [5, 6, 7]  # the naive mask: the end is never learned
