"""RMS norms, forward and backward, and the sums over rows that gradients of norms and embeddings need. No autograd.

Numbers are read in the weights' type, computed in float32, and rounded once where they are written. How many rows there
are differs from batch to batch, so that no kernel is made anew for counts that happen to be multiples of 16.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.accel.spec import Norm

ROW_COLUMNS = 256  # of a row that one program adds up
NORM_PROGRAMS = 132 * 4  # programs of the norm's backward pass, each with a partial gradient of its weight


@triton.jit
def add_norm_kernel(
    x, change, weight, added, normed, inverse, width, epsilon,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr = 0.0,
):  # fmt: skip
    """One token: added = x + change, normed = (OFFSET + w) added / r, inverse = 1 / r, r = sqrt(mean(added²) + ε)."""
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
    if OFFSET != 0.0:
        factor += OFFSET
    tl.store(normed + row * width + columns, (numbers * scale * factor).to(normed.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def add_norm_backward_kernel(
    grad_normed, grad_added, added, weight, inverse, grad_x, grad_weight, rows, width,
    PASSES: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr = 0.0,
):  # fmt: skip
    """dx = (g f - u mean(g f u)) / r + what comes past the norm, f = OFFSET + w, u = added / r; dw of these tokens."""
    columns = tl.arange(0, BLOCK)
    real = columns < width
    factor = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        factor += OFFSET
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


def add_norm(x: Tensor, change: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """`(x + change, its RMS norm, 1 / its root mean square)`: (N, H) twice, and fp32 (N,)."""
    rows, width = x.shape
    x = x.contiguous()
    adds = change is not None
    added = torch.empty_like(x) if adds else x
    normed = torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        add_norm_kernel[(rows,)](
            x, x if change is None else change.contiguous(), norm.weight, added, normed, inverse, width, norm.epsilon,
            ADDS=adds, BLOCK=power_of_two(width), OFFSET=norm.offset, num_warps=_warps(width),
        )  # fmt: skip
    return added, normed, inverse


def add_norm_backward(
    grad_normed: Tensor, past: Tensor | None, added: Tensor, norm: Norm, inverse: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`(d added, parts of d weight)` from the norm's gradient, and from `past`, the gradient that goes past the norm.

    The parts, fp32 (parts, H), are what `column_sums` sums; None where the weight is not trained.
    """
    rows, width = added.shape
    learns = norm.weight.requires_grad
    programs = min(rows, NORM_PROGRAMS)
    partial = torch.empty(programs if learns else 0, width, dtype=torch.float32, device=added.device)
    grad = torch.empty_like(added)
    if rows:
        add_norm_backward_kernel[(programs,)](
            grad_normed.contiguous(), grad_normed if past is None else past, added, norm.weight, inverse, grad, partial,
            rows, width, PASSES=past is not None, WEIGHTS=learns, BLOCK=power_of_two(width), OFFSET=norm.offset,
            num_warps=_warps(width),
        )  # fmt: skip
    return grad, partial if learns else None


def column_sums(numbers: Tensor) -> Tensor:
    """(width,) the sums of fp32 numbers (rows, width)."""
    rows, width = numbers.shape
    sums = torch.empty(width, dtype=torch.float32, device=numbers.device)
    column_sum_kernel[(-(-width // 32),)](numbers, sums, rows, width, ROWS=128, COLUMNS=32, num_warps=4)
    return sums


def add_rows(total: Tensor, ids: Tensor, rows: Tensor, skipped: int) -> None:
    """total[ids[i]] += rows[i] for total (V, H), ids (N,) and rows (N, H), but for the id that is skipped.

    Each sum is made in float32 and always in one order, that of the rows.
    """
    assert total.is_contiguous()
    count, width = rows.shape
    if count:
        ids, order = ids.sort(stable=True)
        add_rows_kernel[(count, -(-width // ROW_COLUMNS))](
            ids, order, rows.contiguous(), total, count, width, skipped, ROWS=8, COLUMNS=ROW_COLUMNS, num_warps=1
        )


def power_of_two(n: int) -> int:
    """The next one from n on."""
    return 1 << (n - 1).bit_length()


def _warps(width: int) -> int:
    """Warps for a row of so many numbers."""
    return max(1, min(16, power_of_two(width) // 512))
