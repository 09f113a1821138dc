"""Causal attention over many short rows laid end to end, forward and backward, by Triton kernels. No autograd.

Flash attention is made for long rows: its backward pass leaves a gradient of keys and values for each query head, to be
summed afterwards, and sums those of queries through memory. Where rows are short and many, programs enough to fill a
device can each own what they write: a block of queries with all their keys, or a block of keys with all the queries
that see it, of every head that shares it (`row_attention_kernels.py`). Nothing is summed afterwards, no two programs
add to one number, and the same inputs give the same bits.
"""

# pyright: reportIndexIssue=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tether.accel.kernels.attention import forward_kernel, grad_key_kernel, grad_query_kernel
from tether.ops.masks import Packing, Rows

SHORT_ROWS = True  # whether these kernels are used at all
MAX_LENGTH = 512  # tokens in a row; above, flash attention is good
LEAST_PROGRAMS = 96  # programs that share the gradient of keys; fewer leave most of a device idle
WIDTHS = (16, 32, 64, 128)  # of a head
HOPPER = 9  # the major number of the devices that the tiles were chosen on


class Tile(NamedTuple):
    """The blocks a kernel works on; stacked queries are those of all heads that share a key head."""

    queries: int  # stacked, in a block
    keys: int  # in a block
    warps: int
    stages: int  # blocks that are held at once: the one worked on, and those that are being read

    def options(self) -> dict[str, Any]:
        """As a kernel takes them."""
        return {"QUERIES": self.queries, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class AttentionTiles(NamedTuple):
    """A tile for each kernel."""

    forward: Tile
    grad_query: Tile
    grad_key: Tile


# By the width of a head, 64 standing for all up to it; the fastest of those that docs/log.md lists, on an H200.
TILES = {
    64: AttentionTiles(forward=Tile(64, 64, 4, 3), grad_query=Tile(64, 32, 4, 3), grad_key=Tile(64, 64, 4, 3)),
    128: AttentionTiles(forward=Tile(64, 64, 4, 3), grad_query=Tile(64, 64, 4, 2), grad_key=Tile(32, 128, 8, 3)),
}


def usable(query: Tensor, key: Tensor, packing: Packing, rows: Rows | None) -> bool:
    """Whether these kernels take the place of flash attention: the one place where that is decided.

    It depends on nothing but shapes, types and the device, so that a backward pass decides as its forward pass did.
    """
    if not SHORT_ROWS or not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if rows is not None and rows.starts is None:  # causality is counted from the ends of queries and keys
        return False
    if query.shape[2] not in WIDTHS or query.shape[1] % key.shape[1] or packing.longest > MAX_LENGTH:
        return False
    programs = _pairs(key, packing) * -(-packing.longest // tiles_for(query).grad_key.keys)
    return programs >= LEAST_PROGRAMS and torch.cuda.get_device_capability(query.device)[0] == HOPPER


def tiles_for(query: Tensor) -> AttentionTiles:
    """The tiles for heads of queries (n, heads, D)."""
    return TILES[max(64, query.shape[2])]


def forward(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """`(mixed, lse)`: (n, heads * D), and fp32 (kv heads, n * heads / kv heads), the logarithms of softmax sums.

    Queries (n, heads, D) are those of all tokens, or those of `rows`, which end their rows; keys and values are
    (N, kv heads, D).
    """
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    starts, most = _asking(packing, rows)
    shape, tile = _shape(query, key), tiles_for(query).forward
    mixed = torch.empty_like(query)
    lse = query.new_empty(shape["KEY_HEADS"], len(query) * shape["GROUP"], dtype=torch.float32)
    grid = (_pairs(key, packing), -(-most * shape["GROUP"] // tile.queries))
    if all(grid):
        forward_kernel[grid](
            query, key, value, mixed, lse, starts, packing.starts, len(query), scaling, **shape, **tile.options()
        )  # fmt: skip
    return mixed.flatten(1), lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    lse: Tensor,
    packing: Packing,
    rows: Rows | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(d query, d key, d value)` from the gradient (n, heads * D) of what `forward` gave."""
    starts, most = _asking(packing, rows)
    shape, tiles, grad = _shape(query, key), tiles_for(query), grad.contiguous()
    of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
    shifts = lse.new_empty(*lse.shape, 4)  # what the gradient of keys is computed from beside its inputs
    grid = (_pairs(key, packing), -(-most * shape["GROUP"] // tiles.grad_query.queries))
    if all(grid):
        grad_query_kernel[grid](
            grad, query, key, value, mixed, lse, of_query, shifts, starts, packing.starts, len(query), scaling,
            **shape, **tiles.grad_query.options(),
        )  # fmt: skip
    grid = (_pairs(key, packing), -(-packing.longest // tiles.grad_key.keys))
    if all(grid):
        grad_key_kernel[grid](
            grad, query, key, value, shifts, of_key, of_value, starts, packing.starts, len(query), scaling,
            **shape, **tiles.grad_key.options(),
        )  # fmt: skip
    return of_query, of_key, of_value


def _asking(packing: Packing, rows: Rows | None) -> tuple[Tensor, int]:
    """`(where each row's queries start, the most queries of a row)`."""
    if rows is None:
        return packing.starts, packing.longest
    assert rows.starts is not None
    return rows.starts, rows.most


def _pairs(key: Tensor, packing: Packing) -> int:
    """Rows times key heads."""
    return (len(packing.starts) - 1) * key.shape[1]


def _shape(query: Tensor, key: Tensor) -> dict[str, Any]:
    """What of a model a kernel is made for."""
    return {"KEY_HEADS": key.shape[1], "GROUP": query.shape[1] // key.shape[1], "WIDTH": query.shape[2]}
