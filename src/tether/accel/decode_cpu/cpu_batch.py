"""Continuous batching: a fixed number of slots, each holding a running sequence, refilled as sequences end.

A sequence enters with its prompt but for the last token in the cache, and that token is the first one it is stepped on.
So reading a prompt needs no logits, every draw comes out of the same kind of step, and a sequence whose prompt is
already in some slot enters by a copy of that part of the slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.accel.decode_cpu.cpu_decoder import CpuDecoder
from tether.ops.sampling import Draw

PREFILL_TOKENS = 1024  # read in one pass, unless a single prompt is longer


@dataclass
class _Slot:
    """A running sequence: which one, the prompt it continues, how much of it is cached, and its next input."""

    sequence: int
    group: int
    prompt: int  # tokens of the prompt
    cached: int
    token: int
    ended: bool = False  # has drawn its last token, and stays for that one's state

    @property
    def drawn(self) -> int:
        """How many tokens it has drawn; between a step and its draw, the one now due counts."""
        return self.cached - self.prompt + 1


class ContinuousBatch:
    """Runs sequences through a decoder, at most `slots` at a time.

    `groups[i]` is the group of sequence i and `prompts[g]` the token ids that all sequences of group g continue.
    Sequences enter in order. New ones are let in once an eighth of the slots is free, so that prompts are read
    several at a time; meanwhile the last slot is moved into each hole, and a step costs what its live slots cost.
    """

    def __init__(
        self, decoder: CpuDecoder, slots: int, prompts: Mapping[int, list[int]], groups: Sequence[int], room: int
    ) -> None:
        """`room` is how many tokens a sequence may draw."""
        self.decoder = decoder
        self.slots = slots
        self.prompts = prompts
        self.room = room
        self.traces: dict[int, Tensor] = {}  # (T, H) by sequence, where the decoder keeps states
        self.waiting = deque(enumerate(groups))
        self.live: list[_Slot] = []
        self.steps = 0
        self.tokens_read = 0

    def run(
        self, draw: Callable[[Tensor, list[tuple[int, int]]], Draw], stops: set[int]
    ) -> list[tuple[list[int], Draw]]:
        """Every step's sequences and what they drew.

        `draw` is given logits (V, n) and, for each column, the sequence and how many tokens it has drawn before.
        """
        history: list[tuple[list[int], Draw]] = []
        while self.waiting or self.live:
            self._admit()
            logits = self._step()
            if self.decoder.traced is not None:
                logits = self._trace(logits)
                if not self.live:
                    continue
            drawn = draw(logits, [(slot.sequence, slot.drawn - 1) for slot in self.live])
            history.append(([slot.sequence for slot in self.live], drawn))
            self._leave(drawn.tokens.tolist(), stops)
        return history

    def _admit(self) -> None:
        free = self.slots - len(self.live)
        if free < min(len(self.waiting), max(1, self.slots // 8)):
            return
        holders = {slot.group: place for place, slot in enumerate(self.live)}
        unread: list[tuple[int, int]] = []  # (group, slot) of the prompts to be read
        copies: list[tuple[int, int, int]] = []
        for place in range(len(self.live), len(self.live) + min(free, len(self.waiting))):
            sequence, group = self.waiting.popleft()
            ids = self.prompts[group]
            if group in holders:
                copies.append((holders[group], place, len(ids) - 1))
            elif len(ids) > 1:
                unread.append((group, place))
            holders.setdefault(group, place)
            self.live.append(_Slot(sequence, group, len(ids), len(ids) - 1, ids[-1]))
        self._read(unread)
        for source, target, length in copies:
            self.decoder.cache.copy(source, target, length)

    def _read(self, unread: list[tuple[int, int]]) -> None:
        """Prefill in passes of at most PREFILL_TOKENS, prompts of like length together."""
        unread.sort(key=lambda pair: len(self.prompts[pair[0]]))
        while unread:
            batch, width = [], 0
            while unread and (not batch or width + len(self.prompts[unread[-1][0]]) <= PREFILL_TOKENS):
                batch.append(unread.pop())
                width += len(self.prompts[batch[-1][0]]) - 1
            batch.sort(key=lambda pair: pair[1])  # slots in order are written as one block
            self.decoder.prefill([self.prompts[group][:-1] for group, _ in batch], [place for _, place in batch])
            self.tokens_read += width

    def _step(self) -> Tensor:
        device = self.decoder.device
        tokens = torch.tensor([slot.token for slot in self.live], device=device)
        columns = torch.tensor([slot.cached for slot in self.live], device=device)
        logits = self.decoder.step(tokens, columns, max(slot.cached for slot in self.live) + 1)
        self.steps += 1
        for slot in self.live:
            slot.cached += 1
        return logits

    def _leave(self, tokens: list[int], stops: set[int]) -> None:
        """Take up the drawn tokens; where a sequence ends, the last slot moves into its place."""
        for place in reversed(range(len(tokens))):
            slot = self.live[place]
            slot.token = tokens[place]
            if slot.token in stops or slot.drawn >= self.room:
                if self.decoder.traced is None:
                    self._remove(place)
                else:
                    slot.ended = True

    def _remove(self, place: int) -> None:
        """Free a slot; the last one moves into its place."""
        last = self.live.pop()
        if place < len(self.live):
            self.decoder.cache.copy(len(self.live), place, last.cached)
            self.live[place] = last

    def _trace(self, logits: Tensor) -> Tensor:
        """Take out the sequences that have been stepped on their last token, with their states; the others' logits."""
        states = self.decoder.cache.states
        assert states is not None
        columns = list(range(len(self.live)))
        for place in reversed(columns):
            slot = self.live[place]
            if slot.ended:
                self.traces[slot.sequence] = states[place, : slot.cached].clone()
                self._remove(place)
                columns[place] = columns[-1]
                columns.pop()
        return logits if len(columns) == logits.shape[1] else logits[:, columns]
