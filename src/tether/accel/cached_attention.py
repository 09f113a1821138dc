"""Attention for decoding, and its KV cache: one slot a sequence, written in place, never grown or padded on the left.

Whole prompts attend among themselves; a new token attends to everything in its slot. A layer's scores may be capped,
s -> cap * tanh(s / cap), and it may see the last `window` tokens only, itself counted.

A slot's tokens stand at columns 0, 1, 2, ..., so a column is a position and slots may be of any length side by side.
Live slots are kept dense, 0 to n - 1, by moving the last one into a hole: a step then works on views, with no copy.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tether.accel.spec import Layer

QUERIES = 512  # whose scores are held at once where they are capped


class SlotCache:
    """Keys (layers, S, K, D, T) and values (layers, S, K, T, D) of S slots, K heads, D wide, T tokens at most.

    Keys lie transposed, as the product with the queries reads them. The memory is asked for at once and taken by the
    operating system page by page as slots fill. It begins as zeros, since columns past a slot's length are read
    (and weighted with zero). `states` (S, T, H) has room for one layer's inputs, where they are asked for.
    """

    def __init__(
        self, layers: int, slots: int, heads: int, width: int, length: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.zeros(layers, slots, heads, width, length, dtype=dtype, device=device)
        self.values = torch.zeros(layers, slots, heads, length, width, dtype=dtype, device=device)
        self.states: Tensor | None = None

    def keep_states(self, hidden: int) -> None:
        """Make room for the states of one layer, `hidden` wide."""
        _, slots, _, length, _ = self.values.shape
        self.states = self.values.new_zeros(slots, length, hidden)

    def write(self, layer: int, slots: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values`, (N, K, D) each, at (slot, column), (N,) each."""
        self.keys[layer].permute(0, 3, 1, 2).index_put_((slots, columns), keys)
        self.values[layer].permute(0, 2, 1, 3).index_put_((slots, columns), values)

    def write_prompts(self, layer: int, slots: list[int], keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values`, (P, K, length, D) each, at the first columns of P slots.

        What lies past the end of a shorter prompt is overwritten before it is read with any weight.
        """
        length = keys.shape[2]
        first, last = slots[0], slots[-1] + 1
        places = slice(first, last) if slots == list(range(first, last)) else torch.tensor(slots)
        self.keys[layer, places, :, :, :length] = keys.transpose(2, 3)
        self.values[layer, places, :, :length] = values

    def read(self, layer: int, slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first slots and columns: keys (slots * K, D, length), values (slots * K, length, D)."""
        keys, values = self.keys[layer, :slots], self.values[layer, :slots]
        return keys[..., :length].flatten(0, 1), values[..., :length, :].flatten(0, 1)

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` columns of one slot those of another, in every layer."""
        if length:
            self.keys[:, target, ..., :length] = self.keys[:, source, ..., :length]
            self.values[:, target, :, :length] = self.values[:, source, :, :length]
            if self.states is not None:
                self.states[target, :length] = self.states[source, :length]


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def out_of_window(length: int, columns: Tensor, window: int | None) -> Tensor:
    """(N, length) bool: which of the columns 0 to length - 1 tokens at `columns` (N,) do not see."""
    column = torch.arange(length, device=columns.device)
    hidden = column > columns[:, None]
    return hidden if window is None else hidden | (column <= columns[:, None] - window)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, layer: Layer) -> Tensor:
    """(P, heads, L, D) for query (P, heads, L, D), key and value (P, K, L, D): P prompts, each among itself."""
    length = query.shape[2]
    windowed = layer.window is not None and layer.window < length
    if layer.score_cap is None and not windowed:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=layer.scaling, enable_gqa=True
        )  # fmt: skip
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    positions = torch.arange(length, device=query.device)
    hidden = out_of_window(length, positions, layer.window)
    if layer.score_cap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=layer.scaling)
    parts = []
    for first in range(0, length, QUERIES):  # the scores of all queries at once would not fit for long prompts
        some = slice(first, first + QUERIES)
        scores = (query[:, :, some] @ key.transpose(2, 3)).mul_(layer.scaling)
        scores = capped(scores, layer.score_cap).masked_fill_(hidden[some], -torch.inf)
        wide = scores.softmax(dim=-1, dtype=torch.float32 if scores.dtype.itemsize < 4 else None)
        parts.append(wide.to(value.dtype) @ value)
    return torch.cat(parts, dim=2)


class Prefill:
    """Causal attention of whole prompts among themselves, padded on the right, where causality hides the padding."""

    reads_only = True

    def __init__(self, cache: SlotCache, slots: list[int], lengths: list[int]) -> None:
        """Tokens come prompt after prompt; prompt i has `lengths[i]` of them and goes into `slots[i]`."""
        self.cache, self.places = cache, slots
        self.slots = torch.tensor(slots).repeat_interleave(torch.tensor(lengths)).to(cache.keys.device)  # by token
        self.shape = (len(lengths), max(lengths))
        self.real: Tensor | None = None  # (prompts, longest) bool, where there is padding
        if min(lengths) < max(lengths):
            ends = torch.tensor(lengths, device=cache.keys.device)
            self.real = torch.arange(max(lengths), device=ends.device) < ends[:, None]
        self.key = self.value = torch.empty(0)  # (prompts, K, longest, D)

    def store(self, index: int, key: Tensor, value: Tensor) -> None:
        """Put a layer's key and value, (N, K, D) each, into the cache."""
        self.key, self.value = self._padded(key), self._padded(value)
        self.cache.write_prompts(index, self.places, self.key, self.value)

    def __call__(self, index: int, query: Tensor, layer: Layer) -> Tensor:  # noqa: ARG002
        """(heads * D, N) for query (N, heads, D) and the keys and values stored last."""
        mixed = causal_attention(self._padded(query), self.key, self.value, layer).transpose(1, 2)
        return (mixed.flatten(0, 1) if self.real is None else mixed[self.real]).flatten(1).t().contiguous()

    def _padded(self, x: Tensor) -> Tensor:
        """(prompts, heads, longest, D) of x (N, heads, D), zeros where a prompt has ended."""
        if self.real is None:
            return x.contiguous().view(*self.shape, *x.shape[1:]).transpose(1, 2)
        padded = x.new_zeros(*self.shape, *x.shape[1:])
        padded[self.real] = x
        return padded.transpose(1, 2)


class Decode:
    """Attention of one new token in each of the slots 0 to n - 1 to all that its slot holds.

    The query heads that share a key head are rows of one small product, so keys and values are never repeated.
    """

    reads_only = False

    def __init__(self, cache: SlotCache, columns: Tensor, length: int) -> None:
        """The new tokens stand at `columns` (n,), and the longest slot has `length` tokens with them."""
        self.cache, self.columns, self.length = cache, columns, length
        self.slots = torch.arange(len(columns), device=columns.device)
        self.masks: dict[int | None, Tensor | None] = {}  # by window, (n * K, 1, length), where one is needed

    def _mask(self, window: int | None) -> Tensor | None:
        """0 on the columns that each slot's token sees, -inf on the others; None where all see all."""
        if window not in self.masks:
            hidden = out_of_window(self.length, self.columns, window)  # (n, length)
            mask = None
            if hidden.any():
                mask = self.cache.keys.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
                mask = mask.repeat_interleave(self.cache.keys.shape[2], dim=0).unsqueeze(1)
            self.masks[window] = mask
        return self.masks[window]

    def store(self, index: int, key: Tensor, value: Tensor) -> None:
        """Put a layer's key and value, (n, K, D) each, into the cache."""
        self.cache.write(index, self.slots, self.columns, key, value)

    def __call__(self, index: int, query: Tensor, layer: Layer) -> Tensor:
        """(heads * D, n) for query (n, heads, D)."""
        count, heads, width = query.shape
        keys, values = self.cache.read(index, count, self.length)
        groups = query.reshape(len(keys), -1, width)  # (n * K, heads / K, D)
        mask, nothing = self._mask(layer.window), keys.new_empty(1, 1, 1)
        if layer.score_cap is not None:
            scores = capped(torch.baddbmm(nothing, groups, keys, beta=0.0, alpha=layer.scaling), layer.score_cap)
            scores = scores if mask is None else scores.add_(mask)
        elif mask is None:
            scores = torch.baddbmm(nothing, groups, keys, beta=0.0, alpha=layer.scaling)
        else:
            scores = torch.baddbmm(mask, groups, keys, alpha=layer.scaling)
        mixed = torch.bmm(scores.softmax(dim=-1), values)
        return mixed.view(count, heads * width).t().contiguous()
