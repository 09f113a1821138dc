"""Causal attention over rows laid end to end, forward and backward, for short rows and for capped scores. No autograd.

Flash attention is made for long rows: its backward pass leaves a gradient of keys and values for each query head, to be
summed afterwards, and sums those of queries through memory. Where rows are short and many, programs enough to fill a
device can each own what they write: a block of queries with all their keys, or a block of keys with all the queries
that see it, of every head that shares it. Nothing is summed afterwards, no two programs add to one number, and the same
inputs give the same bits. Flash attention has no cap on scores, which these kernels have, for rows of any length.

The query heads that share a key head are stacked: the queries of a row's tokens for that key head stand in memory as
tokens x GROUP vectors, token after token, and are cut into blocks as if they were one longer row of queries. So a block
multiplies the keys once for all its heads, and no sum over heads is left for afterwards. Stacked query m is token m //
GROUP of those that ask; these are the last of their row, so that it stands at position length - asks + m // GROUP and
sees the keys up to there.

Every number is written by one program, which adds in one order: the same bits each time. Numbers are multiplied in the
type they are given in, summed in float32, and rounded where they are written or multiplied again. Exponentials and
logarithms have base 2, `scale` (the softmax's own) being multiplied by log2(e) here.

With LIMIT = cap / scale, a product q·k becomes LIMIT tanh(q·k / LIMIT), so that scale times it is the capped score; its
slope is 1 - tanh². With WINDOW a query sees the last WINDOW keys up to its own. Both are 0 where a model has neither.

Programs are numbered from those with the most work to those with the least. Axis 0 is the pair of row and key head.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.accel.spec import Layer
from tether.ops.masks import Packing, Rows

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
SHORT_ROWS = True  # whether these kernels take the place of flash attention where they are faster
MAX_LENGTH = 512  # tokens in a row; above, flash attention is good
LEAST_PROGRAMS = 96  # programs that share the gradient of keys; fewer leave most of a device idle
WIDTHS = (16, 32, 64, 128)  # of a head
HOPPER = 9  # the major number of the devices that the tiles were chosen on


@triton.jit
def span(starts, row):
    """`(first token, number of tokens)` of a row."""
    first = tl.load(starts + row)
    return first, tl.load(starts + row + 1) - first


@triton.jit
def stacked_places(index, GROUP: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Where stacked queries (M,) stand from a row's first one for its key head on: (M, WIDTH)."""
    vector = index // GROUP * (KEY_HEADS * GROUP) + index % GROUP
    return vector[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def key_tile(matrix, key, length, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """(N, WIDTH) the given keys (N,) of a row and head, or values; 0 after the row's end."""
    places = matrix + key[:, None] * (KEY_HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    return tl.load(places, mask=key[:, None] < length, other=0.0)


@triton.jit
def keys_seen(end, asks, length, GROUP: tl.constexpr):
    """How many keys of a row the stacked queries before `end` see."""
    return tl.minimum(length, length - asks + (end - 1) // GROUP + 1)


@triton.jit
def first_seen(begin, asks, length, GROUP: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """The start of the first block of keys that stacked queries from `begin` on see in their windows."""
    return tl.maximum(length - asks + begin // GROUP - WINDOW + 1, 0) // KEYS * KEYS


@triton.jit
def limited(scores, LIMIT: tl.constexpr):
    """LIMIT tanh(scores / LIMIT); tanh s = 2 sigmoid(2 s) - 1."""
    return LIMIT * (2.0 * tl.sigmoid(scores * (2.0 / LIMIT)) - 1.0)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["query_starts", "starts"])
def forward_kernel(
    query, key, value, mixed, lse, query_starts, starts, tokens, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr = 0, LIMIT: tl.constexpr = 0.0,
):  # fmt: skip
    """A block of stacked queries: mixed = softmax(scale q K^T) V, and lse, the base-2 logarithm of the softmax's sum.

    query and mixed are (tokens, heads, WIDTH), key and value (N, KEY_HEADS, WIDTH), lse is (KEY_HEADS, tokens * GROUP).
    """
    row, head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    first_query, asks = span(query_starts, row)
    first_key, length = span(starts, row)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    if begin >= asks * GROUP:
        return
    index = begin + tl.arange(0, QUERIES)
    real = (index < asks * GROUP)[:, None]
    start = (first_query.to(tl.int64) * KEY_HEADS + head) * (GROUP * WIDTH)
    places = start + stacked_places(index, GROUP, KEY_HEADS, WIDTH)
    offset = (first_key.to(tl.int64) * KEY_HEADS + head) * WIDTH
    asking = tl.load(query + places, mask=real, other=0.0)
    position = length - asks + index // GROUP
    total = tl.zeros([QUERIES, WIDTH], dtype=tl.float32)
    most = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([QUERIES], dtype=tl.float32)
    start_key = 0
    if WINDOW > 0:
        start_key = first_seen(begin, asks, length, GROUP, KEYS, WINDOW)
    for first in tl.range(start_key, keys_seen(begin + QUERIES, asks, length, GROUP), KEYS):
        seen = first + tl.arange(0, KEYS)
        scores = tl.dot(asking, tl.trans(key_tile(key + offset, seen, length, KEY_HEADS, WIDTH)))
        if LIMIT > 0.0:
            scores = limited(scores, LIMIT)
        scores = tl.where(seen[None, :] <= position[:, None], scores, float("-inf"))
        if WINDOW > 0:
            scores = tl.where(seen[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1) * (scale * LOG2_E))
        if WINDOW > 0:  # a query that sees no key of this block has no score yet, and -inf - -inf is no number
            higher = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores * (scale * LOG2_E) - higher[:, None])
        fading = tl.exp2(most - higher)
        values = key_tile(value + offset, seen, length, KEY_HEADS, WIDTH)
        total = tl.dot(shares.to(values.dtype), values, total * fading[:, None])
        sums = sums * fading + tl.sum(shares, axis=1)
        most = higher
    if WINDOW > 0:  # a vector past the last query may see no key at all
        sums = tl.where(sums == 0.0, 1.0, sums)
    tl.store(mixed + places, (total / sums[:, None]).to(mixed.dtype.element_ty), mask=real)
    own = (tokens * head.to(tl.int64) + first_query) * GROUP + index
    tl.store(lse + own, most + tl.log2(sums), mask=index < asks * GROUP)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["query_starts", "starts"])
def grad_query_kernel(
    grad, query, key, value, mixed, lse, grad_query, shifts, query_starts, starts, tokens, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr = 0, LIMIT: tl.constexpr = 0.0,
):  # fmt: skip
    """A block of stacked queries: dq = scale sum of ds k, and shifts, lse and delta together, for the keys' kernel.

    ds = p (do v^T - delta), p = 2^(scale q k^T - lse) being the softmax again, and delta = sum of (d mixed) mixed.

    shifts are (KEY_HEADS, tokens * GROUP, 4), of which the second and the last are never used: a block that has no
    fewer numbers than there are threads is read by each thread once, while a smaller one would be read by every thread
    that needs it.
    """
    row, head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    first_query, asks = span(query_starts, row)
    first_key, length = span(starts, row)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    if begin >= asks * GROUP:
        return
    index = begin + tl.arange(0, QUERIES)
    real = index < asks * GROUP
    start = (first_query.to(tl.int64) * KEY_HEADS + head) * (GROUP * WIDTH)
    places = start + stacked_places(index, GROUP, KEY_HEADS, WIDTH)
    own = (tokens * head.to(tl.int64) + first_query) * GROUP + index
    offset = (first_key.to(tl.int64) * KEY_HEADS + head) * WIDTH
    grads = tl.load(grad + places, mask=real[:, None], other=0.0)
    found = tl.load(mixed + places, mask=real[:, None], other=0.0)
    delta = tl.sum(grads.to(tl.float32) * found.to(tl.float32), axis=1)
    asking = tl.load(query + places, mask=real[:, None], other=0.0)
    normaliser = tl.load(lse + own, mask=real, other=0.0)
    pairs = shifts + own[:, None] * 4 + tl.arange(0, 2)[None, :] * 2
    tl.store(pairs, tl.join(normaliser, delta), mask=real[:, None])
    position = length - asks + index // GROUP
    total = tl.zeros([QUERIES, WIDTH], dtype=tl.float32)
    start_key = 0
    if WINDOW > 0:
        start_key = first_seen(begin, asks, length, GROUP, KEYS, WINDOW)
    for first in tl.range(start_key, keys_seen(begin + QUERIES, asks, length, GROUP), KEYS):
        seen = first + tl.arange(0, KEYS)
        keys = key_tile(key + offset, seen, length, KEY_HEADS, WIDTH)
        values = key_tile(value + offset, seen, length, KEY_HEADS, WIDTH)
        products = tl.dot(asking, tl.trans(keys))
        if LIMIT > 0.0:
            products = limited(products, LIMIT)
        scores = products * (scale * LOG2_E) - normaliser[:, None]
        if WINDOW > 0:
            scores = tl.where(seen[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        shares = tl.exp2(tl.where(seen[None, :] <= position[:, None], scores, float("-inf")))
        slopes = shares * (tl.dot(grads, tl.trans(values)) - delta[:, None])
        if LIMIT > 0.0:
            slopes *= 1.0 - (products / LIMIT) * (products / LIMIT)
        total = tl.dot(slopes.to(keys.dtype), keys, total)
    tl.store(grad_query + places, (total * scale).to(grad_query.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["query_starts", "starts"])
def grad_key_kernel(
    grad, query, key, value, shifts, grad_key, grad_value, query_starts, starts, tokens, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr = 0, LIMIT: tl.constexpr = 0.0,
):  # fmt: skip
    """A block of keys and values: dk = scale sum of ds^T q, dv = sum of p^T do, over all queries that see them.

    Each key is seen from its `earliest` stacked query on. Past the last of all, `count`, vectors are read as 0, which
    add nothing.
    """
    row, head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    first_query, asks = span(query_starts, row)
    first_key, length = span(starts, row)
    begin = tl.program_id(1) * KEYS
    if begin >= length:
        return
    index = begin + tl.arange(0, KEYS)
    offset = (first_key.to(tl.int64) * KEY_HEADS + head) * WIDTH
    start = (first_query.to(tl.int64) * KEY_HEADS + head) * (GROUP * WIDTH)
    own = (tokens * head.to(tl.int64) + first_query) * (GROUP * 4)
    keys = key_tile(key + offset, index, length, KEY_HEADS, WIDTH)
    values = key_tile(value + offset, index, length, KEY_HEADS, WIDTH)
    total_key = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    total_value = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    before, count = length - asks, asks * GROUP  # tokens that do not ask, and stacked queries
    earliest = (index - before) * GROUP
    last = count
    if WINDOW > 0:  # the block's last key is seen up to WINDOW - 1 tokens later
        last = tl.minimum(count, tl.maximum(begin + KEYS + WINDOW - 1 - before, 0) * GROUP)
    for first in tl.range(tl.maximum((begin - before) * GROUP, 0), last, QUERIES):
        stacked = first + tl.arange(0, QUERIES)
        real = (stacked < count)[:, None]
        places = start + stacked_places(stacked, GROUP, KEY_HEADS, WIDTH)
        asking = tl.load(query + places, mask=real, other=0.0)
        grads = tl.load(grad + places, mask=real, other=0.0)
        fours = tl.load(shifts + own + stacked[:, None] * 4 + tl.arange(0, 4)[None, :], mask=real, other=0.0)
        pairs, _ = tl.split(tl.reshape(fours, [QUERIES, 2, 2]))
        normaliser, delta = tl.split(pairs)
        products = tl.dot(keys, tl.trans(asking))
        if LIMIT > 0.0:
            products = limited(products, LIMIT)
        scores = products * (scale * LOG2_E) - normaliser[None, :]
        if WINDOW > 0:
            scores = tl.where(stacked[None, :] < earliest[:, None] + WINDOW * GROUP, scores, float("-inf"))
        shares = tl.exp2(tl.where(earliest[:, None] <= stacked[None, :], scores, float("-inf")))
        # Before the product that is waited for at once, so that the device has both to do meanwhile.
        total_value = tl.dot(shares.to(grads.dtype), grads, total_value)
        slopes = shares * (tl.dot(values, tl.trans(grads)) - delta[None, :])
        if LIMIT > 0.0:
            slopes *= 1.0 - (products / LIMIT) * (products / LIMIT)
        total_key = tl.dot(slopes.to(asking.dtype), asking, total_key)
    places = offset + index[:, None] * (KEY_HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    written = index[:, None] < length
    tl.store(grad_key + places, (total_key * scale).to(grad_key.dtype.element_ty), mask=written)
    tl.store(grad_value + places, total_value.to(grad_value.dtype.element_ty), mask=written)


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


# By the width of a head, 64 standing for all up to it; the fastest of those that docs/log.md lists, on an H200. Those
# for 256 are chosen to fit shared memory and registers, and were not measured.
TILES = {
    64: AttentionTiles(forward=Tile(64, 64, 4, 3), grad_query=Tile(64, 32, 4, 3), grad_key=Tile(64, 64, 4, 3)),
    128: AttentionTiles(forward=Tile(64, 64, 4, 3), grad_query=Tile(64, 64, 4, 2), grad_key=Tile(32, 128, 8, 3)),
    256: AttentionTiles(forward=Tile(64, 32, 8, 2), grad_query=Tile(64, 32, 8, 2), grad_key=Tile(32, 32, 8, 2)),
}


def usable(query: Tensor, key: Tensor, packing: Packing, rows: Rows | None) -> bool:
    """Whether these kernels take the place of flash attention where scores have no cap: decided here alone.

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
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, layer: Layer
) -> tuple[Tensor, Tensor]:
    """`(mixed, lse)`: (n, heads * D), and fp32 (kv heads, n * heads / kv heads), the logarithms of softmax sums.

    Queries (n, heads, D) are those of all tokens, or those of `rows`, which end their rows; keys and values are
    (N, kv heads, D).
    """
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    starts, most = _asking(packing, rows)
    shape, tile = _shape(query, key, packing, layer), tiles_for(query).forward
    mixed = torch.empty_like(query)
    lse = query.new_empty(shape["KEY_HEADS"], len(query) * shape["GROUP"], dtype=torch.float32)
    grid = (_pairs(key, packing), -(-most * shape["GROUP"] // tile.queries))
    if all(grid):
        forward_kernel[grid](
            query, key, value, mixed, lse, starts, packing.starts, len(query), layer.scaling, **shape, **tile.options()
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
    layer: Layer,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(d query, d key, d value)` from the gradient (n, heads * D) of what `forward` gave."""
    starts, most = _asking(packing, rows)
    shape, tiles, grad = _shape(query, key, packing, layer), tiles_for(query), grad.contiguous()
    of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
    shifts = lse.new_empty(*lse.shape, 4)  # what the gradient of keys is computed from beside its inputs
    grid = (_pairs(key, packing), -(-most * shape["GROUP"] // tiles.grad_query.queries))
    if all(grid):
        grad_query_kernel[grid](
            grad, query, key, value, mixed, lse, of_query, shifts, starts, packing.starts, len(query), layer.scaling,
            **shape, **tiles.grad_query.options(),
        )  # fmt: skip
    grid = (_pairs(key, packing), -(-packing.longest // tiles.grad_key.keys))
    if all(grid):
        grad_key_kernel[grid](
            grad, query, key, value, shifts, of_key, of_value, starts, packing.starts, len(query), layer.scaling,
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


def _shape(query: Tensor, key: Tensor, packing: Packing, layer: Layer) -> dict[str, Any]:
    """What of a model a kernel is made for."""
    window = layer.window if layer.window is not None and layer.window < packing.longest else 0
    limit = 0.0 if layer.score_cap is None else layer.score_cap / layer.scaling
    sizes = {"KEY_HEADS": key.shape[1], "GROUP": query.shape[1] // key.shape[1], "WIDTH": query.shape[2]}
    return {**sizes, "WINDOW": window, "LIMIT": limit}
