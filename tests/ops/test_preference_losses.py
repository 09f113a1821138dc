"""Pairs, rankings and DPO."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import close, few, numbers, seeds
from torch import Tensor

from tether.ops.losses import (
    count_ranked_prompts,
    dpo_losses,
    dpo_margins,
    kwise_total,
    pairwise_losses,
    ranked_pairs,
)

rankings = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=4)


def minus_log_sigmoid(x: float) -> float:
    return math.log1p(math.exp(-x))


def kwise_by_definition(scores: list[float], ranks: list[int], groups: list[int]) -> float:
    total = 0.0
    for group in set(groups):
        rows = [row for row, owner in enumerate(groups) if owner == group]
        pairs = [(i, j) for i in rows for j in rows if ranks[i] < ranks[j]]
        if pairs:
            total += sum(minus_log_sigmoid(scores[i] - scores[j]) for i, j in pairs) / len(pairs)
    return total


def flat(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    ranks = torch.tensor([rank for prompt in prompts for rank in prompt])
    groups = torch.tensor([11 * index for index, prompt in enumerate(prompts) for _ in prompt])
    return ranks, groups


def test_pairwise_golden():
    # difference log 3: sigmoid = 3/4, loss log(4/3) = 0.28768207245178096; difference 0: log 2
    chosen = torch.tensor([math.log(3), 1.0], dtype=torch.float64)
    rejected = torch.tensor([0.0, 1.0], dtype=torch.float64)
    close(pairwise_losses(chosen, rejected), [0.28768207245178096, 0.6931471805599453])


def test_kwise_golden():
    # Scores log 6 > log 3 > log 2 > 0 read as odds 6, 3, 1 (prompt a, ranked in that order) and 2, 1 (prompt b):
    # a: [-log 6/9 - log 6/7 - log 3/4] / 3,   b: -log 2/3.
    scores = torch.tensor([6.0, 3.0, 1.0, 2.0, 1.0], dtype=torch.float64).log()
    ranks, groups = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([5, 5, 5, 8, 8])
    wanted = (math.log(9 / 6) + math.log(7 / 6) + math.log(4 / 3)) / 3 + math.log(3 / 2)
    close(kwise_total(scores, ranks, groups), wanted)
    better, worse, pairs = ranked_pairs(ranks, groups)
    assert list(zip(better.tolist(), worse.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2), (3, 4)]
    assert pairs.tolist() == [3, 3, 3, 1]
    assert count_ranked_prompts(ranks, groups) == 2


def test_ties_make_no_pair():
    # Ranks 0, 0, 1: pairs (0, 2) and (1, 2) only; a prompt of ties teaches nothing.
    ranks, groups = torch.tensor([0, 0, 1, 3, 3]), torch.tensor([0, 0, 0, 1, 1])
    better, worse, pairs = ranked_pairs(ranks, groups)
    assert list(zip(better.tolist(), worse.tolist(), strict=True)) == [(0, 2), (1, 2)]
    assert pairs.tolist() == [2, 2]
    assert count_ranked_prompts(ranks, groups) == 1
    assert kwise_total(torch.ones(2), torch.tensor([3, 3]), torch.tensor([0, 0])) == 0.0


@few
@given(rankings, seeds)
def test_kwise_against_a_slow_oracle_in_any_order_of_rows(prompts, seed):
    ranks, groups = flat(prompts)
    scores = numbers(seed, len(ranks))
    wanted = kwise_by_definition(scores.tolist(), ranks.tolist(), groups.tolist())
    close(kwise_total(scores, ranks, groups), wanted)
    order = torch.randperm(len(ranks), generator=torch.Generator().manual_seed(seed))
    close(kwise_total(scores[order], ranks[order], groups[order]), wanted)
    shifted = scores + groups.double()  # a constant added to all answers of a prompt changes nothing
    close(kwise_total(shifted, ranks, groups), wanted)
    assert count_ranked_prompts(ranks, groups) == sum(len(set(prompt)) > 1 for prompt in prompts)


@few
@given(st.lists(st.booleans(), min_size=1, max_size=5), seeds)
def test_kwise_with_two_answers_is_pairwise(first_wins, seed):
    ranks, groups = flat([[0, 1] if first else [1, 0] for first in first_wins])
    scores = numbers(seed, len(ranks))
    close(kwise_total(scores, ranks, groups), pairwise_losses(scores[ranks == 0], scores[ranks == 1]).sum())


@few
@given(rankings, seeds)
def test_kwise_gradients_sum_to_zero_within_a_prompt(prompts, seed):
    ranks, groups = flat(prompts)
    scores = numbers(seed, len(ranks)).requires_grad_()
    (slope,) = torch.autograd.grad(kwise_total(scores, ranks, groups), scores)
    for group in groups.unique():
        close(slope[groups == group].sum(), 0.0)


def test_trap_14_pairs_on_their_own_weigh_a_long_ranking_more():
    # 9 answers make 36 pairs, 2 make 1. One example each: at equal scores both prompts weigh log 2, not 36 to 1.
    ranks, groups = flat([list(range(9)), [0, 1]])
    scores = torch.zeros(11, dtype=torch.float64, requires_grad=True)
    close(kwise_total(scores, ranks, groups), 2 * math.log(2))
    better, worse, _ = ranked_pairs(ranks, groups)
    close(pairwise_losses(scores[better], scores[worse]).sum(), 37 * math.log(2))


def test_dpo_golden():
    # chosen: -1 - (-2) = 1, rejected: -5 - (-3) = -2; margin 0.1 * 3 = 0.3; loss log(1 + e^-0.3) = 0.554355244468527
    one = [torch.tensor([x], dtype=torch.float64) for x in (-1.0, -5.0, -2.0, -3.0)]
    margins = dpo_margins(*one, beta=0.1)
    close(margins, [0.3])
    close(dpo_losses(margins), [0.554355244468527])
    # smoothing 0.2: 0.8 * log(1 + e^-0.3) + 0.2 * log(1 + e^0.3) = 0.8*0.5543552 + 0.2*0.8543552
    close(dpo_losses(margins, label_smoothing=0.2), [0.8 * 0.554355244468527 + 0.2 * 0.854355244468527])


@few
@given(seeds, st.floats(0.01, 2.0), st.floats(0.0, 0.5))
def test_dpo_identities(seed, beta, smoothing):
    chosen, rejected, ref_chosen, ref_rejected = (numbers(seed + k, 4) for k in range(4))
    margins = dpo_margins(chosen, rejected, ref_chosen, ref_rejected, beta=beta)
    close(dpo_margins(rejected, chosen, ref_rejected, ref_chosen, beta=beta), -margins)  # the pair turned round
    at_start = dpo_margins(ref_chosen, ref_rejected, ref_chosen, ref_rejected, beta=beta)
    assert (at_start == 0.0).all()  # the policy is the reference
    close(dpo_losses(at_start, label_smoothing=smoothing), [math.log(2)] * 4)
    close(dpo_losses(-margins), dpo_losses(margins) + margins)  # log sigmoid(-m) = log sigmoid(m) - m
    close(dpo_losses(margins, label_smoothing=0.5), dpo_losses(-margins, label_smoothing=0.5))
    close(dpo_losses(margins), pairwise_losses(margins, torch.zeros_like(margins)))


def test_dpo_gradient_is_that_of_the_paper():
    # d loss / d chosen = -beta sigmoid(-margin), and the opposite for the rejected (Rafailov et al., section 4)
    chosen, rejected, *refs = (numbers(k, 3).requires_grad_() for k in range(4))
    margins = dpo_margins(chosen, rejected, *refs, beta=0.3)
    up, down = torch.autograd.grad(dpo_losses(margins).sum(), (chosen, rejected))
    close(up, -0.3 * torch.sigmoid(-margins))
    close(down, -up)


@pytest.mark.parametrize("margin", [-200.0, 200.0])
def test_no_overflow(margin: float):
    x = torch.tensor([margin])
    assert pairwise_losses(x, torch.zeros(1)).item() == pytest.approx(max(-margin, 0.0), abs=1e-6)
    assert torch.isfinite(dpo_losses(x, label_smoothing=0.1)).all()
