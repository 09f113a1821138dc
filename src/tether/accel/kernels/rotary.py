"""Rotary positions on queries and keys, in place. No autograd."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tether.accel.kernels.norm import power_of_two


@triton.jit
def turn_heads(x, cos, sin, row, heads, direction, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """One token's heads in place: pairs (i, i + D/2) turned by the token's angles, forward or (direction = -1) back."""
    head, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    known = column < HALF
    real = (head < heads) & known
    places = x + (row * heads + head) * (2 * HALF) + column
    first = tl.load(places, mask=real, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=real, other=0.0).to(tl.float32)
    angle = row * (2 * HALF) + column  # both halves of the table are alike
    cosine = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32) * direction
    tl.store(places, (first * cosine - second * sine).to(x.dtype.element_ty), mask=real)
    tl.store(places + HALF, (second * cosine + first * sine).to(x.dtype.element_ty), mask=real)


@triton.jit
def rotate_kernel(
    query, key, cos, sin, query_heads, key_heads, direction,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's queries (program 0 of the second axis) or keys (program 1) turned in place."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        turn_heads(query, cos, sin, row, query_heads, direction, HALF, HALF_BLOCK, QUERY_BLOCK)
    else:
        turn_heads(key, cos, sin, row, key_heads, direction, HALF, HALF_BLOCK, KEY_BLOCK)


def rotate(
    query: Tensor, key: Tensor, asked: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], direction: float
) -> None:
    """Turn queries (n, heads, D) and keys (N, kv heads, D) in place: pairs (i, i + D/2) by their tokens' angles.

    `asked` and `angles` are cos and sin, (n, D) and (N, D) each; `direction` is 1, or -1 to turn back.
    """
    assert query.is_contiguous() and key.is_contiguous()
    half, (heads, key_heads) = query.shape[2] // 2, (query.shape[1], key.shape[1])
    sizes = {
        "HALF": half,
        "HALF_BLOCK": power_of_two(half),
        "QUERY_BLOCK": power_of_two(heads),
        "KEY_BLOCK": power_of_two(key_heads),
        "num_warps": 4,
    }
    if len(query) == len(key):
        if len(query):
            rotate_kernel[(len(query), 2)](query, key, *angles, heads, key_heads, direction, **sizes)
        return
    if len(query):
        rotate_kernel[(len(query), 1)](query, query, *asked, heads, heads, direction, **sizes)
    if len(key):
        sizes["QUERY_BLOCK"] = sizes["KEY_BLOCK"]
        rotate_kernel[(len(key), 1)](key, key, *angles, key_heads, key_heads, direction, **sizes)
