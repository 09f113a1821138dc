"""What a decode step reads and writes, at addresses that never change: the cache, the slots, the work space."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.rollout.gpu.layers import Trunk

PARTS = 8  # partial products that a linear layer's sum may come in
BLOCK = 1024  # ids of the vocabulary that are summed together before the search for a token
SPLITS = 16  # pieces that a slot's cache may be read in
ROWS = 128  # work space is padded to a multiple of this, so that a tile of rows is always inside


class Cache:
    """Keys and values, (layers, slots, K, T, D) each: a slot's tokens stand at columns 0, 1, 2, ... of T.

    One length for all slots, and not pages: a batch of rollouts shares its limits, so pages would save little, and a
    slot read in a straight line is what the attention kernel is fastest at.
    """

    def __init__(self, trunk: Trunk, slots: int, length: int) -> None:
        shape = (len(trunk.layers), slots, trunk.kv_heads, length, trunk.head_dim)
        self.keys = torch.zeros(shape, dtype=trunk.dtype, device=trunk.device)
        self.values = torch.zeros(shape, dtype=trunk.dtype, device=trunk.device)

    def copy(self, sources: list[int], targets: list[int], length: int, at_once: int = 16) -> None:
        """Make the first `length` columns of some slots those of others, in every layer.

        No source may also be a target.
        """
        if not length:
            return
        for start in range(0, len(sources), at_once):
            source = torch.tensor(sources[start : start + at_once], device=self.keys.device)
            target = torch.tensor(targets[start : start + at_once], device=self.keys.device)
            for table in (self.keys, self.values):
                table[:, target, :, :length] = table[:, source, :, :length]


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

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Slots change their places; the places they leave are idle."""
        source = torch.tensor(sources, device=self.tokens.device)
        target = torch.tensor(targets, device=self.tokens.device)
        columns = (self.tokens, self.columns, self.drawn, self.limits, self.live)
        for table in (*columns, self.uniforms, self.answers, self.behavior, self.untruncated):
            table[target] = table[source]
        self.live[source] = False


class Workspace:
    """Room for one step's activations, token-major: (rows, features)."""

    def __init__(self, trunk: Trunk, slots: int) -> None:
        rows = -(-slots // ROWS) * ROWS
        features = trunk.heads * trunk.head_dim

        def empty(*shape: int, dtype: torch.dtype = trunk.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=trunk.device)

        self.hidden, self.normed = empty(rows, trunk.hidden), empty(rows, trunk.hidden)
        self.query, self.mixed = empty(rows, features), empty(rows, features)
        self.inner = empty(rows, trunk.inner)
        self.parts = empty(PARTS, rows, trunk.hidden, dtype=torch.float32)
        self.logits = empty(rows, trunk.vocabulary)
        blocks = -(-trunk.vocabulary // BLOCK)
        self.highest = empty(rows, blocks, dtype=torch.float32)  # by block of ids
        self.sums = empty(rows, blocks, dtype=torch.float32)
        self.pieces = empty(SPLITS, rows, features, dtype=torch.float32)  # of attention, and their weights
        self.weights = empty(SPLITS, rows, trunk.heads, 2, dtype=torch.float32)
