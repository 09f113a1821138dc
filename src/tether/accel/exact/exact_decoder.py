"""The decoder of the exact pass: tokens of many sequences in slots, by the layer that trains them."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tether.accel.exact.exact_logprobs import products
from tether.accel.exact.exact_pass import keys_and_values, run_layer
from tether.accel.exact.key_blocks import KEYS, Columns, blocks_of, read_row, read_slots
from tether.accel.fused_pass.packed import norm
from tether.accel.spec import DecoderSpec, Layer


class TokenCache:
    """Keys and values (layers, S, K, T, D) of S slots, token after token, for T tokens at most, filled up to blocks.

    It begins as zeros, since columns past a slot's length are read, and weighted with zero. `states` (S, T, H) has room
    for one layer's inputs, where they are asked for.
    """

    def __init__(self, spec: DecoderSpec, slots: int, length: int, *, states: bool) -> None:
        room = blocks_of(length) * KEYS
        shape = (len(spec.layers), slots, spec.kv_heads, room, spec.head_dim)
        self.keys, self.values = torch.zeros(2, *shape, dtype=spec.dtype)
        self.states = torch.zeros(slots, room, spec.hidden, dtype=spec.dtype) if states else None

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` columns of one slot those of another, in every layer."""
        for held in (self.keys, self.values):
            held[:, target, :, :length] = held[:, source, :, :length]
        if self.states is not None:
            self.states[target, :length] = self.states[source, :length]


class ExactDecoder:
    """As `CpuDecoder`: a model's pass over the slots of a cache."""

    def __init__(self, model: Any, slots: int, length: int, traced: int | None = None) -> None:
        """Room for `slots` sequences of `length` tokens; the cache's states keep the inputs of layer `traced`."""
        self.spec = spec = DecoderSpec.from_model(model).detached()
        assert spec.output is not None and spec.output.weight is not None
        self.head, self.bias = spec.output.weight, spec.output.bias
        self.device, self.traced = spec.device, traced
        self.cache = TokenCache(spec, slots, length, states=traced is not None)
        tables = spec.angles(torch.arange(length))
        self.angles = {kind: (cos[:, None], sin[:, None]) for kind, (cos, sin) in tables.items()}  # (length, 1, D)

    def prefill(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Read `prompts[i]` into slot `slots[i]`; the pass ends at the last layer's keys and values."""
        lengths = [len(ids) for ids in prompts]
        tokens = torch.tensor([id for ids in prompts for id in ids])
        columns = [column for length in lengths for column in range(length)]
        ends = list(accumulate(lengths))
        rows = [(slot, slice(end - length, end)) for slot, end, length in zip(slots, ends, lengths, strict=True)]

        def attend(index: int, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.keys[index], self.cache.values[index]
            mixed: list[Tensor] = []
            for slot, some in rows:
                length = some.stop - some.start
                keys[slot, :, :length] = key[some].transpose(0, 1)
                values[slot, :, :length] = value[some].transpose(0, 1)
                if len(query):
                    mixed.append(read_row(query[some], keys[slot], values[slot], columns[some], layer))
            return torch.cat(mixed) if mixed else query

        places = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
        self._run(tokens, places, torch.tensor(columns), attend, reads_only=True)

    def step(self, tokens: Tensor, columns: Tensor, length: int) -> Tensor:  # noqa: ARG002
        """(V, n) products of the output layer after one more token in each of the slots 0 to n - 1."""
        count = len(tokens)
        slots, places = torch.arange(count), Columns(columns.repeat_interleave(self.spec.kv_heads))

        def attend(index: int, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.keys[index], self.cache.values[index]
            keys.transpose(1, 2).index_put_((slots, columns), key)
            values.transpose(1, 2).index_put_((slots, columns), value)
            return read_slots(query, keys[:count], values[:count], places, layer)

        hidden = self._run(tokens, slots, columns, attend, reads_only=False)
        return products(norm(self.spec.final_norm, hidden), self.head, self.bias).t()

    def _run(self, tokens: Tensor, slots: Tensor, columns: Tensor, attend: Any, *, reads_only: bool) -> Tensor:
        """(N, H) before the last norm; of no meaning where a pass only reads."""
        hidden = self.spec.embedding(tokens)
        angles = {kind: (cos[columns], sin[columns]) for kind, (cos, sin) in self.angles.items()}
        for index, layer in enumerate(self.spec.layers):
            if index == self.traced:
                assert self.cache.states is not None
                self.cache.states.index_put_((slots, columns), hidden)
            own = angles[layer.rotary]
            if reads_only and index + 1 == len(self.spec.layers):
                normed = norm(layer.before_attention, hidden)
                attend(index, layer, normed[:0], *keys_and_values(layer, normed, own))
                break
            hidden = run_layer(layer, hidden, own, partial(attend, index, layer))
        return hidden
