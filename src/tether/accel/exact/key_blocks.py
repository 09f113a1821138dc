"""Attention with one order of the keys, for a token that is decoded, read in a prompt, or trained on.

A token's keys are cut into blocks of `KEYS`, counted from the start of its row. With q the G queries that share a key
head, every block gives one product of the same shape, (G, D) x (D, KEYS); so does its mix of values, (G, KEYS) x (KEYS,
D). The blocks' sums are added in their order:

    m = max over all keys of s,   p = exp(s - m),   out = (((p_0 v_0) + p_1 v_1) + ...) / ((Σ p_0 + Σ p_1) + ...)

A maximum does not depend on an order. Keys that a token does not see have p = 0, and adding 0 changes nothing, so it
does not matter how many blocks of others a token is run with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from tether.accel.cached_attention import capped
from tether.accel.fused_pass.packed import attend
from tether.accel.spec import Layer
from tether.ops.masks import Packing, Rows

KEYS = 64  # in a block
QUERIES = 256  # tokens of a row whose scores are held at once


def blocks_of(length: int) -> int:
    """The number of blocks of so many keys."""
    return -(-length // KEYS)


class Columns:
    """Where tokens stand in their rows, and which keys of a block they do not see."""

    def __init__(self, columns: Tensor) -> None:
        self.columns = columns  # (t,)
        self.low, self.high = map(int, columns.aminmax())
        self._hidden: dict[tuple[int, int | None], Tensor] = {}

    def hide(self, scores: Tensor, block: int, window: int | None) -> None:
        """Set the scores (t, G, KEYS) with keys that a token does not see to -inf."""
        first = block * KEYS
        if self.low >= first + KEYS - 1 and (window is None or self.high - window < first):
            return
        if (block, window) not in self._hidden:
            keys = torch.arange(first, first + KEYS)
            hidden = keys > self.columns[:, None]
            if window is not None:
                hidden |= keys <= self.columns[:, None] - window
            self._hidden[block, window] = hidden[:, None]
        scores.masked_fill_(self._hidden[block, window], -torch.inf)

    def first_block(self, window: int | None) -> int:
        """The first block of which one of them may see a key."""
        return 0 if window is None else max(0, self.low - window + 1) // KEYS


def to_shares(scores: Tensor) -> Tensor:
    """(B, G, 1) the sum over all keys, for scores (blocks, B, G, KEYS), which become exp(s - m) in place."""
    scores.sub_(scores.amax(dim=(0, 3), keepdim=True)).exp_()
    sums = scores.sum(dim=-1, keepdim=True)  # (blocks, B, G, 1)
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total


def read_row(query: Tensor, keys: Tensor, values: Tensor, columns: list[int], layer: Layer) -> Tensor:
    """(t, heads * D) for t tokens of one row: query (t, heads, D) at `columns`, which rise.

    keys and values are (K, T, D), the row's tokens from its first on, and T a multiple of `KEYS`.
    """
    if len(columns) > QUERIES:
        parts = range(0, len(columns), QUERIES)
        given = [(query[at : at + QUERIES], columns[at : at + QUERIES]) for at in parts]
        return torch.cat([read_row(some, keys, values, places, layer) for some, places in given])
    count, heads, width = query.shape
    kv_heads, blocks = len(keys), blocks_of(columns[-1] + 1)
    groups = query.view(count, kv_heads, -1, width).transpose(0, 1).contiguous()  # (K, t, G, D)
    scores = query.new_full((blocks, kv_heads, count, heads // kv_heads, KEYS), -torch.inf)
    out = torch.zeros_like(groups)
    places = torch.tensor(columns)
    first = Columns(places).first_block(layer.window)
    begins = [bisect_left(columns, block * KEYS) for block in range(blocks)]
    for block in range(first, blocks):
        seen, begin = slice(block * KEYS, (block + 1) * KEYS), begins[block]
        for head in range(kv_heads):
            each = keys[head, seen].t().expand(count - begin, width, KEYS)
            torch.bmm(groups[head, begin:], each, out=scores[block, head, begin:])
        some = scores[block, :, begin:]
        some.mul_(layer.scaling)
        if layer.score_cap is not None:
            capped(some, layer.score_cap)
        asking = Columns(places[begin:])
        for head in range(kv_heads):
            asking.hide(some[head], block, layer.window)
    total = to_shares(scores.flatten(1, 2)).view(kv_heads, count, -1, 1)
    for block in range(first, blocks):
        seen, begin = slice(block * KEYS, (block + 1) * KEYS), begins[block]
        for head in range(kv_heads):
            each = values[head, seen].expand(count - begin, KEYS, width)
            out[head, begin:].baddbmm_(scores[block, head, begin:], each)
    return out.div_(total).transpose(0, 1).reshape(count, heads * width)


def read_slots(query: Tensor, keys: Tensor, values: Tensor, places: Columns, layer: Layer) -> Tensor:
    """(n, heads * D) for one token in each of n slots: query (n, heads, D).

    keys and values are (n, K, T, D); `places` has each token's column once for each of the K key heads.
    """
    count, heads, width = query.shape
    kv_heads, blocks = keys.shape[1], blocks_of(places.high + 1)
    groups = query.reshape(count * kv_heads, -1, width)
    scores = query.new_empty(blocks, len(groups), heads // kv_heads, KEYS)
    first = places.first_block(layer.window)
    scores[:first] = -torch.inf
    for block in range(first, blocks):
        seen = keys[:, :, block * KEYS : (block + 1) * KEYS].flatten(0, 1)
        torch.bmm(groups, seen.transpose(1, 2), out=scores[block])
        scores[block].mul_(layer.scaling)
        if layer.score_cap is not None:
            capped(scores[block], layer.score_cap)
        places.hide(scores[block], block, layer.window)
    total = to_shares(scores)
    out = torch.zeros_like(groups)
    for block in range(first, blocks):
        out.baddbmm_(scores[block], values[:, :, block * KEYS : (block + 1) * KEYS].flatten(0, 1))
    return out.div_(total).view(count, heads * width)


class _PackedAttention(torch.autograd.Function):
    """The rows of a packing one by one; its backward pass is that of the plain attention."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, layer: Layer
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.given = packing, rows, layer
        starts: list[int] = packing.starts.tolist()
        tokens = torch.arange(len(packing.places)) if rows is None else rows.tokens
        places: list[int] = tokens.tolist()
        columns: list[int] = packing.positions[tokens].tolist()
        out = query.new_empty(len(query), query.shape[1] * query.shape[2])
        for start, stop in pairwise(starts):
            some = slice(bisect_left(places, start), bisect_left(places, stop))
            if some.start < some.stop:
                own = [_in_blocks(x[start:stop]) for x in (key, value)]
                out[some] = read_row(query[some], own[0], own[1], columns[some], layer)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            mixed = attend(*given, *ctx.given)
        return *torch.autograd.grad(mixed, given, grad), None, None, None


def _in_blocks(x: Tensor) -> Tensor:
    """(K, T, D) of a row's x (length, K, D), zeros up to T, a multiple of `KEYS`."""
    room = x.new_zeros(x.shape[1], blocks_of(len(x)) * KEYS, x.shape[2])
    room[:, : len(x)] = x.transpose(0, 1)
    return room


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, layer: Layer
) -> Tensor:
    """As `packed.attend`: (n, heads * D) of the tokens of a packing, or of those that `rows` names."""
    return cast("Callable[..., Tensor]", _PackedAttention.apply)(query, key, value, packing, rows, layer)
