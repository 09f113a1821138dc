"""Group-relative and leave-one-out advantages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import close, few, numbers, seeds

from tether.ops.advantages import group_advantages, group_statistics, leave_one_out

SCORES = torch.tensor([1.0, 0.0, 2.0, 6.0, 4.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 3, 7, 7, 3])  # interleaved: {1, 2, 6} and {0, 4}
groups_of_two_or_more = st.lists(st.integers(2, 5), min_size=1, max_size=4)


def shuffled_groups(sizes: list[int], seed: int) -> torch.Tensor:
    ids = torch.tensor([10 * index + 3 for index, size in enumerate(sizes) for _ in range(size)])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


def test_statistics_golden():
    # {1, 2, 6}: n = 3, sum 9, mean 3, squares 4 + 1 + 9 = 14.   {0, 4}: n = 2, sum 4, mean 2, squares 4 + 4 = 8.
    sizes, sums, squares = group_statistics(SCORES, GROUPS)
    close(sizes, [3.0, 2.0, 3.0, 3.0, 2.0])
    close(sums, [9.0, 4.0, 9.0, 9.0, 4.0])
    close(squares, [14.0, 8.0, 14.0, 14.0, 8.0])


def test_group_mean_golden():
    close(group_advantages(SCORES, GROUPS, scale_by_std=False), [-2.0, -2.0, -1.0, 3.0, 2.0])


def test_group_std_golden():
    # Sample std: sqrt(14/2) = 2.6457513110645906, sqrt(8/1) = 2.8284271247461903; epsilon 1e-4 is added to each.
    a, b = 2.6457513110645906 + 1e-4, 2.8284271247461903 + 1e-4
    close(group_advantages(SCORES, GROUPS, scale_by_std=True), [-2 / a, -2 / b, -1 / a, 3 / a, 2 / b])
    # Population std: sqrt(14/3) = 2.160246899469287, sqrt(8/2) = 2; epsilon 0.5.
    found = group_advantages(SCORES, GROUPS, scale_by_std=True, unbiased=False, epsilon=0.5)
    close(found, [-2 / 2.660246899469287, -0.8, -1 / 2.660246899469287, 3 / 2.660246899469287, 0.8])


def test_leave_one_out_golden():
    # 1 - (2+6)/2 = -3;  2 - (1+6)/2 = -1.5;  6 - (1+2)/2 = 4.5;   0 - 4 = -4;  4 - 0 = 4
    close(leave_one_out(SCORES, GROUPS), [-3.0, -4.0, -1.5, 4.5, 4.0])


@few
@given(groups_of_two_or_more, seeds, st.booleans())
def test_against_a_slow_oracle(sizes: list[int], seed: int, unbiased: bool):
    ids, scores = shuffled_groups(sizes, seed), numbers(seed, sum(sizes))
    relative, scaled, others_out = [], [], []
    for row, score in enumerate(scores.tolist()):
        group = [s for s, g in zip(scores.tolist(), ids.tolist(), strict=True) if g == int(ids[row])]
        others = [scores[k].item() for k in range(len(ids)) if k != row and ids[k] == ids[row]]
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((s - mean) ** 2 for s in group) / (len(group) - unbiased))
        relative.append(score - mean)
        scaled.append((score - mean) / (std + 1e-4))
        others_out.append(score - math.fsum(others) / len(others))
    close(group_advantages(scores, ids, scale_by_std=False), relative)
    close(group_advantages(scores, ids, scale_by_std=True, unbiased=unbiased), scaled, 1e-11)
    close(leave_one_out(scores, ids), others_out)


@few
@given(groups_of_two_or_more, seeds)
def test_identities(sizes: list[int], seed: int):
    ids, scores = shuffled_groups(sizes, seed), numbers(seed, sum(sizes))
    relative, others_out = group_advantages(scores, ids, scale_by_std=False), leave_one_out(scores, ids)
    counts = torch.tensor([float((ids == g).sum()) for g in ids], dtype=torch.float64)
    close(others_out, relative * counts / (counts - 1))
    scaled = group_advantages(scores, ids, scale_by_std=True)
    for group in ids.unique():
        mine = ids == group
        for advantages in (relative, others_out):
            close(advantages[mine].sum(), 0.0)
        # A group of nearly equal scores has a small divisor, which makes the rounding of s - mean as much larger.
        close(scaled[mine].sum() * (scores[mine].std() + 1e-4), 0.0)
    close(leave_one_out(scores + 5.0, ids), others_out)  # a constant added to every score changes nothing
    unscaled = group_advantages(scores, ids, scale_by_std=True, epsilon=0.0)
    close(group_advantages(3.0 * scores + 5.0, ids, scale_by_std=True, epsilon=0.0), unscaled, 1e-9)


@pytest.mark.parametrize("unbiased", [True, False])
def test_a_constant_group_gives_nothing(unbiased: bool):
    scores, ids = torch.tensor([2.5, 2.5, 2.5, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    found = group_advantages(scores, ids, scale_by_std=True, unbiased=unbiased)
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert found[3] > 0.5 and found[4] < -0.5
    assert leave_one_out(scores, ids)[:3].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("score", [0.1, -3.3, 17.3, 1000.1])
@pytest.mark.parametrize("samples", [3, 5, 6, 7])
def test_a_constant_group_gives_nothing_in_single_precision(score: float, samples: int):
    # The mean of equal numbers must be that number: a rounding error over a std of nearly 0 looks like a signal.
    scores, ids = torch.full((samples,), score), torch.zeros(samples, dtype=torch.long)
    assert group_advantages(scores, ids, scale_by_std=True).abs().max() < 1e-3


@pytest.mark.parametrize("ids", [[0], [0, 0, 1], [5, 6]])
def test_a_group_of_one_is_refused(ids: list[int]):
    scores = torch.ones(len(ids))
    for compute in (leave_one_out, lambda s, g: group_advantages(s, g, scale_by_std=False)):
        with pytest.raises(ValueError, match="samples_per_prompt"):
            compute(scores, torch.tensor(ids))
