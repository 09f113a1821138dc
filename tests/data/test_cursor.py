"""The order of the data is a function of the seed and the position, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.data.examples import DataOrder

few = settings(max_examples=40, deadline=None)
sizes, seeds = st.integers(1, 12), st.integers(0, 2**31)


@few
@given(sizes, seeds, st.integers(0, 40), st.integers(0, 30))
def test_take_reads_one_endless_stream(size, seed, position, count):
    order = DataOrder(range(size), seed)
    stream = [order.take(place, 1)[0] for place in range(position + count)]
    assert order.take(position, count) == stream[position:]
    assert order.take(0, position + count) == stream


@few
@given(sizes, seeds, st.integers(0, 5))
def test_each_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(DataOrder(range(size), seed).take(epoch * size, size)) == list(range(size))


@few
@given(sizes, seeds, st.lists(st.integers(0, 9), max_size=6))
def test_how_the_stream_is_cut_changes_nothing(size, seed, counts):
    # As a run that is killed and resumed at any position: the items are those of the run that was not.
    taken, position = [], 0
    for count in counts:
        taken += DataOrder(range(size), seed).take(position, count)
        position += count
    assert taken == DataOrder(range(size), seed).take(0, sum(counts))


def test_epochs_and_seeds_differ_and_global_state_plays_no_part():
    order = DataOrder(range(30), 7)
    first, second = order.take(0, 30), order.take(30, 30)
    assert first != second and first != list(range(30))
    assert DataOrder(range(30), 8).take(0, 30) != first
    before = torch.get_rng_state()
    torch.manual_seed(123)
    assert order.take(0, 30) == first
    torch.set_rng_state(before)
    order.take(5, 50)
    assert torch.equal(torch.get_rng_state(), before)  # and the global stream is not advanced


def test_take_runs_across_several_epochs():
    taken = DataOrder(["a", "b", "c"], 0).take(2, 10)  # the last of epoch 0, epochs 1 to 3
    assert len(taken) == 10
    assert [sorted(taken[start : start + 3]) for start in (1, 4, 7)] == [["a", "b", "c"]] * 3


def test_the_order_of_a_seed_is_pinned():
    # Resuming an old run after an upgrade must read the same data: if this fails, the format of runs has changed.
    assert DataOrder(range(8), 0).take(0, 12) == [0, 6, 4, 5, 3, 2, 7, 1, 1, 5, 7, 2]


def test_no_data_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        DataOrder([], 0)
