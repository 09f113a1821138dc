"""What a decode step reads and writes, at addresses that never change: the cache, the slots, the work space."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.accel.decode_gpu.cache_memory import cache_memory
from tether.accel.decode_gpu.step_layers import MAX_RANK, StepBackbone
from tether.device_transfer import sent

PROCESSORS = 132  # of the device that tiles were chosen on
PARTS = 8  # partial products that a linear layer's sum may come in
PART_ROWS = 256  # slots up to which all of them may be used
BLOCK = 1024  # ids of the vocabulary that are summed together before the search for a token
SPLITS = 16  # pieces that a slot's cache may be read in
ROWS = 128  # work space is padded to a multiple of this, so that a tile of rows is always inside


def on_device(numbers: list[list[int]] | list[int], device: torch.device) -> Tensor:
    """Host numbers as an int64 tensor on the device, without waiting for what runs there."""
    return sent(torch.tensor(numbers, dtype=torch.int64), device)


class Cache:
    """Keys and values, (layers, slots, K, T, D) each: a slot's tokens stand at columns 0, 1, 2, ... of T.

    One length for all slots, and not pages: a batch of rollouts shares its limits, so pages would save little, and a
    slot read in a straight line is what the attention kernel is fastest at.
    """

    def __init__(self, backbone: StepBackbone, slots: int, length: int) -> None:
        shape = (2, len(backbone.layers), slots, backbone.kv_heads, length, backbone.head_dim)
        size = slots * slot_bytes(backbone, length)
        self.memory = cache_memory(size, backbone.device)
        both = self.memory.tensor()[:size].view(backbone.dtype).view(shape)
        self.keys, self.values = both[0], both[1]
        self.clear()

    def clear(self) -> None:
        """Nothing but zeros: what lies past a slot's end is read by the plain kernels, with weight zero."""
        self.keys.zero_()
        self.values.zero_()


def slot_bytes(backbone: StepBackbone, length: int) -> int:
    """What the cache of one slot takes."""
    return 2 * len(backbone.layers) * backbone.kv_heads * length * backbone.head_dim * backbone.dtype.itemsize


class SlotState:
    """S running sequences: each one's next input, where it stands, and what it has drawn."""

    def __init__(self, slots: int, room: int, vocabulary: int, device: torch.device) -> None:
        """`room` is the most tokens that a sequence draws."""

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.tokens = integers(slots)  # the next input
        self.columns = integers(slots)  # the column it will be cached at
        self.drawn = integers(slots)
        self.limits = integers(slots)  # how many may be drawn
        self.live = torch.zeros(slots, dtype=torch.bool, device=device)
        self.uniforms = torch.ones(slots, room, dtype=torch.float64, device=device)  # one for each draw
        self.answers = integers(slots, room)
        self.behavior = torch.zeros(slots, room, dtype=torch.float32, device=device)
        self.untruncated = torch.zeros(slots, room, dtype=torch.float32, device=device)
        self.stops = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.temperature = torch.ones(1, dtype=torch.float32, device=device)
        self.top_k = torch.full((1,), vocabulary, dtype=torch.int32, device=device)
        self.top_p = torch.ones(1, dtype=torch.float32, device=device)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Slots change their places; the places they leave are idle."""
        columns = (self.tokens, self.columns, self.drawn, self.limits, self.live)
        for table in (*columns, self.uniforms, self.answers, self.behavior, self.untruncated):
            table[target] = table[source]
        self.live[source] = False


class StepWorkspace:
    """Room for one step's activations, token-major: (rows, features)."""

    def __init__(self, backbone: StepBackbone, slots: int) -> None:
        rows = -(-slots // ROWS) * ROWS
        features = backbone.heads * backbone.head_dim

        def empty(*shape: int, dtype: torch.dtype = backbone.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=backbone.device)

        self.hidden, self.normed = empty(rows, backbone.hidden), empty(rows, backbone.hidden)
        self.query, self.mixed = empty(rows, features), empty(rows, features)
        self.inner = empty(rows, backbone.inner)
        self.parts = empty(max(PARTS * min(rows, PART_ROWS), rows), backbone.hidden, dtype=torch.float32)
        # with many slots the parts of a sum are rounded as a linear layer's output would be: half as much to move
        self.rounded_parts = self.parts.view(backbone.dtype).view(-1, backbone.hidden)
        self.thin = empty(PARTS, rows, 3, MAX_RANK, dtype=torch.float32)  # adapters' inner states, in parts
        self.logits = empty(rows, backbone.vocabulary)
        blocks = -(-backbone.vocabulary // BLOCK)
        self.highest = empty(rows, blocks, dtype=torch.float32)  # by block of ids
        self.sums = empty(rows, blocks, dtype=torch.float32)
        self.kept = empty(rows, blocks, dtype=torch.float32)  # of the ids that top-k and top-p leave
        self.thresholds = empty(rows, dtype=torch.int32)
        pieces = max(SPLITS, 4 * PROCESSORS // backbone.kv_heads)
        self.pieces = empty(pieces, features, dtype=torch.float32)  # of attention, and their weights
        self.weights = empty(pieces, backbone.heads, 2, dtype=torch.float32)
