"""What a forward pass leaves behind for its backward pass, counted from the code that makes it.

For one token and one layer of width H, with Q features of queries, K of keys (and as many of values) and I inner ones,
the fused pass on a CUDA device (`layer_fused.py`) keeps

    H      what enters the first norm
    Q      queries, turned
    2 K    keys and values, the keys turned
    Q      what attention mixed
    H      what enters the second norm
    2 I    gate and up

and float32 sums of attention and norms; normed states and the gated product are made again. In plain torch
(`plain_ops.py`) both normed states are kept as well, keys and values are repeated for every query head, and the gate's
activation and the product are kept too. A model's own modules also keep what their norms do in float32. In the last
layer only tokens whose states are read go on after keys and values. Of layers that are run again in the backward pass
only what enters them is kept.

Where layers are small and all batches have one shape, the fused pass is held as CUDA graphs, and what it keeps stays
where it is from then on, with the gradients (`cuda_graphs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tether.models.acceleration import FUSED_CHUNK_ELEMENTS as FUSED_CHUNK
from tether.ops.logprobs import CHUNK_ELEMENTS
from tether.plan.model_shape import Shape

Backend = Literal["plain", "fused", "modules"]
CHUNK = {"fused": FUSED_CHUNK, "plain": CHUNK_ELEMENTS, "modules": CHUNK_ELEMENTS}  # logits at a time


@dataclass(frozen=True)
class Pass:
    """One backbone's pass over a micro-batch."""

    tokens: int  # in all
    wanted: int  # whose states are read after the last layer
    layers: int  # that autograd sees
    width: int  # bytes of a number
    backend: Backend
    rank: int = 0  # of the adapters; 0 where weights themselves are trained
    recompute: bool = False
    trains_head: bool = True  # whether the output layer is trained
    captured: bool = False  # held as CUDA graphs

    def kept(self, shape: Shape) -> int:
        """Bytes held from the forward pass until the backward pass comes by, the head's not counted."""
        if not self.layers:
            return 0
        angles = 2 * self.tokens * shape.head_dim * self.width
        if self.recompute:
            return angles + self.tokens * shape.hidden * self.width * self.layers
        return angles + (self.layers - 1) * self.layer(shape) + self.layer(shape, last=True)

    def layer(self, shape: Shape, *, last: bool = False) -> int:
        """Bytes that one layer keeps."""
        each, going_on = self._numbers(shape, last)
        wanted = self.wanted if last else self.tokens
        single = 4 * (wanted * shape.heads + self.tokens + wanted)
        if self.backend == "modules":
            single += 4 * shape.hidden * (self.tokens + wanted)
        return (self.tokens * each + wanted * going_on) * self.width + single

    def _numbers(self, shape: Shape, last: bool) -> tuple[int, int]:
        """(numbers kept of every token, numbers kept of each that goes on after attention)."""
        inner, queries, hidden = shape.inner, shape.queries, shape.hidden
        thin = 5 * self.rank  # of queries, output, gate, up and down; of keys and values 2 more for every token
        if self.backend == "fused":
            raw = (queries, shape.keys) if shape.head_norms else (0, 0)
            each = hidden + 2 * shape.keys + raw[1] + 2 * self.rank
            return each, 2 * queries + raw[0] + hidden + 2 * inner + thin
        keys = 2 * (queries if shape.kv_heads < shape.heads else shape.keys)
        each = 2 * hidden + keys + 2 * queries + 2 * self.rank  # in the last layer, too, all tokens go into attention
        return each, (2 * queries + hidden if last else 0) + 2 * hidden + 4 * inner + thin

    def rerun(self, shape: Shape) -> int:
        """Bytes of the one layer that is being run again, where layers are."""
        return self.layer(shape) if self.recompute else 0

    def passing(self, shape: Shape) -> int:
        """Bytes of the gradients at the widest place of a layer, its MLP: they come and go."""
        inner = 3 if self.backend == "fused" else 4
        return self.tokens * self.width * (inner * shape.inner + 4 * shape.hidden)

    def forward(self, shape: Shape) -> int:
        """Bytes of a pass without gradients at its widest."""
        return self.tokens * self.width * (3 * shape.inner + 4 * shape.hidden)

    # -- heads --------------------------------------------------------------------------------------------------------

    def ends(self, shape: Shape) -> int:
        """Bytes kept after the last layer: what is normed, and its norm where it is laid out among all tokens again."""
        return 2 * self.wanted * shape.hidden * self.width

    def states(self, shape: Shape) -> int:
        """Bytes kept for the output layer: the states it reads and, where it is frozen, the slopes it found.

        Logits of a single chunk wait for the backward pass on the fused way.
        """
        waits = self.chunk(shape) if self.trains_head and self.backend == "fused" and self.chunks(shape) == 1 else 0
        return (1 if self.trains_head else 2) * self.wanted * shape.hidden * self.width + waits

    def values(self, shape: Shape) -> int:
        """Bytes kept for a value head, which reads states in float32."""
        return 4 * self.wanted * shape.hidden

    def chunks(self, shape: Shape) -> int:
        """In how many parts logits are made."""
        return -(-self.wanted // max(1, CHUNK[self.backend] // shape.vocabulary))

    def chunk(self, shape: Shape) -> int:
        """Bytes of the logits that are there at a time, without gradients."""
        rows = min(self.wanted, max(1, CHUNK[self.backend] // shape.vocabulary))
        return rows * shape.vocabulary * (self.width if self.backend == "fused" else 3 * 4)

    def head(self, shape: Shape) -> int:
        """Bytes of the output layer's backward pass; a trained one's gradient is summed over chunks in float32."""
        states = self.wanted * shape.hidden * self.width
        if not self.trains_head or (self.backend == "fused" and self.chunks(shape) == 1):
            return states
        return self.chunk(shape) + states + shape.vocabulary * shape.hidden * (4 + self.width)
