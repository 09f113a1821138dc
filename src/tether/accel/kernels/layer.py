"""Triton kernels for the parts of a layer that only read and write: norms, rotary positions, gates.

Numbers are read in the weights' type, computed in float32, and rounded once where they are written. How many rows there
are differs from batch to batch, so that no kernel is made anew for counts that happen to be multiples of 16.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(x, change, weight, added, normed, inverse, width, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """One token: added = x + change, normed = w added / r, inverse = 1 / r with r = sqrt(mean(added²) + ε)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < width
    numbers = tl.load(x + row * width + columns, mask=real, other=0.0).to(tl.float32)
    if ADDS:
        numbers += tl.load(change + row * width + columns, mask=real, other=0.0).to(tl.float32)
        rounded = numbers.to(added.dtype.element_ty)
        tl.store(added + row * width + columns, rounded, mask=real)
        numbers = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, axis=0) / width + epsilon)
    tl.store(inverse + row, scale)
    factor = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + row * width + columns, (numbers * scale * factor).to(normed.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def add_norm_backward_kernel(
    grad_normed, grad_added, added, weight, inverse, grad_x, grad_weight, rows, width,
    PASSES: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = (g w - u mean(g w u)) / r + what comes past the norm, u = added / r; dw of this program's tokens."""
    columns = tl.arange(0, BLOCK)
    real = columns < width
    factor = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full((), 1, tl.int64) * index
        places = row * width + columns
        scale = tl.load(inverse + row)
        unit = tl.load(added + places, mask=real, other=0.0).to(tl.float32) * scale
        slope = tl.load(grad_normed + places, mask=real, other=0.0).to(tl.float32)
        if WEIGHTS:
            total += slope * unit
        slope *= factor
        result = (slope - unit * (tl.sum(slope * unit, axis=0) / width)) * scale
        if PASSES:
            result += tl.load(grad_added + places, mask=real, other=0.0).to(tl.float32)
        tl.store(grad_x + places, result.to(grad_x.dtype.element_ty), mask=real)
    if WEIGHTS:
        tl.store(grad_weight + tl.program_id(0) * width + columns, total, mask=real)


@triton.jit(do_not_specialize=["rows"])
def column_sum_kernel(numbers, sums, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the columns of a float32 matrix (rows, width); a program has COLUMNS of them, and adds in one order."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        real = (row < rows) & (columns[None, :] < width)
        total += tl.load(numbers + row * width + columns[None, :], mask=real, other=0.0)
    tl.store(sums + columns, tl.sum(total, axis=0), mask=columns < width)


@triton.jit
def turn_heads(x, cos, sin, row, heads, way, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """One token's heads in place: pairs (i, i + D/2) turned by the token's angles, forward or (way = -1) back."""
    head, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    known = column < HALF
    real = (head < heads) & known
    places = x + (row * heads + head) * (2 * HALF) + column
    first = tl.load(places, mask=real, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=real, other=0.0).to(tl.float32)
    angle = row * (2 * HALF) + column  # both halves of the table are alike
    cosine = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32) * way
    tl.store(places, (first * cosine - second * sine).to(x.dtype.element_ty), mask=real)
    tl.store(places + HALF, (second * cosine + first * sine).to(x.dtype.element_ty), mask=real)


@triton.jit
def rotate_kernel(
    query, key, cos, sin, query_heads, key_heads, way,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's queries (program 0 of the second axis) or keys (program 1) turned in place."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        turn_heads(query, cos, sin, row, query_heads, way, HALF, HALF_BLOCK, QUERY_BLOCK)
    else:
        turn_heads(key, cos, sin, row, key_heads, way, HALF, HALF_BLOCK, KEY_BLOCK)


@triton.jit
def gate_kernel(gate, up, product, count, BLOCK: tl.constexpr):
    """product = silu(gate) up."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = places < count
    numbers = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
    other = tl.load(up + places, mask=real, other=0.0).to(tl.float32)
    result = numbers * tl.sigmoid(numbers) * other
    tl.store(product + places, result.to(product.dtype.element_ty), mask=real)


@triton.jit
def gate_backward_kernel(gate, up, grad, product, grad_up, count, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    """d gate (in place of `grad`) and d up of product = silu(gate) up; with AGAIN, the product itself once more.

    `product` and `grad_up` may be `gate` and `up` themselves.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = places < count
    numbers = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
    other = tl.load(up + places, mask=real, other=0.0).to(tl.float32)
    slope = tl.load(grad + places, mask=real, other=0.0).to(tl.float32)
    share = tl.sigmoid(numbers)
    silu = numbers * share
    if AGAIN:
        tl.store(product + places, (silu * other).to(product.dtype.element_ty), mask=real)
    tl.store(grad_up + places, (slope * silu).to(grad_up.dtype.element_ty), mask=real)
    bent = share * (1.0 + numbers * (1.0 - share))
    tl.store(grad + places, (slope * other * bent).to(grad.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["count", "skipped"], do_not_specialize_on_alignment=["ids", "order"])
def add_rows_kernel(
    ids, order, rows, total, count, width, skipped, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """total[id] += sum of rows[order] over a run of equal ids, which are sorted; `skipped` gets nothing.

    Axis 0 is the place where a run may start: all others have nothing to do. A run is added in one order.
    """
    first = tl.program_id(0)
    token = tl.load(ids + first)
    before = tl.load(ids + first - 1, mask=first > 0, other=-1)
    if (before == token) | (token == skipped):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < width
    sums = tl.zeros([COLUMNS], dtype=tl.float32)
    start, goes_on = first, first < count
    while goes_on:
        for place in tl.static_range(0, ROWS):  # asked for together, added one after another
            own = tl.load(ids + start + place, mask=start + place < count, other=-1) == token
            row = tl.load(order + start + place, mask=own, other=0)
            sums += tl.load(rows + row * width + columns, mask=own & real, other=0.0).to(tl.float32)
        start += ROWS
        goes_on = tl.load(ids + start, mask=start < count, other=-1) == token
    places = total + token * width + columns
    known = tl.load(places, mask=real, other=0.0).to(tl.float32)
    tl.store(places, (known + sums).to(total.dtype.element_ty), mask=real)
