"""The decoder of a model on a GPU from one call to the next: how many slots it has, and who has its memory."""

from __future__ import annotations

from typing import Any

import torch

from tether.accel.decode_gpu.cache_memory import FREE_SHARE, free_memory, slots_that_fit
from tether.accel.decode_gpu.gpu_decoder import GpuDecoder
from tether.accel.decode_gpu.slot_state import slot_bytes
from tether.accel.decode_gpu.step_layers import StepBackbone

MAX_SLOTS = 1024  # that are taken unasked: a step over more is no cheaper by the token
LENGTH_UNIT = 128  # a cache's length is a multiple of this, so that calls of like length share one


class DecoderCache:
    """Makes the decoder for a call, keeps its captured steps, and hands its cache's memory back in between.

    `made` is how often a decoder has been made, and `cache_bytes` the most that its cache has taken, which torch's
    counters do not see.
    """

    def __init__(self) -> None:
        self.decoder: GpuDecoder | None = None
        self.most = 0  # slots that the decoder was asked for; it has fewer where memory did not allow them
        self.made = 0
        self.cache_bytes = 0

    def ready(self, model: Any, slots: int, length: int, room: int) -> GpuDecoder:
        """A decoder for sequences of `length` tokens, `room` of them drawn, in `slots` slots or what memory allows."""
        kept = self.decoder
        if kept is not None and kept.serves(length, room) and slots <= self.most and self._resumed(kept):
            return kept
        if kept is not None and kept.made_for[0] == tuple(p.data_ptr() for p in model.parameters()):
            slots, length, room = max(slots, self.most), max(length, kept.length), max(room, kept.room)
        self.drop()
        length = -(-length // LENGTH_UNIT) * LENGTH_UNIT
        self.most = slots
        each = slot_bytes(StepBackbone(model, 1), length)
        fit = slots_that_fit(slots, each, free_memory(model.lm_head.weight.device))
        while True:
            try:
                self.decoder = GpuDecoder(model, fit, length, room)
                self.made += 1
                self.cache_bytes = max(self.cache_bytes, self.decoder.cache.memory.size)
                return self.decoder
            except torch.cuda.OutOfMemoryError:
                if fit == 1:
                    raise
                fit //= 2

    def release(self) -> None:
        """Hand the cache's memory back; the captured steps stay, where the driver can keep their addresses."""
        if self.decoder is None:
            return
        self.decoder.cache.memory.hand_back()
        if self.decoder.cache.memory.mapped:  # it goes with the decoder only
            self.drop()

    def drop(self) -> None:
        """Forget the decoder and all that it holds."""
        self.decoder = None

    def _resumed(self, decoder: GpuDecoder) -> bool:
        """Whether the cache's memory is there, or could be taken again within its share of what is free now."""
        memory = decoder.cache.memory
        if memory.mapped:
            return True
        if memory.size > FREE_SHARE * free_memory(decoder.device) and decoder.slots > 1:
            return False
        try:
            memory.take()
        except torch.cuda.OutOfMemoryError:
            return False
        decoder.cache.clear()
        return True
