"""Norms, rotary positions, gates and gathered rows by Triton kernels: each reads its inputs once. No autograd."""

# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
from torch import Tensor

from tether.accel.kernels.layer import (
    add_norm_backward_kernel,
    add_norm_kernel,
    add_rows_kernel,
    column_sum_kernel,
    gate_backward_kernel,
    gate_kernel,
    rotate_kernel,
)

GATE_BLOCK = 4096  # numbers that one program of the gates' kernels reads
ROW_COLUMNS = 256  # of a row that one program adds up
NORM_PROGRAMS = 132 * 4  # programs of the norm's backward pass, each with a partial gradient of its weight


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """`(x + change, its RMS norm, 1 / its root mean square)`: (N, H) twice, and fp32 (N,)."""
    rows, width = x.shape
    x = x.contiguous()
    adds = change is not None
    added = torch.empty_like(x) if adds else x
    normed = torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        add_norm_kernel[(rows,)](
            x, change.contiguous() if change is not None else x, weight, added, normed, inverse, width, epsilon,
            ADDS=adds, BLOCK=_power_of_two(width), num_warps=_warps(width),
        )  # fmt: skip
    return added, normed, inverse


def add_norm_backward(
    grad_normed: Tensor, past: Tensor | None, added: Tensor, weight: Tensor, inverse: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """`(d added, parts of d weight)` from the norm's gradient, and from `past`, that of `added` by another way.

    The parts, fp32 (parts, H), are what `column_sums` sums.
    """
    rows, width = added.shape
    programs = min(rows, NORM_PROGRAMS)
    partial = torch.empty(programs if learns else 0, width, dtype=torch.float32, device=added.device)
    grad = torch.empty_like(added)
    if rows:
        add_norm_backward_kernel[(programs,)](
            grad_normed.contiguous(), grad_normed if past is None else past, added, weight, inverse, grad, partial,
            rows, width, PASSES=past is not None, WEIGHTS=learns, BLOCK=_power_of_two(width), num_warps=_warps(width),
        )  # fmt: skip
    return grad, partial if learns else None


def column_sums(numbers: Tensor) -> Tensor:
    """(width,) the sums of fp32 numbers (rows, width)."""
    rows, width = numbers.shape
    sums = torch.empty(width, dtype=torch.float32, device=numbers.device)
    column_sum_kernel[(-(-width // 32),)](numbers, sums, rows, width, ROWS=128, COLUMNS=32, num_warps=4)
    return sums


def rotate(query: Tensor, key: Tensor, asked: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], way: float) -> None:
    """Turn queries (n, heads, D) and keys (N, kv heads, D) in place: pairs (i, i + D/2) by their tokens' angles.

    `asked` and `angles` are cos and sin, (n, D) and (N, D) each; `way` is 1, or -1 to turn back.
    """
    assert query.is_contiguous() and key.is_contiguous()
    half, (heads, key_heads) = query.shape[2] // 2, (query.shape[1], key.shape[1])
    sizes = {
        "HALF": half,
        "HALF_BLOCK": _power_of_two(half),
        "QUERY_BLOCK": _power_of_two(heads),
        "KEY_BLOCK": _power_of_two(key_heads),
        "num_warps": 4,
    }
    if len(query) == len(key):
        if len(query):
            rotate_kernel[(len(query), 2)](query, key, *angles, heads, key_heads, way, **sizes)
        return
    if len(query):
        rotate_kernel[(len(query), 1)](query, query, *asked, heads, heads, way, **sizes)
    if len(key):
        sizes["QUERY_BLOCK"] = sizes["KEY_BLOCK"]
        rotate_kernel[(len(key), 1)](key, key, *angles, key_heads, key_heads, way, **sizes)


def gate(opened: Tensor, up: Tensor) -> Tensor:
    """silu(opened) * up."""
    product = torch.empty_like(opened)
    if opened.numel():
        grid = (-(-opened.numel() // GATE_BLOCK),)
        gate_kernel[grid](opened, up, product, opened.numel(), BLOCK=GATE_BLOCK, num_warps=8)
    return product


def gate_backward(opened: Tensor, up: Tensor, grad: Tensor, product: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(d opened, d up)`; `grad` is overwritten, and `product`, where there is one, filled with silu(opened) * up."""
    grad_up = torch.empty_like(up)
    if opened.numel():
        gate_backward_kernel[(-(-opened.numel() // GATE_BLOCK),)](
            opened, up, grad, opened if product is None else product, grad_up, opened.numel(),
            AGAIN=product is not None, BLOCK=GATE_BLOCK, num_warps=8,
        )  # fmt: skip
    return grad, grad_up


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


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _warps(width: int) -> int:
    """Warps for a row of so many numbers."""
    return max(1, min(16, _power_of_two(width) // 512))
