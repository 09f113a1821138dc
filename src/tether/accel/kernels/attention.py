"""Triton kernels for causal attention over short rows laid end to end, forward and backward.

The query heads that share a key head are stacked: the queries of a row's tokens for that key head stand in memory as
tokens x GROUP vectors, token after token, and are cut into blocks as if they were one longer row of queries. So a block
multiplies the keys once for all its heads, and no sum over heads is left for afterwards. Stacked query m is token m //
GROUP of those that ask; these are the last of their row, so that it stands at position length - asks + m // GROUP and
sees the keys up to there.

Every number is written by one program, which adds in one order: the same bits each time. Numbers are multiplied in the
type they are given in, summed in float32, and rounded where they are written or multiplied again. Exponentials and
logarithms have base 2, `scale` (the softmax's own) being multiplied by log2(e) here.

Programs are numbered from those with the most work to those with the least. Axis 0 is the pair of row and key head.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


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


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["query_starts", "starts"])
def forward_kernel(
    query, key, value, mixed, lse, query_starts, starts, tokens, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
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
    for first in tl.range(0, keys_seen(begin + QUERIES, asks, length, GROUP), KEYS):
        seen = first + tl.arange(0, KEYS)
        scores = tl.dot(asking, tl.trans(key_tile(key + offset, seen, length, KEY_HEADS, WIDTH)))
        scores = tl.where(seen[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1) * (scale * LOG2_E))
        shares = tl.exp2(scores * (scale * LOG2_E) - higher[:, None])
        fading = tl.exp2(most - higher)
        values = key_tile(value + offset, seen, length, KEY_HEADS, WIDTH)
        total = tl.dot(shares.to(values.dtype), values, total * fading[:, None])
        sums = sums * fading + tl.sum(shares, axis=1)
        most = higher
    tl.store(mixed + places, (total / sums[:, None]).to(mixed.dtype.element_ty), mask=real)
    own = (tokens * head.to(tl.int64) + first_query) * GROUP + index
    tl.store(lse + own, most + tl.log2(sums), mask=index < asks * GROUP)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["query_starts", "starts"])
def grad_query_kernel(
    grad, query, key, value, mixed, lse, grad_query, shifts, query_starts, starts, tokens, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
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
    for first in tl.range(0, keys_seen(begin + QUERIES, asks, length, GROUP), KEYS):
        seen = first + tl.arange(0, KEYS)
        keys = key_tile(key + offset, seen, length, KEY_HEADS, WIDTH)
        values = key_tile(value + offset, seen, length, KEY_HEADS, WIDTH)
        scores = tl.dot(asking, tl.trans(keys)) * (scale * LOG2_E) - normaliser[:, None]
        shares = tl.exp2(tl.where(seen[None, :] <= position[:, None], scores, float("-inf")))
        slopes = shares * (tl.dot(grads, tl.trans(values)) - delta[:, None])
        total = tl.dot(slopes.to(keys.dtype), keys, total)
    tl.store(grad_query + places, (total * scale).to(grad_query.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["query_starts", "starts"])
def grad_key_kernel(
    grad, query, key, value, shifts, grad_key, grad_value, query_starts, starts, tokens, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
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
    for first in tl.range(tl.maximum((begin - before) * GROUP, 0), count, QUERIES):
        stacked = first + tl.arange(0, QUERIES)
        real = (stacked < count)[:, None]
        places = start + stacked_places(stacked, GROUP, KEY_HEADS, WIDTH)
        asking = tl.load(query + places, mask=real, other=0.0)
        grads = tl.load(grad + places, mask=real, other=0.0)
        fours = tl.load(shifts + own + stacked[:, None] * 4 + tl.arange(0, 4)[None, :], mask=real, other=0.0)
        pairs, _ = tl.split(tl.reshape(fours, [QUERIES, 2, 2]))
        normaliser, delta = tl.split(pairs)
        scores = tl.dot(keys, tl.trans(asking)) * (scale * LOG2_E) - normaliser[None, :]
        shares = tl.exp2(tl.where(earliest[:, None] <= stacked[None, :], scores, float("-inf")))
        # Before the product that is waited for at once, so that the device has both to do meanwhile.
        total_value = tl.dot(shares.to(grads.dtype), grads, total_value)
        slopes = shares * (tl.dot(values, tl.trans(grads)) - delta[None, :])
        total_key = tl.dot(slopes.to(asking.dtype), asking, total_key)
    places = offset + index[:, None] * (KEY_HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]
    written = index[:, None] < length
    tl.store(grad_key + places, (total_key * scale).to(grad_key.dtype.element_ty), mask=written)
    tl.store(grad_value + places, total_value.to(grad_value.dtype.element_ty), mask=written)
