"""Continuous batching whose steps never wait for the host: the slots' state lives on the device.

A sequence enters with its prompt but for the last token in the cache, and that token is the first one it is stepped on,
so every draw comes out of the same kind of step and samples of one prompt enter by a copy. The host launches a few
steps at a time and then looks which slots have ended; a slot that ended in between stood idle until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.protocols import Sampling
from tether.rollout.gpu.decoder import GpuDecoder
from tether.rollout.sampling import Draw

LOOK = 8  # steps between two looks at the slots
BUCKETS = (8, 16)  # numbers of slots that a step is captured for; then multiples of 32


def bucket(count: int, slots: int) -> int:
    """How many slots a step runs over, for `count` that are in use: few sizes, so that few steps are captured."""
    size = next((size for size in BUCKETS if count <= size), -(-count // 32) * 32)
    return min(size, slots)


@dataclass
class _Slot:
    """The sequence in a slot, whose prompt it continues, and after how many of the batch's steps it entered."""

    sequence: int
    group: int
    entered: int


class GpuBatch:
    """Runs sequences through a decoder, at most `slots` at a time.

    `groups[i]` is the group of sequence i, `prompts[g]` the token ids that all sequences of group g continue,
    `uniforms[i]` (room,) what sequence i draws by, and `stops` the tokens that end one. New sequences enter once an
    eighth of the slots is free. When none wait, live slots are moved together as soon as a step over fewer slots holds
    them all.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        slots: int,
        prompts: Mapping[int, list[int]],
        groups: Sequence[int],
        uniforms: Tensor,
        sampling: Sampling,
        stops: set[int],
    ) -> None:
        self.decoder, self.slots, self.prompts, self.sampling = decoder, slots, prompts, sampling
        self.room = sampling.max_new_tokens
        self.uniforms = uniforms.to(decoder.device)  # (sequences, room)
        self.waiting = deque(enumerate(groups))
        self.places: list[_Slot | None] = [None] * slots
        self.ended: list[tuple[list[int], tuple[Tensor, ...]]] = []  # sequences, and copies of what their slots held
        self.steps = 0
        self.slot_steps = 0  # slots stepped, live or idle, over all steps
        self.tokens_read = 0
        state = decoder.state
        known = [id for id in stops if 0 <= id < len(state.stops)]
        state.stops.zero_()
        state.stops[torch.tensor(known, dtype=torch.int64, device=decoder.device)] = True
        state.temperature.fill_(sampling.temperature or 1.0)
        state.live.zero_()

    def run(self) -> list[Draw]:
        """What each sequence drew, on the CPU; a token of -1 ends a sequence whose logits gave no distribution."""
        while self.waiting or any(self.places):
            self.admit()
            self._compact()
            used = max(place for place, slot in enumerate(self.places) if slot) + 1
            n = bucket(used, self.slots)
            oldest = min(slot.entered for slot in self.places if slot)
            steps = min(LOOK, self.room - (self.steps - oldest))
            self.decoder.advance(n, self.sampling, steps)
            self.steps += steps
            self.slot_steps += steps * n
            self._leave()
        return self._answers()

    def admit(self) -> None:
        """Let waiting sequences into free slots, once there are enough of those to read prompts several at a time."""
        free = [place for place, slot in enumerate(self.places) if slot is None]
        if len(free) < min(len(self.waiting), max(1, self.slots // 8)) or not self.waiting:
            return
        holders = {slot.group: place for place, slot in enumerate(self.places) if slot}
        unread: list[tuple[int, int]] = []  # (group, slot) of the prompts to be read
        copies: dict[int, list[tuple[int, int]]] = {}  # by the prompt's length, (source, target)
        entered: list[int] = []
        for place in free[: len(self.waiting)]:
            sequence, group = self.waiting.popleft()
            ids = self.prompts[group]
            if group in holders:
                copies.setdefault(len(ids) - 1, []).append((holders[group], place))
            elif len(ids) > 1:
                unread.append((group, place))
            holders.setdefault(group, place)
            self.places[place] = _Slot(sequence, group, self.steps)
            entered.append(place)
        if unread:
            self.decoder.prefill([self.prompts[group][:-1] for group, _ in unread], [place for _, place in unread])
            self.tokens_read += sum(len(self.prompts[group]) - 1 for group, _ in unread)
        for length, pairs in copies.items():
            self.decoder.cache.copy([source for source, _ in pairs], [target for _, target in pairs], length)
        self._enter(entered)

    def _enter(self, places: list[int]) -> None:
        """Make the sequences now standing at `places` live."""
        slots = [slot for slot in map(self.places.__getitem__, places) if slot]
        prompts = [self.prompts[slot.group] for slot in slots]
        rows = [
            places,
            [slot.sequence for slot in slots],
            [ids[-1] for ids in prompts],
            [len(ids) - 1 for ids in prompts],
        ]
        place, sequence, token, column = torch.tensor(rows).to(self.decoder.device)
        state = self.decoder.state
        state.tokens[place], state.columns[place] = token, column
        state.drawn[place], state.limits[place] = 0, self.room
        state.uniforms[place, : self.room] = self.uniforms[sequence].to(state.uniforms.dtype)
        state.live[place] = True

    def _compact(self) -> None:
        """Move live slots together where that makes a step cheaper."""
        used = [place for place, slot in enumerate(self.places) if slot]
        if self.waiting or not used or bucket(len(used), self.slots) >= bucket(used[-1] + 1, self.slots):
            return
        holes = [place for place, slot in enumerate(self.places[: len(used)]) if slot is None]
        movers = used[-len(holes) :]
        length = 0
        for source, target in zip(movers, holes, strict=True):
            slot = self.places[source]
            assert slot is not None
            length = max(length, len(self.prompts[slot.group]) - 1 + self.steps - slot.entered)
            self.places[target], self.places[source] = slot, None
        self.decoder.cache.copy(movers, holes, length)
        self.decoder.state.move(movers, holes)

    def _leave(self) -> None:
        """Look which slots have ended, and take what they drew."""
        live = self.decoder.state.live.tolist()  # waits for the steps
        ended = [place for place, slot in enumerate(self.places) if slot and not live[place]]
        if not ended:
            return
        state, rows = self.decoder.state, torch.tensor(ended, device=self.decoder.device)
        tables = (state.drawn[rows], state.answers[rows, : self.room], state.behavior[rows, : self.room])
        self.ended.append(
            ([slot.sequence for slot in map(self.places.__getitem__, ended) if slot],
             (*tables, state.untruncated[rows, : self.room]))
        )  # fmt: skip
        for place in ended:
            self.places[place] = None

    def _answers(self) -> list[Draw]:
        owners = [sequence for sequences, _ in self.ended for sequence in sequences]
        columns = zip(*(tables for _, tables in self.ended), strict=True)
        lengths, tokens, behavior, untruncated = (torch.cat(column).cpu() for column in columns)
        found: dict[int, Draw] = {}
        for row, (sequence, length) in enumerate(zip(owners, lengths.tolist(), strict=True)):
            found[sequence] = Draw(tokens[row, :length], behavior[row, :length], untruncated[row, :length])
        return [found[sequence] for sequence in range(len(owners))]
