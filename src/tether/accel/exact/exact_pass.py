"""The exact pass over packed tokens, for training and evaluation; `exact_decoder.py` samples with the same layer.

A token's numbers depend on the tokens before it in its row, and on nothing else: not on the batch, its order, its
padding or the tokens whose states are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tether.accel.exact.key_blocks import attend_packed
from tether.accel.exact.products import activated, linear
from tether.accel.fused_pass.packed import norm, plain_states, rotate
from tether.accel.spec import Layer, Linear, Norm
from tether.ops.masks import Packing, Rows
from tether.types import Sequences

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys and values (N, heads, D) -> (n, heads * D)


def exact_states(
    backbone: Any,
    batch: Sequences,
    embeddings: Tensor | None = None,
    wanted: Tensor | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """(B, T, H) as `packed.packed_states`."""
    return plain_states(backbone, batch, embeddings, wanted, recompute=recompute, layer_pass=exact_layer)


def exact_layer(
    layer: Layer, hidden: Tensor, angles: tuple[Tensor, Tensor], packing: Packing, rows: Rows | None
) -> Tensor:
    """(N, H) after one block, or (n, H) of the tokens of `rows` alone; angles are (N, 1, D) each."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_packed(query, key, value, packing, rows, layer)

    return run_layer(layer, hidden, angles, attend, None if rows is None else rows.tokens)


def run_layer(
    layer: Layer, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, tokens: Tensor | None = None
) -> Tensor:
    """(N, H) after one block, or (n, H) of `tokens` alone: those whose queries `attend` is given."""
    normed = norm(layer.before_attention, hidden)
    asking, going_on, own = normed, hidden, angles
    if tokens is not None:
        asking, going_on, own = normed[tokens], hidden[tokens], (angles[0][tokens], angles[1][tokens])
    query = rotate(heads(layer, layer.query, layer.query_norm, asking), *own)
    mixed = attend(query, *keys_and_values(layer, normed, angles))
    hidden = going_on + norm(layer.after_attention, linear(layer.output, mixed))
    normed = norm(layer.before_mlp, hidden)
    gated = activated(layer, linear(layer.gate, normed)) * linear(layer.up, normed)
    return hidden + norm(layer.after_mlp, linear(layer.down, gated))


def keys_and_values(layer: Layer, normed: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(N, K, D) each, of a layer's normed inputs (N, H)."""
    key = rotate(heads(layer, layer.key, layer.key_norm, normed), *angles)
    return key, heads(layer, layer.value, None, normed)


def heads(layer: Layer, part: Linear, own: Norm | None, x: Tensor) -> Tensor:
    """(N, heads, D) of x (N, H), normed where the model does so."""
    return norm(own, linear(part, x)).unflatten(-1, (-1, layer.head_dim))
