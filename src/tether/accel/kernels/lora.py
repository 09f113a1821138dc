"""The gated product of layers whose gate and up have adapters, forward and backward. No autograd.

Gates and ups are the widest states of a layer. To add an adapter's product to them would read and write them once more;
here they stay what the weights made of the input, g and u, and whoever reads them adds what belongs to them:

    product = act(g + s t_g B_g^T) (u + s t_u B_u^T),    t being the thin products x A^T.

g and u are (rows, width) each; thin products (rows, rank) and B (width, rank) are small enough to be multiplied in
every tile that is read anyway. Numbers are read in the weights' type, multiplied in it, summed in float32, and rounded
once where they are written. Ranks are padded with zeros.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.accel.kernels.swiglu import bend, open_share
from tether.accel.spec import Activation, Layer, LoraAdapter

MAX_RANKS = 64  # above, a product of its own is worth its pass over memory
SUM_BLOCK = 1024


@triton.jit
def tile(matrix, row, column, rows, columns, stride):
    """The numbers of a matrix (rows, columns) where the given rows and columns meet; 0 outside of it."""
    real = (row[:, None] < rows) & (column[None, :] < columns)
    return tl.load(matrix + row[:, None].to(tl.int64) * stride + column[None, :], mask=real, other=0.0)


@triton.jit
def put(matrix, numbers, row, column, rows, columns, stride):
    """Write numbers where the given rows and columns of a matrix (rows, columns) meet."""
    real = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(matrix + row[:, None].to(tl.int64) * stride + column[None, :], numbers, mask=real)


@triton.jit
def adapted(numbers, left, right, scale):
    """numbers + scale left right, in float32.

    An fma by its name: Triton would begin a product with what is only added to it, and then not read tiles ahead.
    """
    return tl.fma(tl.dot(left, right, input_precision="ieee"), scale, numbers.to(tl.float32))


@triton.jit(do_not_specialize=["rows"])
def adapted_gate_kernel(
    gate, up, thin, gate_b, up_b, product, rows, width, gate_scale, up_scale,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GELU: tl.constexpr = False,
):  # fmt: skip
    """One tile of product = act(g + s t_g B_g^T) (u + s t_u B_u^T); `thin` holds t_g and t_u side by side."""
    blocks = tl.cdiv(width, COLUMNS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANKS)
    numbers = tile(gate, row, column, rows, width, width)
    other = tile(up, row, column, rows, width, width)
    thin_gate = tile(thin, row, rank, rows, GATE_RANK, GATE_RANK + UP_RANK)
    thin_up = tile(thin + GATE_RANK, row, rank, rows, UP_RANK, GATE_RANK + UP_RANK)
    wide_gate = tile(gate_b, column, rank, width, GATE_RANK, GATE_RANK).to(thin_gate.dtype)
    wide_up = tile(up_b, column, rank, width, UP_RANK, UP_RANK).to(thin_up.dtype)
    opened = adapted(numbers, thin_gate, tl.trans(wide_gate), gate_scale)
    raised = adapted(other, thin_up, tl.trans(wide_up), up_scale)
    result = opened * open_share(opened, GELU) * raised
    put(product, result.to(product.dtype.element_ty), row, column, rows, width, width)


@triton.jit(do_not_specialize=["rows"])
def adapted_gate_backward_kernel(
    gate, up, grad, thin, gate_b, up_b, narrow_down, down_a, product, grad_up, partial,
    rows, width, span, gate_scale, up_scale,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DOWN_RANK: tl.constexpr, RANKS: tl.constexpr,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr = False,
):  # fmt: skip
    """A block of rows, `span` columns: d gate (in place of `grad`), d up, and what they add to the narrow products.

    Those, s d gate B_g and s d up B_u side by side, are float32 sums over this program's columns, in partial
    (parts, rows, ranks). To the product's gradient `narrow_down` A_down is added, where DOWN_RANK is not 0; with AGAIN
    the product is written once more.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)
    thin_gate = tile(thin, row, rank, rows, GATE_RANK, GATE_RANK + UP_RANK)
    thin_up = tile(thin + GATE_RANK, row, rank, rows, UP_RANK, GATE_RANK + UP_RANK)
    narrow_product = tile(narrow_down, row, rank, rows, DOWN_RANK, DOWN_RANK)
    narrow_gate = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    narrow_up = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    first = tl.program_id(1) * span
    for start in range(first, tl.minimum(first + span, width), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        numbers = tile(gate, row, column, rows, width, width)
        other = tile(up, row, column, rows, width, width)
        slope = tile(grad, row, column, rows, width, width)
        wide_gate = tile(gate_b, column, rank, width, GATE_RANK, GATE_RANK).to(thin_gate.dtype)
        wide_up = tile(up_b, column, rank, width, UP_RANK, UP_RANK).to(thin_up.dtype)
        numbers = adapted(numbers, thin_gate, tl.trans(wide_gate), gate_scale)
        other = adapted(other, thin_up, tl.trans(wide_up), up_scale)
        if DOWN_RANK:
            deep = tile(down_a, rank, column, DOWN_RANK, width, width).to(narrow_product.dtype)
            slope = adapted(slope, narrow_product, deep, 1.0)
        else:
            slope = slope.to(tl.float32)
        share = open_share(numbers, GELU)
        gated = numbers * share
        if AGAIN:
            put(product, (gated * other).to(product.dtype.element_ty), row, column, rows, width, width)
        raised = (slope * gated).to(grad_up.dtype.element_ty)
        put(grad_up, raised, row, column, rows, width, width)
        opened = (slope * other * share * bend(numbers, share, GELU)).to(grad.dtype.element_ty)
        put(grad, opened, row, column, rows, width, width)
        narrow_gate = tl.dot(opened, wide_gate, narrow_gate, input_precision="ieee")
        narrow_up = tl.dot(raised, wide_up, narrow_up, input_precision="ieee")
    partial += tl.program_id(1).to(tl.int64) * rows * (GATE_RANK + UP_RANK)
    put(partial, gate_scale * narrow_gate, row, rank, rows, GATE_RANK, GATE_RANK + UP_RANK)
    put(partial + GATE_RANK, up_scale * narrow_up, row, rank, rows, UP_RANK, GATE_RANK + UP_RANK)


@triton.jit
def sum_parts_kernel(partial, total, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """total (count) = the sum of partial (PARTS, count) in the order of the parts."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = places < count
    numbers = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in tl.static_range(PARTS):
        numbers += tl.load(partial + places, mask=real, other=0.0)
        partial += count
    tl.store(total + places, numbers.to(total.dtype.element_ty), mask=real)


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
    activation: Activation = "silu"

    @classmethod
    def of(cls, layer: Layer) -> GateAdapters | None:
        """None where gate and up do not both have an adapter of a rank that fits into a tile."""
        gate, up, down = layer.gate.adapter, layer.up.adapter, layer.down.adapter
        if gate is None or up is None or max(gate.rank, up.rank) > MAX_RANKS or layer.activation_kind is None:
            return None
        return cls(gate, up, down if down is not None and down.rank <= MAX_RANKS else None, layer.activation_kind)

    def product(self, gate: Tensor, up: Tensor, thin: Tensor) -> Tensor:
        """(N, I) act(gate) up of base products (N, I) each and of both thin products side by side, (N, R)."""
        rows, width = gate.shape
        padded = self._padded()
        product, tile = torch.empty_like(gate), tiles_for(padded).forward
        blocks = -(-rows // tile["ROWS"]) * -(-width // tile["COLUMNS"])
        if blocks:
            adapted_gate_kernel[(blocks,)](
                gate, up, thin, self.gate.up.contiguous(), self.up.up.contiguous(), product, rows, width,
                self.gate.scaling, self.up.scaling,
                GATE_RANK=self.gate.rank, UP_RANK=self.up.rank, RANKS=padded,
                GELU=self.activation == "gelu_tanh", **tile,
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
                RANKS=padded, AGAIN=product is not None, GELU=self.activation == "gelu_tanh", **tile,
            )  # fmt: skip
            blocks = -(-narrow.numel() // SUM_BLOCK)
            sum_parts_kernel[(blocks,)](partial, narrow, narrow.numel(), PARTS=parts, BLOCK=SUM_BLOCK, num_warps=4)
        return Slopes(grad, grad_up, narrow)

    def _padded(self) -> int:
        """Ranks with the zeros that make tiles wide enough for a product: a power of two, at least 16."""
        most = max(16, self.gate.rank, self.up.rank, 0 if self.down is None else self.down.rank)
        return 1 << (most - 1).bit_length()
