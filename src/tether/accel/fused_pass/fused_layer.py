"""Decoder layers over packed tokens for a CUDA device, forward and backward written out: no autograd in here.

What only reads and writes is done by Triton kernels, each in one pass over its inputs; products stay with the library.
The gradient of a weight is added to `.grad` by the product that makes it, and gradients of one input by several
products likewise. A layer keeps for its backward pass what enters its two norms, queries, keys, values, what attention
mixed, gates and ups; normed states and the gated product are made again, in one cheap pass each. Where gate and up have
adapters, what is kept of them is what their weights alone gave (`adapter_gate.py`).

Padding never exists: attention runs over rows laid end to end (`flash.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from tether.accel.fused_pass.flash import Attention
from tether.accel.fused_pass.fused_ops import add_norm, add_norm_backward, column_sums, gate, gate_backward, rotate
from tether.accel.fused_pass.lora_linear import AdaptedLinear, Readers
from tether.accel.fused_pass.lora_swiglu import GateAdapters
from tether.accel.fused_pass.side_stream import Aside
from tether.accel.gradient_accumulation import Gradients
from tether.ops.masks import Packing, Rows


@dataclass(frozen=True)
class FusedNorm:
    """An RMS norm: w x / sqrt(mean(x²) + ε)."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> FusedNorm | None:
        """None where there is no norm."""
        return None if module is None else cls(module.weight, module.variance_epsilon)


@dataclass(frozen=True)
class FusedLayer:
    """What a decoder layer computes with; its tensors are the model's own."""

    before_attention: FusedNorm
    before_mlp: FusedNorm
    query: AdaptedLinear
    key: AdaptedLinear
    value: AdaptedLinear
    output: AdaptedLinear
    gate: AdaptedLinear
    up: AdaptedLinear
    down: AdaptedLinear
    query_norm: FusedNorm | None
    key_norm: FusedNorm | None
    width: int  # of a head
    scaling: float

    @classmethod
    def of(cls, layer: Any) -> FusedLayer | None:
        """None where one of its modules may do more than is known here."""
        attention, mlp = layer.self_attn, layer.mlp
        modules = {
            "query": attention.q_proj,
            "key": attention.k_proj,
            "value": attention.v_proj,
            "output": attention.o_proj,
            "gate": mlp.gate_proj,
            "up": mlp.up_proj,
            "down": mlp.down_proj,
        }
        found = {name: AdaptedLinear.of(module) for name, module in modules.items()}
        if any(part is None for part in found.values()) or not isinstance(mlp.act_fn, nn.SiLU | SiLUActivation):
            return None
        norms = {"before_attention": layer.input_layernorm, "before_mlp": layer.post_attention_layernorm}
        norms |= {"query_norm": getattr(attention, "q_norm", None), "key_norm": getattr(attention, "k_norm", None)}
        parts: dict[str, Any] = found | {name: FusedNorm.of(module) for name, module in norms.items()}
        return cls(**parts, width=attention.head_dim, scaling=attention.scaling)

    def readers(self, rows: Rows | None) -> tuple[Readers, Readers | None]:
        """Who reads the states of the first norm: those of all tokens, and those of `rows` where these are fewer."""
        if rows is None:
            return Readers((self.query, self.key, self.value)), None
        return Readers((self.key, self.value)), Readers((self.query,))

    def gate_adapters(self) -> GateAdapters | None:
        """The adapters that are added as the gated product is made."""
        return GateAdapters.of(self.gate, self.up, self.down)

    def trained(self) -> list[Tensor]:
        """The tensors that a gradient goes to."""
        norms = (self.before_attention, self.before_mlp, self.query_norm, self.key_norm)
        parts = (self.query, self.key, self.value, self.output, self.gate, self.up, self.down)
        tensors = [norm.weight for norm in norms if norm] + [tensor for part in parts for tensor in part.tensors()]
        return [tensor for tensor in tensors if tensor.requires_grad]


@dataclass(frozen=True)
class LayerPlace:
    """Where the tokens of a pass stand, and how much of it is kept."""

    packing: Packing
    rows: Rows | None  # the tokens that go on after attention; None for all
    angles: tuple[Tensor, Tensor]  # cos and sin, (N, D) each
    asked: tuple[Tensor, Tensor]  # the same of the tokens that go on


class Kept(NamedTuple):
    """What the backward pass reads."""

    added: Tensor  # (N, H) what entered the first norm
    inverse: Tensor  # (N,) 1 / its root mean square
    query: Tensor  # (n, heads, D) turned to their positions
    key: Tensor  # (N, kv heads, D)
    value: Tensor
    raw_query: Tensor | None  # before the norms of the heads, where there are any
    raw_key: Tensor | None
    mixed: Tensor  # (n, heads * D) what attention gave
    lse: Tensor  # its normalisers
    again: Tensor  # (n, H) what entered the second norm
    again_inverse: Tensor
    gate: Tensor  # (n, I)
    up: Tensor
    thin: Thin


class Thin(NamedTuple):
    """x A^T of the adapters, by what they read; those of several layers that read the same stand side by side."""

    normed: Tensor | None  # (N, R) of keys and values, and queries before them unless their tokens are fewer
    asking: Tensor | None  # (n, rank) of queries whose tokens are fewer
    mixed: Tensor | None  # (n, rank) of the output
    again: Tensor | None  # (n, R) of gate and up
    product: Tensor | None  # (n, rank) of down


class BackwardContext(NamedTuple):
    """Where a way back leaves the gradients of weights: added to `.grad`, on the side where the pass has one."""

    gradients: Gradients
    aside: Aside


def layer_forward(layer: FusedLayer, place: LayerPlace, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Kept]:
    """`(what the block adds to kept.again, what its backward pass reads)` of hidden + change (N, H).

    What a block adds is handed on apart, for the next norm to add it in the same pass.
    """
    rows, width = place.rows, layer.width
    added, normed, inverse = add_norm(hidden, change, layer.before_attention.weight, layer.before_attention.epsilon)
    asking, going_on = normed, added
    if rows is not None:
        asking, going_on = normed.index_select(0, rows.tokens), added.index_select(0, rows.tokens)
    readers, askers = layer.readers(rows)
    read, thin_normed = readers(normed)
    asked, thin_asking = askers(asking) if askers is not None else ([], None)
    query, key, value = *asked, *read
    query, raw_query = _normed_heads(query.unflatten(-1, (-1, width)), layer.query_norm)
    key, raw_key = _normed_heads(key.unflatten(-1, (-1, width)), layer.key_norm)
    value = value.unflatten(-1, (-1, width))
    rotate(query, key, place.asked, place.angles, 1.0)
    mixed, lse = Attention.forward(query, key, value, place.packing, rows, layer.scaling)
    (output,), thin_mixed = Readers((layer.output,))(mixed)
    again, normed, again_inverse = add_norm(going_on, output, layer.before_mlp.weight, layer.before_mlp.epsilon)
    opened, up, product, thin_again = _gated(layer, normed)
    (result,), thin_product = Readers((layer.down,))(product)
    thin = Thin(thin_normed, thin_asking, thin_mixed, thin_again, thin_product)
    kept = Kept(
        added, inverse, query, key, value, raw_query, raw_key, mixed, lse, again, again_inverse, opened, up, thin
    )
    return result, kept


def _gated(layer: FusedLayer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`(gate, up, gated product, thin)`; gate and up lack what adapters add where the product's kernel adds it."""
    readers, adapters = Readers((layer.gate, layer.up)), layer.gate_adapters()
    if adapters is None:
        (opened, up), thin = readers(normed)
        return opened, up, gate(opened, up), thin
    thin = readers.thin(normed)
    assert thin is not None
    opened, up = (part(normed, None) for part in readers.parts)
    return opened, up, adapters.product(opened, up, thin), thin


def _normed_heads(x: Tensor, norm: FusedNorm | None) -> tuple[Tensor, Tensor | None]:
    """`(x normed by head, x)`, or `(x, None)` where the model does not do so; x is (N, heads, D)."""
    if norm is None:
        return x, None
    return add_norm(x.flatten(0, 1), None, norm.weight, norm.epsilon)[1].view(x.shape), x


def layer_backward(
    layer: FusedLayer,
    place: LayerPlace,
    kept: Kept,
    grad_hidden: Tensor,
    grad_change: Tensor,
    way: BackwardContext,
    *,
    wants_input: bool,
) -> Tensor | None:
    """(N, H) the gradient of hidden, and of change alike; None where it is not wanted."""
    grad_again = _mlp_backward(layer, kept, grad_hidden, grad_change, way)
    return _attention_backward(layer, place, kept, grad_again, way, wants_input)


def _mlp_backward(
    layer: FusedLayer, kept: Kept, grad_hidden: Tensor, grad_change: Tensor, way: BackwardContext
) -> Tensor:
    """(n, H) the gradient of what entered the second norm."""
    grad_change = grad_change.contiguous()
    reader, readers, norm = Readers((layer.down,)), Readers((layer.gate, layer.up)), layer.before_mlp
    narrow_down = reader.narrow([grad_change])
    product = torch.empty_like(kept.gate) if reader.learns() else None
    slopes, narrow = _gated_backward(layer, kept, grad_change, narrow_down, product)
    if product is not None:
        with way.aside(grad_change, product, kept, narrow_down):
            reader.learn(way.gradients, [grad_change], product, kept.thin.product, narrow_down)
    del product
    grad_normed = readers.grad_input(slopes, narrow)
    if readers.learns():
        with way.aside(slopes, kept, narrow):
            normed = add_norm(kept.again, None, norm.weight, norm.epsilon)[1]
            readers.learn(way.gradients, slopes, normed, kept.thin.again, narrow)
    return norm_backward(norm, grad_normed, grad_hidden, kept.again, kept.again_inverse, way)


def _gated_backward(
    layer: FusedLayer, kept: Kept, grad_change: Tensor, narrow_down: Tensor | None, product: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """`((d gate, d up), their narrow products)`; `product`, where there is one, is filled with the gated product."""
    reader, adapters = Readers((layer.down,)), layer.gate_adapters()
    if adapters is None:
        grad = reader.grad_input([grad_change], narrow_down)
        slopes = gate_backward(kept.gate, kept.up, grad, product)
        return slopes, Readers((layer.gate, layer.up)).narrow(slopes)
    assert kept.thin.again is not None
    apart = adapters.down is None  # what comes through the adapter of down is not the kernel's to add
    grad = reader.grad_input([grad_change], narrow_down if apart else None)
    found = adapters.backward(kept.gate, kept.up, kept.thin.again, grad, None if apart else narrow_down, product)
    return (found.gate, found.up), found.narrow


def _attention_backward(
    layer: FusedLayer, place: LayerPlace, kept: Kept, grad_again: Tensor, way: BackwardContext, wants_input: bool
) -> Tensor | None:
    """(N, H) the gradient of what entered the first norm; None where nobody wants it."""
    rows, norm, reader = place.rows, layer.before_attention, Readers((layer.output,))
    narrow = reader.narrow([grad_again])
    grad_mixed = reader.grad_input([grad_again], narrow)
    with way.aside(grad_again, kept, narrow):
        reader.learn(way.gradients, [grad_again], kept.mixed, kept.thin.mixed, narrow)
    grad_query, grad_key, grad_value = Attention.backward(
        grad_mixed, kept.query, kept.key, kept.value, kept.mixed, kept.lse, place.packing, rows, layer.scaling
    )
    rotate(grad_query, grad_key, place.asked, place.angles, -1.0)
    grad_query = _heads_backward(grad_query, kept.raw_query, layer.query_norm, way).flatten(1)
    grad_key = _heads_backward(grad_key, kept.raw_key, layer.key_norm, way).flatten(1)
    grads = [grad_query, grad_key, grad_value.flatten(1)]
    wants = wants_input or norm.weight.requires_grad
    readers, askers = layer.readers(rows)
    learns = readers.learns() or (askers is not None and askers.learns())
    with way.aside(kept):
        normed = add_norm(kept.added, None, norm.weight, norm.epsilon)[1] if learns else None
    of_asking: Tensor | None = None
    if askers is not None and rows is not None:
        with way.aside():
            asking = None if normed is None else normed.index_select(0, rows.tokens)
        of_asking = _read_backward(askers, [grads.pop(0)], asking, kept.thin.asking, way, wants)
    grad_normed = _read_backward(readers, grads, normed, kept.thin.normed, way, wants)
    if grad_normed is None:
        return None
    if rows is not None:
        assert of_asking is not None
        grad_normed.index_add_(0, rows.tokens, of_asking)
        grad_again = torch.zeros_like(grad_normed).index_copy_(0, rows.tokens, grad_again)
    return norm_backward(norm, grad_normed, grad_again, kept.added, kept.inverse, way)


def _read_backward(
    readers: Readers, grads: list[Tensor], x: Tensor | None, thin: Tensor | None, way: BackwardContext, wants: bool
) -> Tensor | None:
    """The gradient of what layers read, where it `wants` it; they learn where x, made aside, is given."""
    narrow = readers.narrow(grads)
    if x is not None:
        with way.aside(grads, thin, narrow):
            readers.learn(way.gradients, grads, x, thin, narrow)
    return readers.grad_input(grads, narrow) if wants else None


def norm_backward(
    norm: FusedNorm, grad_normed: Tensor, past: Tensor | None, added: Tensor, inverse: Tensor, way: BackwardContext
) -> Tensor:
    """The gradient of what entered a norm, `past` being what comes by the way past it."""
    grad, partial = add_norm_backward(grad_normed, past, added, norm.weight, inverse, norm.weight.requires_grad)
    if partial is not None:
        with way.aside(partial):
            way.gradients.add(norm.weight, column_sums(partial))
    return grad


def _heads_backward(grad: Tensor, raw: Tensor | None, norm: FusedNorm | None, way: BackwardContext) -> Tensor:
    """The gradient of heads (N, heads, D) before their norm."""
    if norm is None or raw is None:
        return grad
    flat = raw.flatten(0, 1)
    inverse = add_norm(flat, None, norm.weight, norm.epsilon)[2]
    return norm_backward(norm, grad.flatten(0, 1), None, flat, inverse, way).view(grad.shape)
