"""One score a row becomes one reward a token: on the last sampled token, once, wherever the padding stands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from masked_grids import close, few, garbage, lay_out, masks, numbers, on_row, seeds, spoil

from tether.ops.advantages import clip_scores, missing_eos_penalty, token_rewards
from tether.ops.masks import last_index

MASK = torch.tensor(
    [
        [False, True, True, False],  # padded right: ends at column 2
        [False, False, True, True],  # padded left: at column 3
        [True, False, True, False],  # with a tool's token between: at column 2
    ]
)
SCORES = torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)
KL = torch.tensor([[9.0, 1.0, 2.0, 9.0], [9.0, 9.0, 3.0, 4.0], [5.0, 9.0, 6.0, 9.0]], dtype=torch.float64)


def test_golden():
    # -0.1 * kl on each sampled token; 10 - 0.2, 20 - 0.4, 30 - 0.6 at the ends; 0 elsewhere
    wanted = [[0.0, -0.1, 9.8, 0.0], [0.0, 0.0, -0.3, 19.6], [-0.5, 0.0, 29.4, 0.0]]
    close(token_rewards(SCORES, KL, MASK, kl_coef=0.1), wanted)
    ends = [[0.0, 0.0, 10.0, 0.0], [0.0, 0.0, 0.0, 20.0], [0.0, 0.0, 30.0, 0.0]]
    close(token_rewards(SCORES, None, MASK, kl_coef=0.1), ends)


@few
@given(masks(), seeds, garbage, st.sampled_from([0.0, 0.05, 1.0]), st.booleans())
def test_against_a_slow_oracle(mask, seed, bad, coef, with_kl):
    scores, kl = numbers(seed, len(mask)), numbers(seed + 1, *mask.shape)
    rows = []
    for b in range(len(mask)):
        rewards = [-coef * x if with_kl else 0.0 for x in on_row(kl, mask, b)]
        rewards[-1] += scores[b].item()
        rows.append(rewards)
    found = token_rewards(scores, spoil(kl, mask, bad) if with_kl else None, mask, kl_coef=coef)
    close(found, lay_out(rows, mask))


@few
@given(masks(), seeds)
def test_the_score_is_paid_once_and_on_the_last_sampled_token(mask, seed):
    scores = numbers(seed, len(mask)).abs() + 0.5
    found = token_rewards(scores, None, mask, kl_coef=0.0)
    close(found.sum(dim=1), scores)
    assert ((found != 0.0).sum(dim=1) == 1).all()
    for row, column in enumerate(last_index(mask).tolist()):
        assert found[row, column] == scores[row]
        assert mask[row, column] and not mask[row, column + 1 :].any()


def test_trap_1_the_last_column_is_not_the_last_token():
    naive = torch.zeros(3, 4, dtype=torch.float64)
    naive[:, -1] = SCORES
    found = token_rewards(SCORES, None, MASK, kl_coef=0.0)
    assert not torch.equal(naive, found)
    assert (naive * MASK).sum(dim=1).tolist() == [0.0, 20.0, 0.0]  # on two of three rows the score would be lost


def test_trap_8_a_score_broadcast_over_tokens_is_paid_many_times():
    naive = SCORES[:, None] * MASK - 0.1 * KL * MASK
    found = token_rewards(SCORES, KL, MASK, kl_coef=0.1)
    close(naive.sum(dim=1) - found.sum(dim=1), SCORES)  # rows of two tokens: paid exactly once too often
    column = token_rewards(SCORES[:, None], KL, MASK, kl_coef=0.1)  # a (B, 1) score does no harm either
    close(column, found)


def test_a_row_without_a_sampled_token_is_refused():
    with pytest.raises(RuntimeError):
        token_rewards(SCORES[:1], None, torch.zeros(1, 4, dtype=torch.bool), kl_coef=0.0)


def test_missing_end_penalty():
    # The penalty stands in the score's place where the answer was cut off; it is not added to it.
    truncated = torch.tensor([False, True, False])
    assert missing_eos_penalty(SCORES, truncated, -1.0).tolist() == [10.0, -1.0, 30.0]
    assert missing_eos_penalty(SCORES, truncated, 0.0).tolist() == [10.0, 0.0, 30.0]  # 0 is a penalty, None is not
    assert missing_eos_penalty(SCORES, truncated, None).tolist() == [10.0, 20.0, 30.0]


def test_clip_scores():
    scores = torch.tensor([-7.0, -5.0, 0.5, 6.0])
    assert clip_scores(scores, 5.0).tolist() == [-5.0, -5.0, 0.5, 5.0]
    assert clip_scores(scores, None) is scores
