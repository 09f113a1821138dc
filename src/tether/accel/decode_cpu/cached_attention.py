"""Attention for decoding: whole prompts among themselves, and one new token in each slot to all that its slot holds.

A layer's scores may be capped, s -> cap * tanh(s / cap), and it may see the last `window` tokens only, itself counted.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tether.accel.decode_cpu.kv_slots import SlotCache
from tether.accel.families import LayerFacts

QUERIES = 512  # whose scores are held at once where they are capped


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place."""
    return x.div_(cap).tanh_().mul_(cap)


def out_of_window(length: int, columns: Tensor, window: int | None) -> Tensor:
    """(N, length) bool: which of the columns 0 to length - 1 tokens at `columns` (N,) do not see."""
    column = torch.arange(length, device=columns.device)
    hidden = column > columns[:, None]
    return hidden if window is None else hidden | (column <= columns[:, None] - window)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, facts: LayerFacts) -> Tensor:
    """(P, heads, L, D) for query (P, heads, L, D), key and value (P, K, L, D): P prompts, each among itself."""
    length = query.shape[2]
    windowed = facts.window is not None and facts.window < length
    if facts.cap is None and not windowed:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=facts.scaling, enable_gqa=True
        )  # fmt: skip
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    positions = torch.arange(length, device=query.device)
    hidden = out_of_window(length, positions, facts.window)
    if facts.cap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=facts.scaling)
    parts = []
    for first in range(0, length, QUERIES):  # the scores of all queries at once would not fit for long prompts
        some = slice(first, first + QUERIES)
        scores = (query[:, :, some] @ key.transpose(2, 3)).mul_(facts.scaling)
        scores = capped(scores, facts.cap).masked_fill_(hidden[some], -torch.inf)
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

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take key and value, (N, K, D) each, into the cache."""
        self.key, self.value = self._padded(key), self._padded(value)
        self.cache.write_prompts(layer, self.places, self.key, self.value)

    def __call__(self, layer: int, query: Tensor, facts: LayerFacts) -> Tensor:  # noqa: ARG002
        """(heads * D, N) for query (N, heads, D) and the keys and values stored last."""
        mixed = causal_attention(self._padded(query), self.key, self.value, facts).transpose(1, 2)
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

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take key and value, (n, K, D) each, into the cache."""
        self.cache.write(layer, self.slots, self.columns, key, value)

    def __call__(self, layer: int, query: Tensor, facts: LayerFacts) -> Tensor:
        """(heads * D, n) for query (n, heads, D)."""
        count, heads, width = query.shape
        keys, values = self.cache.read(layer, count, self.length)
        groups = query.reshape(len(keys), -1, width)  # (n * K, heads / K, D)
        mask, nothing = self._mask(facts.window), keys.new_empty(1, 1, 1)
        if facts.cap is not None:
            scores = capped(torch.baddbmm(nothing, groups, keys, beta=0.0, alpha=facts.scaling), facts.cap)
            scores = scores if mask is None else scores.add_(mask)
        elif mask is None:
            scores = torch.baddbmm(nothing, groups, keys, beta=0.0, alpha=facts.scaling)
        else:
            scores = torch.baddbmm(mask, groups, keys, alpha=facts.scaling)
        mixed = torch.bmm(scores.softmax(dim=-1), values)
        return mixed.view(count, heads * width).t().contiguous()
