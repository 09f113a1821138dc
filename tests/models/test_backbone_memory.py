"""What a shared backbone remembers over a checkpoint: not the states, but how to find them again to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.hub.tiny_model import PAD_ID, tiny_model
from tether.models.backbones import backbone_of
from tether.models.shared_backbone import SharedBackbone
from tether.types import Sequences

MODEL = backbone_of(tiny_model(seed=3))
WIDTH = 4 * 64  # bytes of one token's state


def backbone(memory_bytes: int = 2**29) -> SharedBackbone:
    return SharedBackbone(MODEL, 1, memory_bytes)


def rows(*lengths_and_seeds: tuple[int, int]) -> Sequences:
    """A padded batch whose row of length n and seed s is always the same."""
    longest = max(length for length, _ in lengths_and_seeds)
    tokens = torch.full((len(lengths_and_seeds), longest), PAD_ID)
    for place, (length, seed) in enumerate(lengths_and_seeds):
        tokens[place, :length] = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))
    mask = tokens != PAD_ID
    return Sequences(tokens=tokens, attention_mask=mask, response_mask=mask)


def over_a_checkpoint(before: SharedBackbone) -> SharedBackbone:
    """Another backbone that remembers the same, by way of tensors that a file can hold."""
    after = backbone(before.memory_bytes)
    after.restore_rows({name: tensor.clone() for name, tensor in before.memory().items()})
    return after


def test_a_remembered_row_is_found_again_to_the_bit_and_run_with_its_batch():
    before = backbone()
    first = before.states(rows((7, 1), (3, 2), (5, 3)))
    after = over_a_checkpoint(before)
    assert after.rows_run == 0  # nothing is run before it is wanted
    assert torch.equal(after.states(rows((7, 1), (3, 2), (5, 3))), first)
    assert after.rows_run == 3
    assert torch.equal(after.states(rows((3, 2)))[0], first[1, :3])
    assert after.rows_run == 3


def test_rows_that_were_never_seen_are_run_in_the_batch_that_they_come_in():
    before = backbone()
    before.states(rows((7, 1)))
    after = over_a_checkpoint(before)
    mixed = rows((7, 1), (4, 9))
    assert torch.equal(after.states(mixed), before.states(mixed))


def test_the_memory_is_small_and_has_no_states():
    before = backbone()
    before.states(rows((7, 1), (3, 2)))
    saved = before.memory()
    assert set(saved) == {"order", "tokens/0", "mask/0"}
    assert saved["order"].tolist() == [[0, 0], [0, 1]]
    assert not any(tensor.is_floating_point() for tensor in saved.values())


def test_an_empty_memory_goes_over_a_checkpoint_too():
    after = over_a_checkpoint(backbone())
    assert after.memory()["order"].shape == (0, 2)


def test_what_is_taken_up_replaces_what_was_there():
    after = backbone()
    after.states(rows((6, 5)))
    after.restore_rows(backbone().memory())
    assert after.memory()["order"].shape == (0, 2)
    after.states(rows((6, 5)))
    assert after.rows_run == 2


def test_what_was_kept_from_elsewhere_is_not_part_of_it():
    before = backbone()
    before.keep(torch.tensor([1, 2, 3]), torch.zeros(3, 64))
    before.states(rows((2, 4)))
    assert before.memory()["order"].tolist() == [[0, 0]]


@pytest.mark.parametrize("room", [1, 5 * WIDTH, 9 * WIDTH, 2**20])
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_whenever_the_checkpoint_falls_all_that_follows_is_the_same(room, data):
    """The same batches, with and without a checkpoint in between, and room for few rows: some are forgotten."""
    row = st.tuples(st.integers(1, 6), st.integers(0, 4))
    batches = data.draw(st.lists(st.lists(row, min_size=1, max_size=3), min_size=2, max_size=5))
    cut = data.draw(st.integers(0, len(batches) - 1))
    calm, resumed = backbone(room), backbone(room)
    for place, batch in enumerate(batches):
        if place == cut:
            resumed = over_a_checkpoint(resumed)
        assert torch.equal(resumed.states(rows(*batch)), calm.states(rows(*batch)))
        mine, its = resumed.memory(), calm.memory()
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
