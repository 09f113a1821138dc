"""Continuous batching whose steps never wait for the host: the slots' state lives on the device.

A sequence enters with its prompt but for the last token in the cache, and that token is the first one it is stepped on,
so every draw comes out of the same kind of step and samples of one prompt enter by a copy. The host launches a few
steps, asks which slots have ended by then, launches a few more, and only then reads the answer: the device is never
idle, and a slot that ended stands idle for two such rounds at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.accel.decode_gpu.gpu_decoder import GpuDecoder
from tether.accel.decode_gpu.slots import on_device
from tether.ops.sampling import Draw
from tether.protocols import Sampling

LOOK = 4  # steps between two looks at the slots
REFILL = 16  # new sequences enter once one in so many slots is free
SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


def bucket(count: int, slots: int) -> int:
    """How many slots a step runs over, for `count` that are in use: few sizes, so that few steps are captured."""
    size = next((size for size in SIZES if count <= size), -(-count // 256) * 256)
    return min(size, slots)


@dataclass(eq=False)
class _Slot:
    """A running sequence, whose prompt it continues, where it stands, and the batch's steps before it entered."""

    sequence: int
    group: int
    place: int
    entered: int
    gone: bool = False


@dataclass(frozen=True)
class _Look:
    """Which slots were live after some steps, and who stood in them; to be read once the device has come so far."""

    slots: list[_Slot | None]
    live: Tensor
    ready: torch.cuda.Event | None

    def ended(self) -> list[_Slot]:
        """Those whose end this look is the first to show."""
        if self.ready is not None:
            self.ready.synchronize()
        live = self.live.tolist()
        return [slot for place, slot in enumerate(self.slots) if slot and not slot.gone and not live[place]]


class GpuBatch:
    """Runs sequences through a decoder, at most `slots` at a time.

    `groups[i]` is the group of sequence i, `prompts[g]` the token ids that all sequences of group g continue,
    `uniforms[i]` (room,) what sequence i draws by, and `stops` the tokens that end one. When none wait, live slots are
    moved together as soon as a step over fewer slots holds them all.
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
        self.looks: deque[_Look] = deque()
        self.ended: list[tuple[list[int], tuple[Tensor, ...]]] = []  # sequences, and copies of what their slots held
        self.steps = 0
        self.slot_steps = 0  # slots stepped, live or idle, over all steps
        self.tokens_read = 0
        decoder.sample_by(sampling, stops)

    def run(self) -> list[Draw]:
        """What each sequence drew, on the CPU; a token of -1 ends a sequence whose logits gave no distribution."""
        while self.waiting or any(self.places):
            self.admit()
            self._compact()
            went_on = self._advance()
            if len(self.looks) > went_on:  # the newest look waits while the device still has steps to do
                self._leave(self.looks.popleft().ended())
        return self._answers()

    def admit(self) -> None:
        """Let waiting sequences into free slots, once there are enough of those to read prompts several at a time."""
        free = [place for place, slot in enumerate(self.places) if slot is None]
        if len(free) < min(len(self.waiting), max(1, self.slots // REFILL)) or not self.waiting:
            return
        holders = {slot.group: slot.place for slot in self.places if slot}
        unread: list[tuple[int, int]] = []  # (group, slot) of the prompts to be read
        copies: list[list[int]] = []  # (source, target, length)
        entered: list[_Slot] = []
        for place in free[: len(self.waiting)]:
            sequence, group = self.waiting.popleft()
            length = len(self.prompts[group]) - 1
            if group in holders:
                copies.append([holders[group], place, length])
            elif length:
                unread.append((group, place))
            holders.setdefault(group, place)
            slot = self.places[place] = _Slot(sequence, group, place, self.steps)
            entered.append(slot)
        if unread:
            self.decoder.prefill([self.prompts[group][:-1] for group, _ in unread], [place for _, place in unread])
            self.tokens_read += sum(len(self.prompts[group]) - 1 for group, _ in unread)
        if copies:
            source, target, length = on_device(copies, self.decoder.device).t().contiguous()
            longest = max(length for _, _, length in copies)
            self.decoder.kernels.copy_slots(self.decoder.cache, source, target, length, longest)
        self._enter(entered)

    def _enter(self, slots: list[_Slot]) -> None:
        """Make sequences that have just been given their slots live."""
        prompts = [self.prompts[slot.group] for slot in slots]
        rows = [
            [slot.place for slot in slots],
            [slot.sequence for slot in slots],
            [ids[-1] for ids in prompts],
            [len(ids) - 1 for ids in prompts],
        ]
        place, sequence, token, column = on_device(rows, self.decoder.device)
        state = self.decoder.state
        state.tokens[place], state.columns[place] = token, column
        state.drawn.index_fill_(0, place, 0)
        state.limits.index_fill_(0, place, self.room)
        state.uniforms[place, : self.room] = self.uniforms[sequence].to(state.uniforms.dtype)
        state.live.index_fill_(0, place, True)

    def _compact(self) -> None:
        """Move live slots together where that makes a step cheaper."""
        used = [slot for slot in self.places if slot]
        if self.waiting or not used or bucket(len(used), self.slots) >= bucket(used[-1].place + 1, self.slots):
            return
        holes = [place for place, slot in enumerate(self.places[: len(used)]) if slot is None]
        movers = used[-len(holes) :]
        device, state = self.decoder.device, self.decoder.state
        source, target = on_device([[slot.place for slot in movers], holes], device)
        longest = max(len(self.prompts[slot.group]) - 1 + self.steps - slot.entered for slot in movers)
        longest = min(longest, self.decoder.length)
        self.decoder.kernels.copy_slots(self.decoder.cache, source, target, state.columns[source], longest)
        state.move(source, target)
        for slot, hole in zip(movers, holes, strict=True):
            self.places[slot.place], self.places[hole] = None, slot
            slot.place = hole

    def _advance(self) -> bool:
        """Launch the next steps and ask who is live after them; False where every sequence has had all its steps."""
        left = max((self.room - (self.steps - slot.entered) for slot in self.places if slot), default=0)
        if left <= 0:
            return False
        n = bucket(max(slot.place for slot in self.places if slot) + 1, self.slots)
        steps = min(LOOK, left)
        self.decoder.advance(n, self.sampling, steps)
        self.steps += steps
        self.slot_steps += steps * n
        live, ready = self.decoder.state.live, None
        if live.is_cuda:
            live, ready = live.to("cpu", non_blocking=True), torch.cuda.Event()
            ready.record()
        self.looks.append(_Look(list(self.places), live if ready else live.clone(), ready))
        return True

    def _leave(self, ended: list[_Slot]) -> None:
        """Take what ended slots drew, and free them."""
        if not ended:
            return
        state, rows = self.decoder.state, on_device([slot.place for slot in ended], self.decoder.device)
        tables = (state.drawn[rows], *(table[rows, : self.room] for table in (state.answers, state.behavior)))
        self.ended.append(([slot.sequence for slot in ended], (*tables, state.untruncated[rows, : self.room])))
        for slot in ended:
            self.places[slot.place], slot.gone = None, True

    def _answers(self) -> list[Draw]:
        owners = [sequence for sequences, _ in self.ended for sequence in sequences]
        columns = zip(*(tables for _, tables in self.ended), strict=True)
        lengths, *tables = (torch.cat(column).cpu() for column in columns)
        rows = zip(owners, lengths.tolist(), *(table.unbind() for table in tables), strict=True)
        found: dict[int, Draw] = {}
        for sequence, length, *drawn in rows:
            found[sequence] = Draw(*(row if length == self.room else row[:length] for row in drawn))
        return [found[sequence] for sequence in range(len(owners))]
