"""From rollouts of different length to one padded batch; what cannot be learned from is dropped and counted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.data.rows import attention_mask, collate, pad_right
from tether.errors import DataError
from tether.types import Prompt, Rollout, Score

END = 2


def rollout(prompt: int, answer: int, *, group: int = 0, finish: str = "stop", first: int = 10) -> Rollout:
    """A prompt of `prompt` tokens and an answer of `answer`, the last of which is END where it ended by itself."""
    tokens = torch.arange(first, first + prompt + answer)
    if answer and finish == "stop":
        tokens[-1] = END
    mask = torch.arange(prompt + answer) >= prompt
    logprobs = torch.where(mask, -torch.arange(prompt + answer) / 8.0, 0.0)
    return Rollout(
        prompt=Prompt.from_text("p", "?"),
        group_id=group,
        sample_id=0,
        token_ids=tokens,
        response_mask=mask,
        behavior_logprobs=logprobs,
        untruncated_logprobs=2.0 * logprobs,
        completion="",
        finish=finish,  # type: ignore[arg-type]
    )


def gather(rollouts: list[Rollout], scores: list[Score], *, pad_id: int = END, need_groups: bool = False):
    made = collate(rollouts, scores, pad_id=pad_id, temperature=0.7, need_groups=need_groups)
    assert len(made.rollouts) == len(made.scores) == len(made.batch)
    return made.batch, made.dropped


def test_golden_with_a_pad_id_that_is_the_end_id():
    rollouts = [rollout(2, 3), rollout(1, 1, group=4, finish="length", first=30)]
    batch, counts = gather(rollouts, [Score(1.5), Score(-2.0)])
    assert batch.tokens.tolist() == [[10, 11, 12, 13, END], [30, 31, END, END, END]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 0, 0, 0]]
    assert batch.behavior_logprobs.tolist() == [[0.0, 0.0, -0.25, -0.375, -0.5], [0.0, -0.125, 0.0, 0.0, 0.0]]
    assert torch.equal(batch.untruncated_logprobs, 2.0 * batch.behavior_logprobs)
    assert batch.scores.tolist() == [1.5, -2.0]
    assert batch.group_ids.tolist() == [0, 4]
    assert batch.truncated.tolist() == [False, True]
    assert batch.temperature == 0.7
    assert counts == {"dropped/error": 0.0, "dropped/empty": 0.0, "dropped/unscored": 0.0}
    assert batch.response_mask.dtype == batch.attention_mask.dtype == torch.bool
    assert batch.tokens.dtype == batch.group_ids.dtype == torch.int64


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["stop", "length"])), min_size=1, max_size=5
    ),
    st.sampled_from([0, END, 12]),  # the pad id may be any token that stands in an answer
)
def test_masks_come_from_lengths(shapes, pad_id):
    rollouts = [rollout(p, a, finish=finish) for p, a, finish in shapes]
    batch, _ = gather(rollouts, [Score(0.0)] * len(shapes), pad_id=pad_id)
    for row, (p, a, finish) in enumerate(shapes):
        width = batch.tokens.shape[1]
        assert batch.attention_mask[row].tolist() == [t < p + a for t in range(width)]
        assert batch.response_mask[row].tolist() == [p <= t < p + a for t in range(width)]
        assert batch.tokens[row][batch.attention_mask[row]].tolist() == rollouts[row].token_ids.tolist()
        assert (batch.tokens[row, p + a :] == pad_id).all()
        assert (int(batch.tokens[row, p + a - 1]) == END) == (finish == "stop")  # the end is among the trained tokens
        assert not batch.behavior_logprobs[row][~batch.response_mask[row]].any()
    assert not batch.response_mask[:, 0].any()
    assert torch.equal(batch.trimmed().tokens, batch.tokens)  # no column is padding alone


def test_what_cannot_be_learned_from_is_dropped_and_counted():
    rollouts = [rollout(2, 1), rollout(2, 0), rollout(2, 2), rollout(2, 3), rollout(2, 4), rollout(2, 5), rollout(2, 0)]
    scores = [
        Score(1.0),
        Score(2.0),  # no sampled token
        Score(3.0, valid=False),  # the reward failed: not zero, gone
        Score(math.nan),
        Score(math.inf),
        Score(6.0),
        Score(7.0, valid=False),  # both: counted once
    ]
    batch, counts = gather(rollouts, scores)
    assert batch.scores.tolist() == [1.0, 6.0]
    assert batch.lengths().tolist() == [3, 7]
    assert counts == {"dropped/error": 0.0, "dropped/empty": 2.0, "dropped/unscored": 3.0}
    assert batch.tokens.shape == (2, 7)  # as wide as the longest row that was kept


def test_a_sample_that_lost_its_siblings_goes_where_samples_are_compared():
    rollouts = [rollout(2, 1, group=group) for group in (5, 5, 6, 6, 7)]
    scores = [Score(1.0), Score(2.0), Score(3.0), Score(4.0, valid=False), Score(5.0)]
    batch, counts = gather(rollouts, scores, need_groups=True)
    assert batch.scores.tolist() == [1.0, 2.0] and batch.group_ids.tolist() == [5, 5]
    assert counts == {"dropped/error": 0.0, "dropped/empty": 0.0, "dropped/unscored": 1.0, "dropped/alone": 2.0}
    batch, counts = gather(rollouts, scores)
    assert batch.scores.tolist() == [1.0, 2.0, 3.0, 5.0] and "dropped/alone" not in counts


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_score_for_each_rollout(count: int):
    with pytest.raises(DataError, match=f"{count} scores for 2 rollouts"):
        gather([rollout(1, 1), rollout(1, 1)], [Score(0.0)] * count)


@pytest.mark.parametrize(
    ("rollouts", "scores", "need_groups", "reason"),
    [
        ([rollout(2, 0)], [Score(1.0)], False, "1 empty, 0 unscored"),
        ([rollout(2, 1), rollout(2, 1)], [Score(math.nan), Score(0.0, valid=False)], False, "0 empty, 2 unscored"),
        ([rollout(2, 1)], [Score(1.0)], True, "0 empty, 0 unscored, 1 alone"),
        ([], [], False, "none of the 0 rollouts"),
    ],
)
def test_nothing_left_is_an_error_that_says_why(rollouts, scores, need_groups, reason):
    with pytest.raises(DataError, match=reason):
        gather(rollouts, scores, need_groups=need_groups)


def test_the_first_token_is_never_a_sampled_one():
    with pytest.raises(AssertionError, match="no state before it"):
        gather([rollout(0, 2)], [Score(1.0)])


def test_padding_by_hand():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    assert pad_right(rows, 9).tolist() == [[1, 2, 3], [4, 9, 9]]
    flags = pad_right([torch.tensor([True]), torch.tensor([True, True])], False)
    assert flags.dtype == torch.bool and flags.tolist() == [[True, False], [True, True]]
    assert attention_mask(rows).tolist() == [[True, True, True], [True, False, False]]


def test_large_token_ids_survive():
    assert pad_right([torch.tensor([1]), torch.tensor([2, 3])], 2**31 + 1)[0].tolist() == [1, 2**31 + 1]
