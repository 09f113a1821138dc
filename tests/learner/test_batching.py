"""Minibatches and micro-batches: every row once, in whole units, within the budget."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether.learner.batching import micro_batches, minibatches
from tether.types import PairBatch, RankedBatch, Sequences

few = settings(max_examples=40, deadline=None)
row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=10)


def columns(lengths: list[int]) -> dict[str, Tensor]:
    width = max(lengths)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {"tokens": torch.zeros(len(lengths), width).long(), "attention_mask": real, "response_mask": real}


def plain(lengths: list[int]) -> Sequences:
    return Sequences(**columns(lengths))


@st.composite
def grouped(draw: st.DrawFn) -> PairBatch | RankedBatch:
    """Pairs or rankings whose rows lie anywhere in the batch."""
    pairs = draw(st.booleans())
    sizes = draw(st.lists(st.just(2) if pairs else st.integers(1, 4), min_size=1, max_size=5))
    ids = draw(st.permutations([17 * unit for unit, size in enumerate(sizes) for _ in range(size)]))
    lengths = draw(st.lists(st.integers(1, 9), min_size=len(ids), max_size=len(ids)))
    rows, owners = columns(lengths), torch.tensor(ids)
    if pairs:
        chosen = torch.zeros(len(ids), dtype=torch.bool)
        return PairBatch(**rows, pair_ids=owners, chosen=chosen, ref_logprobs=torch.zeros(rows["tokens"].shape))
    return RankedBatch(**rows, group_ids=owners, ranks=torch.arange(len(ids)))


def owners_of(batch: Sequences) -> Tensor:
    if isinstance(batch, PairBatch):
        return batch.pair_ids
    return batch.group_ids if isinstance(batch, RankedBatch) else torch.arange(len(batch))


def assert_whole_units_once(batch: Sequences, parts: list[Tensor]) -> None:
    rows = torch.cat(parts).tolist()
    assert sorted(rows) == list(range(len(batch)))
    owners = owners_of(batch)
    homes = [{int(owner) for owner in owners[part]} for part in parts]
    assert sum(len(home) for home in homes) == len({int(owner) for owner in owners})  # no unit in two parts


def test_minibatches_golden():
    batch = plain([1, 2, 3, 4, 5])
    assert [rows.tolist() for rows in minibatches(batch, 2)] == [[0, 1], [2, 3], [4]]
    assert [rows.tolist() for rows in minibatches(batch, 9)] == [[0, 1, 2, 3, 4]]
    # Pairs {0, 3}, {1, 2}: units in the order in which they first appear, two rows each.
    pairs = PairBatch(
        **columns([1, 2, 3, 4]),
        pair_ids=torch.tensor([8, 5, 5, 8]),
        chosen=torch.tensor([True, True, False, False]),
        ref_logprobs=torch.zeros(4, 4),
    )
    assert [rows.tolist() for rows in minibatches(pairs, 1)] == [[0, 3], [1, 2]]


@few
@given(st.one_of(row_lengths.map(plain), grouped()), st.integers(1, 6), st.integers(0, 2**31))
def test_minibatches_cover_each_unit_once(batch, size, seed):
    in_order = list(minibatches(batch, size))
    assert_whole_units_once(batch, in_order)
    assert torch.cat(in_order).tolist() == [
        row for unit in batch.row_groups() for row in unit
    ]  # the first epoch is read in order
    shuffled = [list(minibatches(batch, size, torch.Generator().manual_seed(seed))) for _ in range(2)]
    assert_whole_units_once(batch, shuffled[0])
    assert [rows.tolist() for rows in shuffled[0]] == [rows.tolist() for rows in shuffled[1]]
    units = len(batch.row_groups())
    for parts in (in_order, shuffled[0]):
        counts = [len({int(owner) for owner in owners_of(batch)[part]}) for part in parts]
        assert counts == [size] * (units // size) + ([units % size] if units % size else [])


def test_each_epoch_is_shuffled_anew_by_the_generator_alone():
    batch, generator = plain([1] * 20), torch.Generator().manual_seed(1)
    first, second = (torch.cat(list(minibatches(batch, 4, generator))).tolist() for _ in range(2))
    assert first != second and first != list(range(20))
    torch.manual_seed(99)  # the global stream plays no part
    again = torch.cat(list(minibatches(batch, 4, torch.Generator().manual_seed(1)))).tolist()
    assert again == first


def test_micro_batches_golden():
    # Lengths 2, 5, 3, 4 and 10 tokens: longest first 5, 4 (2 rows x 5 = 10), then 3, 2 (2 x 3 = 6).
    assert [rows.tolist() for rows in micro_batches(plain([2, 5, 3, 4]), 10)] == [[1, 3], [2, 0]]
    # 9 tokens: a second row beside the 5 would make 10; 4 and 3 make 8; 2 would make 12.
    assert [rows.tolist() for rows in micro_batches(plain([2, 5, 3, 4]), 9)] == [[1], [3, 2], [0]]
    # Less than the longest row: each goes alone, none is dropped.
    assert [rows.tolist() for rows in micro_batches(plain([2, 5]), 1)] == [[1], [0]]


@few
@given(st.one_of(row_lengths.map(plain), grouped()), st.integers(1, 60))
def test_micro_batches_are_whole_complete_and_within_budget(batch, max_tokens):
    parts = list(micro_batches(batch, max_tokens))
    assert_whole_units_once(batch, parts)
    owners = owners_of(batch)
    for part in parts:
        padded = len(part) * int(batch.lengths()[part].max())
        assert padded <= max_tokens or len({int(owner) for owner in owners[part]}) == 1
    assert [part.tolist() for part in micro_batches(batch, max_tokens)] == [part.tolist() for part in parts]
    assert len(list(micro_batches(batch, 10**6))) == 1


def test_the_budget_holds_for_what_is_really_computed():
    # "Padding may stand on either side": short rows, some left-padded and some right-padded, stay as wide as the batch
    # once put together, for only columns that are padding in *every* row are trimmed.
    real = torch.zeros(4, 8, dtype=torch.bool)
    real[0, :2] = real[1, 6:] = real[2, :2] = real[3, 6:] = True
    batch = Sequences(tokens=torch.zeros(4, 8).long(), attention_mask=real, response_mask=real)
    for part in micro_batches(batch, 16):
        micro = batch.select(part).trimmed()
        assert len(part) == 1 or micro.tokens.numel() <= 16
