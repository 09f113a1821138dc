"""Batches keep their rows together, and measures add up without distortion."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.types import (
    EvaluatedBatch,
    Experience,
    Metrics,
    PairBatch,
    Prompt,
    RankedBatch,
    Sequences,
    TokenBatch,
    extend,
    rows_by_id,
)

few = settings(max_examples=40, deadline=None)


def token_batch(real: torch.Tensor) -> TokenBatch:
    """A batch whose entries name their places: tokens[b, t] = 100 b + t."""
    rows, width = real.shape
    places = torch.arange(rows)[:, None] * 100 + torch.arange(width)
    return TokenBatch(
        tokens=places,
        attention_mask=real,
        response_mask=real,
        temperature=0.7,
        behavior_logprobs=places.double(),
        untruncated_logprobs=-places.double(),
        scores=torch.arange(rows).double(),
        group_ids=torch.arange(rows) * 7,
        truncated=torch.zeros(rows, dtype=torch.bool),
    )


def evaluated(batch: TokenBatch) -> EvaluatedBatch:
    grid = torch.zeros(batch.tokens.shape)
    return extend(
        batch, EvaluatedBatch, old_logprobs=grid, ref_logprobs=None, values=grid, final_values=torch.zeros(len(batch))
    )


REAL = torch.tensor(
    [
        [False, False, True, True, False, False],
        [False, True, True, False, False, False],
        [False, False, False, True, True, False],
    ]
)
real_places = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5).map(torch.tensor)


def test_span_and_trimmed_golden():
    batch = token_batch(REAL)
    assert batch.span() == (1, 5)
    trimmed = batch.trimmed()
    assert trimmed.tokens.tolist() == [[1, 2, 3, 4], [101, 102, 103, 104], [201, 202, 203, 204]]
    assert trimmed.attention_mask.int().tolist() == [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]]
    assert trimmed.scores.tolist() == [0.0, 1.0, 2.0]
    assert trimmed.trimmed() is trimmed
    assert batch.lengths().tolist() == [2, 2, 2]
    assert len(batch) == 3


@few
@given(real_places)
def test_trimming_loses_padding_only(real):
    batch = token_batch(real)
    trimmed = batch.trimmed()
    first, last = batch.span()
    for name in ("tokens", "behavior_logprobs", "untruncated_logprobs", "response_mask"):
        column = getattr(trimmed, name)
        assert torch.equal(column[trimmed.attention_mask], getattr(batch, name)[batch.attention_mask])
        assert torch.equal(column, getattr(batch, name)[:, first:last])
    assert torch.equal(trimmed.lengths(), batch.lengths())
    if real.any():
        assert trimmed.attention_mask[:, 0].any() and trimmed.attention_mask[:, -1].any()
    else:
        assert trimmed is batch


def test_a_square_batch_keeps_its_rows_when_trimmed():
    # As many rows as columns: (B,) columns must not be taken for (T,) ones.
    batch = token_batch(REAL[:, :3] | torch.tensor([False, False, True]))
    assert batch.tokens.shape == (3, 3) and batch.span() == (1, 3)
    assert batch.trimmed().scores.tolist() == [0.0, 1.0, 2.0]
    assert batch.trimmed().tokens.shape == (3, 2)


def test_select_takes_rows_of_every_column_in_the_given_order():
    batch = evaluated(token_batch(REAL))
    chosen = batch.select(torch.tensor([2, 0]))
    assert isinstance(chosen, EvaluatedBatch)
    assert chosen.tokens[:, 0].tolist() == [200, 0]
    assert chosen.scores.tolist() == [2.0, 0.0]
    assert chosen.group_ids.tolist() == [14, 0]
    assert torch.equal(chosen.behavior_logprobs, batch.behavior_logprobs[[2, 0]])
    assert chosen.temperature == 0.7 and chosen.ref_logprobs is None
    assert chosen.final_values is not None and chosen.final_values.shape == (2,)
    assert batch.tokens[:, 0].tolist() == [0, 100, 200]  # the batch itself is as it was


def test_each_stage_carries_the_one_before_and_cannot_be_changed():
    batch = evaluated(token_batch(REAL))
    grid = torch.ones(batch.tokens.shape)
    experience = extend(batch, Experience, rewards=grid, advantages=grid, returns=None)
    assert experience.tokens is batch.tokens and experience.old_logprobs is batch.old_logprobs
    assert not hasattr(batch, "advantages")
    with pytest.raises(dataclasses.FrozenInstanceError):
        experience.rewards = grid  # type: ignore[misc]
    with pytest.raises(TypeError):
        extend(batch, Experience, rewards=grid)  # a stage without its advantages does not exist


def test_units():
    grid = torch.zeros(4, 2)
    columns = {"tokens": grid.long(), "attention_mask": grid.bool(), "response_mask": grid.bool()}
    assert Sequences(**columns).row_groups() == [[0], [1], [2], [3]]
    pairs = PairBatch(**columns, pair_ids=torch.tensor([9, 4, 9, 4]), chosen=grid[:, 0].bool(), ref_logprobs=grid)
    assert pairs.row_groups() == [[0, 2], [1, 3]]
    ranked = RankedBatch(**columns, group_ids=torch.tensor([1, 0, 0, 1]), ranks=torch.arange(4))
    assert ranked.row_groups() == [[0, 3], [1, 2]]


@few
@given(st.lists(st.integers(0, 4), max_size=12))
def test_rows_by_id(ids):
    groups = rows_by_id(torch.tensor(ids, dtype=torch.long))
    assert sorted(row for rows in groups for row in rows) == list(range(len(ids)))
    assert [ids[rows[0]] for rows in groups] == list(dict.fromkeys(ids))  # in the order of first appearance
    assert all(len({ids[row] for row in rows}) == 1 and rows == sorted(rows) for rows in groups)


def test_a_prompt_from_text():
    assert Prompt.from_text("a", "Why?", "x").messages == ({"role": "user", "content": "Why?"},)


# Metrics


def test_measures_golden():
    measures = Metrics()
    measures.add("loss", 6.0, 3)  # three tokens that sum to 6
    measures.add("loss", torch.tensor(10.0), torch.tensor(1))  # and one of 10: (6 + 10) / 4
    measures.add("unseen", 0.0, 0.0)
    measures.count("steps")
    measures.count("steps", 2)
    assert measures.mean("loss") == 4.0
    assert measures.values() == {"loss": 4.0, "steps": 3.0}  # a mean over nothing is left out, not 0
    # The mean of the two means would be (2 + 10) / 2 = 6.


dyadic = st.integers(-(2**20), 2**20).map(lambda n: n / 64)  # sums of these have no rounding, so equality is exact


@few
@given(st.lists(st.tuples(st.sampled_from("ab"), dyadic, st.integers(1, 50)), min_size=1, max_size=20), st.data())
def test_merging_is_exact_however_the_parts_are_cut(entries, data):
    whole = Metrics()
    parts = [Metrics() for _ in range(3)]
    for name, total, weight in entries:
        whole.add(name, total, weight)
        whole.count("n" + name)
        part = parts[data.draw(st.integers(0, 2))]
        part.add(name, torch.tensor(total), weight)
        part.count("n" + name)
    merged = Metrics()
    for part in parts:
        merged.merge(part)
    assert merged.values() == whole.values()
    for name in {name for name, _, _ in entries}:
        chosen = [(total, weight) for other, total, weight in entries if other == name]
        assert whole.mean(name) == math.fsum(t for t, _ in chosen) / sum(w for _, w in chosen)
        assert whole.values()["n" + name] == len(chosen)


def test_merging_leaves_the_other_as_it_was():
    one, other = Metrics(), Metrics()
    one.add("a", 1.0, 1.0)
    other.add("a", 3.0, 1.0)
    one.merge(other)
    one.add("a", 100.0, 1.0)
    assert other.values() == {"a": 3.0}


def test_sums_are_kept_in_double_precision_and_without_a_graph():
    measures = Metrics()
    for _ in range(2):
        measures.add("loss", torch.tensor(2.0**24, requires_grad=True), 1.0)
    for _ in range(10):
        measures.add("loss", torch.tensor(1.0), 0.0)  # in single precision 2^24 + 1 is 2^24
    assert measures.weighted["loss"][0].item() == 2.0**25 + 10
    assert not measures.weighted["loss"][0].requires_grad


def test_what_is_not_a_number_is_not_hidden():
    measures = Metrics()
    measures.add("loss", math.nan, 4.0)
    measures.add("loss", 1.0, 4.0)
    assert math.isnan(measures.values()["loss"])


def test_a_measure_does_not_follow_the_tensor_it_was_given():
    total = torch.tensor(1.0, dtype=torch.float64)
    measures = Metrics()
    measures.add("loss", total)
    total += 5.0
    assert measures.mean("loss") == 1.0
