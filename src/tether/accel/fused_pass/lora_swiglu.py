"""The gated product of layers whose gate and up have adapters, by Triton kernels. No autograd.

Gates and ups are the widest states of a layer. To add an adapter's product to them would read and write them once more;
here they stay what the weights made of the input, g and u, and whoever reads them adds what belongs to them:

    product = silu(g + s t_g B_g^T) (u + s t_u B_u^T),    t being the thin products x A^T.
"""

# pyright: reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tether.accel.fused_pass.lora_linear import AdaptedLinear, LoraAdapter
from tether.accel.kernels.lora import adapted_gate_backward_kernel, adapted_gate_kernel, sum_parts_kernel

MAX_RANKS = 64  # above, a product of its own is worth its pass over memory
SUM_BLOCK = 1024


class Tiles(NamedTuple):
    """The blocks that both kernels work on.

    In the backward kernel a warp has 16 rows and all columns of a tile, for its products feed each other: tiles that
    are wider, or have more ranks, need more registers than there are, and more warps would do the same work twice.
    """

    forward: dict[str, int]
    backward: dict[str, int]
    span: int  # columns of a backward program for each padded rank: few, and it writes many sums for what it reads


FEW = Tiles(
    forward={"ROWS": 32, "COLUMNS": 64, "num_warps": 4},
    backward={"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3},
    span=64,
)
MANY = Tiles(
    forward={"ROWS": 64, "COLUMNS": 64, "num_warps": 4},
    backward={"ROWS": 32, "COLUMNS": 32, "num_warps": 2, "num_stages": 3},
    span=32,
)


def tiles_for(padded: int) -> Tiles:
    """The fastest of those that docs/log.md lists, on an H200, for so many padded ranks."""
    return FEW if padded <= 16 else MANY


class Slopes(NamedTuple):
    """What the backward pass of a gated product gives."""

    gate: Tensor  # (N, I) d gate
    up: Tensor  # (N, I) d up
    narrow: Tensor  # (N, R) s d gate B_g and s d up B_u side by side


@dataclass(frozen=True)
class GateAdapters:
    """The adapters of gate and up, and that of the layer which reads their product, where it has one."""

    gate: LoraAdapter
    up: LoraAdapter
    down: LoraAdapter | None

    @classmethod
    def of(cls, gate: AdaptedLinear, up: AdaptedLinear, down: AdaptedLinear) -> GateAdapters | None:
        """None where gate and up do not both have an adapter of a rank that fits into a tile."""
        if gate.adapter is None or up.adapter is None or max(gate.adapter.rank, up.adapter.rank) > MAX_RANKS:
            return None
        fits = down.adapter is not None and down.adapter.rank <= MAX_RANKS
        return cls(gate.adapter, up.adapter, down.adapter if fits else None)

    def product(self, gate: Tensor, up: Tensor, thin: Tensor) -> Tensor:
        """(N, I) silu(gate) up of base products (N, I) each and of both thin products side by side, (N, R)."""
        rows, width = gate.shape
        padded = self._padded()
        product, tile = torch.empty_like(gate), tiles_for(padded).forward
        blocks = -(-rows // tile["ROWS"]) * -(-width // tile["COLUMNS"])
        if blocks:
            adapted_gate_kernel[(blocks,)](
                gate, up, thin, self.gate.up.contiguous(), self.up.up.contiguous(), product, rows, width,
                self.gate.scaling, self.up.scaling,
                GATE_RANK=self.gate.rank, UP_RANK=self.up.rank, RANKS=padded, **tile,
            )  # fmt: skip
        return product

    def backward(
        self, gate: Tensor, up: Tensor, thin: Tensor, grad: Tensor, narrow_down: Tensor | None, product: Tensor | None
    ) -> Slopes:
        """The slopes from `grad`, that of the product through the weights of `down`; it is overwritten.

        `narrow_down` (N, rank) is what comes through the adapter of `down`: narrow_down A is added to the gradient.
        `product`, where there is one, is filled with the product once more. Each program has some of the columns, and
        its part of the sums over them; the parts are then added in their order, so that all sums are always the same.
        """
        rows, width = gate.shape
        grad_up = torch.empty_like(up)
        narrow = torch.empty_like(thin)
        through = self.down if narrow_down is not None else None
        padded = self._padded()
        tiles = tiles_for(padded)
        tile, span = tiles.backward, max(tiles.backward["COLUMNS"], tiles.span * padded)
        parts = -(-width // span)
        partial = torch.empty(parts, *thin.shape, dtype=torch.float32, device=thin.device)
        if rows:
            adapted_gate_backward_kernel[(-(-rows // tile["ROWS"]), parts)](
                gate, up, grad, thin, self.gate.up.contiguous(), self.up.up.contiguous(),
                thin if narrow_down is None else narrow_down, gate if through is None else through.down.contiguous(),
                gate if product is None else product, grad_up, partial,
                rows, width, span, self.gate.scaling, self.up.scaling,
                GATE_RANK=self.gate.rank, UP_RANK=self.up.rank, DOWN_RANK=0 if through is None else through.rank,
                RANKS=padded, AGAIN=product is not None, **tile,
            )  # fmt: skip
            blocks = -(-narrow.numel() // SUM_BLOCK)
            sum_parts_kernel[(blocks,)](partial, narrow, narrow.numel(), PARTS=parts, BLOCK=SUM_BLOCK, num_warps=4)
        return Slopes(grad, grad_up, narrow)

    def _padded(self) -> int:
        """Ranks with the zeros that make tiles wide enough for a product: a power of two, at least 16."""
        most = max(16, self.gate.rank, self.up.rank, 0 if self.down is None else self.down.rank)
        return 1 << (most - 1).bit_length()
