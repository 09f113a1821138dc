"""Triton kernels for the gates of layers with adapters: what the adapters add never goes through memory.

Gate and up are base products, g and u, of (rows, width) each; thin products (rows, rank) and B (width, rank) are small
enough to be multiplied in every tile that is read anyway. Numbers are read in the weights' type, multiplied in it,
summed in float32, and rounded once where they are written. Ranks are padded with zeros.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


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
):  # fmt: skip
    """One tile of product = silu(g + s t_g B_g^T) (u + s t_u B_u^T); `thin` holds t_g and t_u side by side."""
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
    result = opened * tl.sigmoid(opened) * raised
    put(product, result.to(product.dtype.element_ty), row, column, rows, width, width)


@triton.jit(do_not_specialize=["rows"])
def adapted_gate_backward_kernel(
    gate, up, grad, thin, gate_b, up_b, narrow_down, down_a, product, grad_up, partial,
    rows, width, span, gate_scale, up_scale,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DOWN_RANK: tl.constexpr, RANKS: tl.constexpr,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
        share = tl.sigmoid(numbers)
        silu = numbers * share
        if AGAIN:
            put(product, (silu * other).to(product.dtype.element_ty), row, column, rows, width, width)
        raised = (slope * silu).to(grad_up.dtype.element_ty)
        put(grad_up, raised, row, column, rows, width, width)
        opened = (slope * other * share * (1.0 + numbers * (1.0 - share))).to(grad.dtype.element_ty)
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
