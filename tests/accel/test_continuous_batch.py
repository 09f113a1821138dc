"""Slots, refill, shared prompts and compaction, on a decoder that remembers tokens instead of keys and values."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tether.accel.cached_attention import SlotCache
from tether.accel.cpu_decoder import PREFILL_TOKENS, ContinuousBatch
from tether.ops.sampling import Draw

VOCABULARY, STOP = 50, 0


def next_token(history: list[int], sequence: int) -> int:
    """What the pretend model says after `history`; the sequence plays the part of its uniforms."""
    return hash((tuple(history), sequence)) % VOCABULARY


class Recorder:
    """Slots hold their tokens; a step's logits are a number of its own for each slot's contents."""

    def __init__(self, slots: int) -> None:
        self.device = torch.device("cpu")
        self.traced = None
        self.cache = self
        self.slots: list[list[int]] = [[-1] * 9 for _ in range(slots)]  # rubbish from an earlier sequence
        self.widths: list[int] = []
        self.passes: list[list[int]] = []
        self.copies: list[tuple[int, int, int]] = []

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        self.passes.append([len(ids) for ids in prompts])
        for ids, slot in zip(prompts, slots, strict=True):
            self.slots[slot] = list(ids)

    def copy(self, source: int, target: int, length: int) -> None:
        self.copies.append((source, target, length))
        assert len(self.slots[source]) >= length
        self.slots[target] = self.slots[source][:length]

    def step(self, tokens: Tensor, columns: Tensor, length: int) -> Tensor:
        self.widths.append(len(tokens))
        assert length == int(columns.max()) + 1
        for slot, (token, column) in enumerate(zip(tokens.tolist(), columns.tolist(), strict=True)):
            self.slots[slot] = [*self.slots[slot][:column], token]
            assert len(self.slots[slot]) == column + 1, "a slot was stepped past what it holds"
        return torch.arange(len(tokens)).expand(VOCABULARY, -1)


def run(prompts: dict[int, list[int]], groups: list[int], slots: int, room: int) -> tuple[list[list[int]], Recorder]:
    """Each sequence's answer, checked against what the pretend model says of its own history alone."""
    recorder = Recorder(slots)
    batch = ContinuousBatch(recorder, slots, prompts, groups, room)  # pyright: ignore[reportArgumentType]

    def draw(logits: Tensor, due: list[tuple[int, int]]) -> Draw:
        assert logits.shape[1] == len(due) <= slots
        for (sequence, drawn), slot in zip(due, recorder.slots, strict=False):
            assert len(slot) == len(prompts[groups[sequence]]) + drawn
        tokens = [next_token(slot, sequence) for (sequence, _), slot in zip(due, recorder.slots, strict=False)]
        return Draw(torch.tensor(tokens), torch.zeros(len(due)), torch.zeros(len(due)))

    answers: list[list[int]] = [[] for _ in groups]
    for sequences, drawn in batch.run(draw, {STOP}):
        for sequence, token in zip(sequences, drawn.tokens.tolist(), strict=True):
            answers[sequence].append(token)
    assert batch.steps == len(recorder.widths) and not batch.live
    return answers, recorder


def alone(prompt: list[int], sequence: int, room: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < room and (not answer or answer[-1] != STOP):
        answer.append(next_token([*prompt, *answer], sequence))
    return answer


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=9),
    st.integers(1, 12),
    st.integers(1, 60),
)
def test_each_sequence_is_what_it_would_be_alone(shapes: list[tuple[int, int]], slots: int, room: int):
    prompts = {group: [group + 1] * length for group, (length, _) in enumerate(shapes)}
    groups = [group for group, (_, samples) in enumerate(shapes) for _ in range(samples)]
    answers, recorder = run(prompts, groups, slots, room)
    assert answers == [alone(prompts[group], sequence, room) for sequence, group in enumerate(groups)]
    assert sum(recorder.widths) == sum(map(len, answers)), "a finished sequence is never stepped again"
    read = Counter(length for lengths in recorder.passes for length in lengths)
    if len(groups) <= slots:
        assert read == Counter(len(ids) - 1 for ids in prompts.values() if len(ids) > 1), "each prompt is read once"


def test_freed_slots_are_refilled():
    groups = list(range(64))
    answers, recorder = run({group: [group, 1, 2] for group in groups}, groups, slots=16, room=40)
    lengths = sorted(map(len, answers))
    assert lengths[0] < 10 and lengths[-1] > 30, "the test needs answers of different lengths"
    full = recorder.widths[: len(recorder.widths) // 2]
    assert min(full) > 14, "while others wait, no more than an eighth of the slots stands empty"
    chunked = sum(max(map(len, answers[start : start + 16])) for start in range(0, 64, 16))
    assert len(recorder.widths) < 0.85 * chunked


def test_samples_of_one_prompt_enter_by_a_copy():
    answers, recorder = run({0: [3, 4, 5, 6]}, [0] * 20, slots=8, room=30)
    assert recorder.passes == [[3]], "read once, though sequences enter long after"
    assert len({str(answer) for answer in answers}) > 10
    assert sum(length == 3 for _, _, length in recorder.copies) >= 19


def test_prompts_are_read_in_passes_of_bounded_size():
    prompts = {group: [1] * length for group, length in enumerate([PREFILL_TOKENS * 2, 600, 500, 400, 20, 1])}
    _, recorder = run(prompts, list(prompts), slots=6, room=1)
    assert [length for lengths in recorder.passes for length in lengths] == [2 * PREFILL_TOKENS - 1, 599, 499, 399, 19]
    assert all(sum(lengths) <= PREFILL_TOKENS or len(lengths) == 1 for lengths in recorder.passes)


@pytest.fixture
def cache() -> SlotCache:
    return SlotCache(2, 4, 3, 8, 10, dtype=torch.float64, device=torch.device("cpu"))


def test_a_cache_gives_back_what_was_written_at_each_place(cache: SlotCache):
    slots, columns = torch.tensor([0, 2, 2, 1]), torch.tensor([0, 3, 0, 9])
    keys, values = torch.randn(2, 4, 3, 8, dtype=torch.float64)
    cache.write(1, slots, columns, keys, values)
    read_keys, read_values = cache.read(1, slots=3, length=10)
    assert (read_keys.shape, read_values.shape) == ((9, 8, 10), (9, 10, 8))
    assert read_keys.data_ptr() == cache.keys[1].data_ptr(), "a view, not a copy"
    for n in range(4):
        heads = slice(3 * int(slots[n]), 3 * int(slots[n]) + 3)
        assert torch.equal(read_keys[heads, :, columns[n]], keys[n])
        assert torch.equal(read_values[heads, columns[n]], values[n])
    assert int((cache.keys != 0).sum()) == keys.numel() and not cache.values[0].any()


def test_a_copy_takes_the_first_columns_of_every_layer(cache: SlotCache):
    cache.keys.normal_()
    cache.values.normal_()
    before = cache.keys.clone(), cache.values.clone()
    cache.copy(3, 1, 4)
    cache.copy(2, 0, 0)
    assert torch.equal(cache.keys[:, 1, ..., :4], before[0][:, 3, ..., :4])
    assert torch.equal(cache.values[:, 1, :, :4], before[1][:, 3, :, :4])
    assert torch.equal(cache.keys[:, 1, ..., 4:], before[0][:, 1, ..., 4:])
    others = [0, 2, 3]
    assert torch.equal(cache.keys[:, others], before[0][:, others])
    assert torch.equal(cache.values[:, others], before[1][:, others])
