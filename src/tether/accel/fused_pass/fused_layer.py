"""Decoder layers over packed tokens for a CUDA device, forward and backward written out: no autograd in here.

What only reads and writes is done by Triton kernels, each in one pass over its inputs; products stay with the library.
The gradient of a weight is added to `.grad` by the product that makes it, and gradients of one input by several
products likewise. A layer keeps for its backward pass what enters its norms, queries, keys, values, what attention
mixed, gates and ups; normed states and the gated product are made again, in one cheap pass each. Where gate and up have
adapters, what is kept of them is what their weights alone gave (`kernels/lora.py`).

Padding never exists: attention runs over rows laid end to end. Torch's flash attention is the default, and knows
windows. Many short rows and capped scores have kernels of their own (`kernels/attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tether.accel.fused_pass.gradient_accumulation import BackwardContext
from tether.accel.fused_pass.linear import Readers, linear
from tether.accel.kernels import attention as row_kernels
from tether.accel.kernels.lora import GateAdapters
from tether.accel.kernels.norm import add_norm, add_norm_backward, column_sums
from tether.accel.kernels.rotary import rotate
from tether.accel.kernels.swiglu import gate, gate_backward
from tether.accel.spec import Layer, Norm
from tether.ops.masks import Packing, Rows


class Attention:
    """Attention of n query tokens (n, heads, D) to the N keys and values (N, kv heads, D) of their rows.

    The queries are those of all tokens, or those of `rows`. Where these end their rows, causality counted from the
    ends of queries and keys is right as it is; else queries stand among zeros at the other tokens.
    """

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, layer: Layer
    ) -> tuple[Tensor, Tensor]:
        """`(mixed, normalisers)`: (n, heads * D), and what the backward pass needs."""
        if layer.score_cap is None and row_kernels.usable(query, key, packing, rows):
            return row_kernels.forward(query, key, value, packing, rows, layer)
        query, starts, most = _laid_out(query, packing, rows)
        if layer.score_cap is not None:
            mixed, lse = row_kernels.forward(query, key, value, packing, _ending(rows), layer)
            return _picked(mixed, rows), lse
        mixed, lse = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, packing.starts, most, packing.longest, 0.0, True, False,
            scale=layer.scaling, **_window(packing, layer),
        )[:2]  # fmt: skip
        return _picked(mixed, rows).flatten(1), lse

    @staticmethod
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
        if layer.score_cap is None and row_kernels.usable(query, key, packing, rows):
            return row_kernels.backward(grad, query, key, value, mixed, lse, packing, rows, layer)
        shape = query.shape
        query, starts, most = _laid_out(query, packing, rows)
        grad, mixed = (_laid_out(x.view(shape), packing, rows)[0] for x in (grad, mixed))
        if layer.score_cap is not None:
            rest = packing, _ending(rows), layer
            of_query, of_key, of_value = row_kernels.backward(grad.flatten(1), query, key, value, mixed, lse, *rest)
            return _picked(of_query, rows).contiguous(), of_key, of_value
        seed: Any = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a dropout that is not there
        found = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, mixed, lse, starts, packing.starts, most, packing.longest, 0.0, True,
            seed, seed, scale=layer.scaling, **_window(packing, layer),
        )  # fmt: skip
        return _picked(found[0], rows).contiguous(), found[1].contiguous(), found[2]


def _window(packing: Packing, layer: Layer) -> dict[str, int]:
    """How many tokens before its own a query sees, for flash attention; nothing where the window hides no token."""
    if layer.window is None or layer.window >= packing.longest:
        return {}
    return {"window_size_left": layer.window - 1, "window_size_right": 0}


def _ending(rows: Rows | None) -> Rows | None:
    """The tokens that ask, where they end their rows; else all tokens stand for them."""
    return None if rows is None or rows.starts is None else rows


def _laid_out(x: Tensor, packing: Packing, rows: Rows | None) -> tuple[Tensor, Tensor, int]:
    """`(x, where its rows start, a bound on their length)`; x (n, ...) among zeros where its tokens end no rows.

    The bound is never 1, as of a reward model, which reads each row's last state alone: where rows ask once and query
    heads share a key head, flash attention swaps the two in its forward pass, and the normalisers it leaves then lie in
    another order than its backward pass reads.
    """
    if rows is None:
        return x, packing.starts, max(2, packing.longest)
    if rows.starts is not None:
        return x, rows.starts, max(2, rows.most)
    among = x.new_zeros(len(packing.places), *x.shape[1:]).index_copy_(0, rows.tokens, x)
    return among, packing.starts, max(2, packing.longest)


def _picked(x: Tensor, rows: Rows | None) -> Tensor:
    """The tokens of x that were asked for."""
    return x if rows is None or rows.starts is not None else x.index_select(0, rows.tokens)


def known(layer: Layer) -> bool:
    """Whether the layer does nothing that is not computed here."""
    return layer.activation_kind is not None and all(part.weight is not None for part in layer.linears)


def attention_readers(layer: Layer, rows: Rows | None) -> tuple[Readers, Readers | None]:
    """Who reads the states that enter attention: those of all tokens, and those of `rows` where these are fewer."""
    if rows is None:
        return Readers((layer.query, layer.key, layer.value)), None
    return Readers((layer.key, layer.value)), Readers((layer.query,))


@dataclass(frozen=True)
class LayerPlace:
    """Where the tokens of a pass stand, and how much of it is kept."""

    packing: Packing
    rows: Rows | None  # the tokens that go on after attention; None for all
    angles: tuple[Tensor, Tensor]  # cos and sin, (N, D) each
    asked: tuple[Tensor, Tensor]  # the same of the tokens that go on


class Kept(NamedTuple):
    """What the backward pass reads."""

    added: Tensor  # (N, H) what entered the layer
    inverse: Tensor | None  # (N,) 1 / its root mean square, where attention has a norm before it
    query: Tensor  # (n, heads, D) turned to their positions
    key: Tensor  # (N, kv heads, D)
    value: Tensor
    raw_query: Tensor | None  # before their norms, where there are any
    raw_key: Tensor | None
    mixed: Tensor  # (n, heads * D) what attention gave
    lse: Tensor  # its normalisers
    output: Tensor | None  # (n, H) what entered the norm after attention, where there is one
    again: Tensor  # (n, H) what entered the MLP
    again_inverse: Tensor | None
    gate: Tensor  # (n, I)
    up: Tensor
    result: Tensor | None  # (n, H) what entered the norm after the MLP, where there is one
    thin: Thin


class Thin(NamedTuple):
    """x A^T of the adapters, by what they read; those of several layers that read the same stand side by side."""

    normed: Tensor | None  # (N, R) of keys and values, and queries before them unless their tokens are fewer
    asking: Tensor | None  # (n, rank) of queries whose tokens are fewer
    mixed: Tensor | None  # (n, rank) of the output
    again: Tensor | None  # (n, R) of gate and up
    product: Tensor | None  # (n, rank) of down


def normed_sum(x: Tensor, change: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(x + change, its norm, 1 / its root mean square)`; the sum itself, and no inverse, where there is no norm."""
    if norm is None:
        added = x if change is None else x + change
        return added, added, None
    return add_norm(x, change, norm)


def normed_groups(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """`(the norm of x by groups as wide as its weight, x)`, or `(x, None)` where there is no norm."""
    if norm is None:
        return x, None
    return add_norm(x.view(-1, len(norm.weight)), None, norm)[1].view(x.shape), x


def layer_forward(layer: Layer, place: LayerPlace, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Kept]:
    """`(what the layer adds to kept.again, what its backward pass reads)` of hidden + change (N, H).

    What a layer adds is handed on by itself, for the next norm to add it in the same pass.
    """
    rows, width = place.rows, layer.head_dim
    added, normed, inverse = normed_sum(hidden, change, layer.before_attention)
    asking, going_on = normed, added
    if rows is not None:
        asking, going_on = normed.index_select(0, rows.tokens), added.index_select(0, rows.tokens)
    readers, askers = attention_readers(layer, rows)
    read, thin_normed = readers(normed)
    asked, thin_asking = askers(asking) if askers is not None else ([], None)
    query, key, value = *asked, *read
    query, raw_query = normed_groups(query, layer.query_norm)
    key, raw_key = normed_groups(key, layer.key_norm)
    query, key, value = (x.unflatten(-1, (-1, width)) for x in (query, key, value))
    rotate(query, key, place.asked, place.angles, 1.0)
    mixed, lse = Attention.forward(query, key, value, place.packing, rows, layer)
    (output,), thin_mixed = Readers((layer.output,))(mixed)
    output, raw_output = normed_groups(output, layer.after_attention)
    again, normed, again_inverse = normed_sum(going_on, output, layer.before_mlp)
    opened, up, product, thin_again = _gated(layer, normed)
    (result,), thin_product = Readers((layer.down,))(product)
    result, raw_result = normed_groups(result, layer.after_mlp)
    thin = Thin(thin_normed, thin_asking, thin_mixed, thin_again, thin_product)
    kept = Kept(
        added, inverse, query, key, value, raw_query, raw_key, mixed, lse, raw_output,
        again, again_inverse, opened, up, raw_result, thin,
    )  # fmt: skip
    return result, kept


def _gated(layer: Layer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`(gate, up, gated product, thin)`; gate and up lack what adapters add where the product's kernel adds it."""
    readers, adapters = Readers((layer.gate, layer.up)), GateAdapters.of(layer)
    if adapters is None:
        assert layer.activation_kind is not None
        (opened, up), thin = readers(normed)
        return opened, up, gate(opened, up, layer.activation_kind), thin
    thin = readers.thin(normed)
    assert thin is not None
    opened, up = (linear(part, normed, None) for part in readers.parts)
    return opened, up, adapters.product(opened, up, thin), thin


def layer_backward(
    layer: Layer,
    place: LayerPlace,
    kept: Kept,
    grad_hidden: Tensor,
    grad_change: Tensor,
    context: BackwardContext,
    *,
    wants_input: bool,
) -> Tensor | None:
    """(N, H) the gradient of hidden, and of change alike; None where it is not wanted."""
    grad_again = _mlp_backward(layer, kept, grad_hidden, grad_change, context)
    return _attention_backward(layer, place, kept, grad_again, context, wants_input)


def _mlp_backward(
    layer: Layer, kept: Kept, grad_hidden: Tensor, grad_change: Tensor, context: BackwardContext
) -> Tensor:
    """(n, H) the gradient of what entered the MLP, through it and past it."""
    grad_change = _groups_backward(grad_change.contiguous(), kept.result, layer.after_mlp, context)
    reader, readers, norm = Readers((layer.down,)), Readers((layer.gate, layer.up)), layer.before_mlp
    narrow_down = reader.narrow([grad_change])
    product = torch.empty_like(kept.gate) if reader.learns() else None
    slopes, narrow = _gated_backward(layer, kept, grad_change, narrow_down, product)
    if product is not None:
        with context.side(grad_change, product, kept, narrow_down):
            reader.learn(context.gradients, [grad_change], product, kept.thin.product, narrow_down)
    del product
    grad_normed = readers.grad_input(slopes, narrow)
    if readers.learns():
        with context.side(slopes, kept, narrow):
            normed = normed_sum(kept.again, None, norm)[1]
            readers.learn(context.gradients, slopes, normed, kept.thin.again, narrow)
    return norm_backward(norm, grad_normed, grad_hidden, kept.again, kept.again_inverse, context)


def _gated_backward(
    layer: Layer, kept: Kept, grad_change: Tensor, narrow_down: Tensor | None, product: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """`((d gate, d up), their narrow products)`; `product`, where there is one, is filled with the gated product."""
    reader, adapters = Readers((layer.down,)), GateAdapters.of(layer)
    if adapters is None:
        assert layer.activation_kind is not None
        grad = reader.grad_input([grad_change], narrow_down)
        slopes = gate_backward(kept.gate, kept.up, grad, product, layer.activation_kind)
        return slopes, Readers((layer.gate, layer.up)).narrow(slopes)
    assert kept.thin.again is not None
    separate = adapters.down is None  # what comes through the adapter of down is not the kernel's to add
    grad = reader.grad_input([grad_change], narrow_down if separate else None)
    found = adapters.backward(kept.gate, kept.up, kept.thin.again, grad, None if separate else narrow_down, product)
    return (found.gate, found.up), found.narrow


def _attention_backward(
    layer: Layer, place: LayerPlace, kept: Kept, grad_again: Tensor, context: BackwardContext, wants_input: bool
) -> Tensor | None:
    """(N, H) the gradient of what entered the layer; None where nobody wants it."""
    rows, norm, reader = place.rows, layer.before_attention, Readers((layer.output,))
    grad_output = _groups_backward(grad_again, kept.output, layer.after_attention, context)
    narrow = reader.narrow([grad_output])
    grad_mixed = reader.grad_input([grad_output], narrow)
    with context.side(grad_output, kept, narrow):
        reader.learn(context.gradients, [grad_output], kept.mixed, kept.thin.mixed, narrow)
    grad_query, grad_key, grad_value = Attention.backward(
        grad_mixed, kept.query, kept.key, kept.value, kept.mixed, kept.lse, place.packing, rows, layer
    )
    rotate(grad_query, grad_key, place.asked, place.angles, -1.0)
    grad_query = _groups_backward(grad_query.flatten(1), kept.raw_query, layer.query_norm, context)
    grad_key = _groups_backward(grad_key.flatten(1), kept.raw_key, layer.key_norm, context)
    grads = [grad_query, grad_key, grad_value.flatten(1)]
    wants = wants_input or (norm is not None and norm.weight.requires_grad)
    readers, askers = attention_readers(layer, rows)
    learns = readers.learns() or (askers is not None and askers.learns())
    with context.side(kept):
        normed = normed_sum(kept.added, None, norm)[1] if learns else None
    of_asking: Tensor | None = None
    if askers is not None and rows is not None:
        with context.side():
            asking = None if normed is None else normed.index_select(0, rows.tokens)
        of_asking = _read_backward(askers, [grads.pop(0)], asking, kept.thin.asking, context, wants)
    grad_normed = _read_backward(readers, grads, normed, kept.thin.normed, context, wants)
    if grad_normed is None:
        return None
    if rows is not None:
        assert of_asking is not None
        grad_normed.index_add_(0, rows.tokens, of_asking)
        grad_again = torch.zeros_like(grad_normed).index_copy_(0, rows.tokens, grad_again)
    return norm_backward(norm, grad_normed, grad_again, kept.added, kept.inverse, context)


def _read_backward(
    readers: Readers, grads: list[Tensor], x: Tensor | None, thin: Tensor | None, context: BackwardContext, wants: bool
) -> Tensor | None:
    """The gradient of what layers read, where `wants` asks for it; they learn where x, made on the side, is given."""
    narrow = readers.narrow(grads)
    if x is not None:
        with context.side(grads, thin, narrow):
            readers.learn(context.gradients, grads, x, thin, narrow)
    return readers.grad_input(grads, narrow) if wants else None


def norm_backward(
    norm: Norm | None,
    grad_normed: Tensor,
    past: Tensor | None,
    added: Tensor,
    inverse: Tensor | None,
    context: BackwardContext,
) -> Tensor:
    """The gradient of what entered a norm; `past` is the gradient that goes past it."""
    if norm is None:
        return grad_normed if past is None else grad_normed + past
    assert inverse is not None
    grad, partial = add_norm_backward(grad_normed, past, added, norm, inverse)
    if partial is not None:
        with context.side(partial):
            context.gradients.add(norm.weight, column_sums(partial))
    return grad


def _groups_backward(grad: Tensor, raw: Tensor | None, norm: Norm | None, context: BackwardContext) -> Tensor:
    """The gradient of x from that of `normed_groups(x, norm)`."""
    if norm is None or raw is None:
        return grad
    groups = raw.view(-1, len(norm.weight))
    inverse = add_norm(groups, None, norm)[2]
    return norm_backward(norm, grad.reshape(groups.shape), None, groups, inverse, context).view(grad.shape)
