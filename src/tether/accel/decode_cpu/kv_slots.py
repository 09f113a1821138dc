"""The KV cache of a decoding batch: one slot a sequence, written in place, never grown and never padded on the left.

A slot's tokens stand at columns 0, 1, 2, ..., so a column is a position and slots may be of any length side by side.
Live slots are kept dense, 0 to n - 1, by moving the last one into a hole: a step then works on views, with no copy.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
