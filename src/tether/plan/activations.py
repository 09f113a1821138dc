"""What a forward pass leaves behind for its backward pass, counted from the code that makes it.

For one token and one layer of width H, with Q features of queries, K of keys (and as many of values) and I inner ones,
the pass over packed tokens keeps:

    H      the layer's input, for its norm
    H      the normed input, for the weights of queries, keys and values (or their adapters)
    Q      queries, turned
    2 K    keys and values, the keys turned
    Q      what attention mixed
    H      the residual after attention, for the second norm
    H      its norm, for gate and up
    2 I    gate and up; their product as well where the layer after it has an adapter

and float32 sums of attention and norms. In plain torch (`layer_plain.py`) keys and values are repeated for every query
head, and the activation of the gate and the product are kept too. A model's own
modules also keep what their norms do in float32. In the last layer only tokens whose states are read go on after keys
and values. Of layers that are run again in the backward pass only what enters them is kept: a residual and a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tether.plan.shape import Shape

Way = Literal["plain", "fused", "modules"]
CHUNK = {"fused": 2**27, "plain": 2**23, "modules": 2**23}  # logits at a time, as in tether.ops


@dataclass(frozen=True)
class Pass:
    """One trunk's pass over a micro-batch."""

    tokens: int  # in all
    wanted: int  # whose states are read after the last layer
    layers: int  # that autograd sees
    width: int  # bytes of a number
    way: Way
    rank: int = 0  # of the adapters; 0 where weights themselves are trained
    recompute: bool = False
    trains_head: bool = True  # whether the output layer is trained

    def kept(self, shape: Shape) -> int:
        """Bytes held from the forward pass until the backward pass comes by, the head's not counted."""
        if not self.layers:
            return 0
        if self.recompute:
            return 2 * self.tokens * shape.hidden * self.width * self.layers
        angles = 2 * self.tokens * shape.head_dim * self.width
        return angles + (self.layers - 1) * self.layer(shape) + self.layer(shape, last=True)

    def layer(self, shape: Shape, *, last: bool = False) -> int:
        """Bytes that one layer keeps."""
        each, going_on = self._numbers(shape, last)
        wanted = self.wanted if last else self.tokens
        single = 4 * (wanted * shape.heads + self.tokens + wanted)
        if self.way == "modules":
            single += 4 * shape.hidden * (self.tokens + wanted)
        return (self.tokens * each + wanted * going_on) * self.width + single

    def _numbers(self, shape: Shape, last: bool) -> tuple[int, int]:
        """(numbers kept of every token, numbers kept of each that goes on after attention)."""
        inner, queries, hidden = shape.inner, shape.queries, shape.hidden
        thin = 4 * self.rank  # of queries, output, gate and up; of keys and values 2 more, of down one
        if self.way == "fused":
            each = 2 * hidden + 2 * shape.keys + 2 * self.rank
            gates = 3 * inner + self.rank if self.rank else 2 * inner
            return each, 2 * queries + (3 if last else 2) * hidden + gates + thin
        keys = 2 * (queries if shape.kv_heads < shape.heads else shape.keys)
        each = 2 * hidden + keys + 2 * queries + 2 * self.rank  # in the last layer, too, all tokens go into attention
        return each, (2 * queries + hidden if last else 0) + 2 * hidden + 4 * inner + thin + self.rank

    def rerun(self, shape: Shape) -> int:
        """Bytes of the one layer that is being run again, where layers are."""
        return self.layer(shape) if self.recompute else 0

    def passing(self, shape: Shape) -> int:
        """Bytes of the gradients at the widest place of a layer, its MLP: they come and go."""
        inner = 3 if self.way == "fused" else 4
        return self.tokens * self.width * (inner * shape.inner + 3 * shape.hidden)

    def forward(self, shape: Shape) -> int:
        """Bytes of a pass without gradients at its widest."""
        return self.tokens * self.width * (3 * shape.inner + 4 * shape.hidden)

    # -- heads --------------------------------------------------------------------------------------------------------

    def ends(self, shape: Shape) -> int:
        """Bytes kept after the last layer: what is normed, and its norm where it is laid out among all tokens again."""
        return 2 * self.wanted * shape.hidden * self.width

    def states(self, shape: Shape) -> int:
        """Bytes kept for the output layer: the states it reads and, where it is frozen, the slopes it found."""
        return (1 if self.trains_head else 2) * self.wanted * shape.hidden * self.width

    def values(self, shape: Shape) -> int:
        """Bytes kept for a value head, which reads states in float32."""
        return 4 * self.wanted * shape.hidden

    def chunk(self, shape: Shape) -> int:
        """Bytes of the logits that are there at a time, without gradients."""
        rows = min(self.wanted, max(1, CHUNK[self.way] // shape.vocabulary))
        return rows * shape.vocabulary * (self.width if self.way == "fused" else 3 * 4)

    def head(self, shape: Shape) -> int:
        """Bytes of the output layer's backward pass; a trained one's gradient is summed over chunks in float32."""
        states = self.wanted * shape.hidden * self.width
        if not self.trains_head:
            return states
        chunks = -(-self.wanted // max(1, CHUNK[self.way] // shape.vocabulary))
        each = self.width if chunks == 1 and self.way == "fused" else 4 + self.width
        return self.chunk(shape) + states + shape.vocabulary * shape.hidden * each
