"""Decoder layers over packed tokens for a CUDA device, forward and backward written out: no autograd in here.

What only reads and writes is done by Triton kernels, each in one pass over its inputs; products stay with the library.
The gradient of a weight is added to `.grad` by the product that makes it, and gradients of one input by several
products likewise. A layer keeps for its backward pass what enters its two norms, queries, keys, values, what attention
mixed, gates and ups; normed states and the gated product are made again, in one cheap pass each.

Padding never exists: attention runs over rows laid end to end (torch's own flash attention, which groups query heads
over a key head by itself).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from tether.models.flash import Attention
from tether.models.fused_ops import add_norm, add_norm_backward, gate, gate_backward, rotate
from tether.models.linear_parts import Linear
from tether.models.packing import Packing, Rows
from tether.ops.deposit import Gradients


@dataclass(frozen=True)
class Norm:
    """An RMS norm: w x / sqrt(mean(x²) + ε)."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm | None:
        """None where there is no norm."""
        return None if module is None else cls(module.weight, module.variance_epsilon)


@dataclass(frozen=True)
class Layer:
    """What a decoder layer computes with; its tensors are the model's own."""

    before_attention: Norm
    before_mlp: Norm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    gate: Linear
    up: Linear
    down: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    width: int  # of a head
    scaling: float

    @classmethod
    def of(cls, layer: Any) -> Layer | None:
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
        found = {name: Linear.of(module) for name, module in modules.items()}
        if any(part is None for part in found.values()) or not isinstance(mlp.act_fn, nn.SiLU | SiLUActivation):
            return None
        norms = {"before_attention": layer.input_layernorm, "before_mlp": layer.post_attention_layernorm}
        norms |= {"query_norm": getattr(attention, "q_norm", None), "key_norm": getattr(attention, "k_norm", None)}
        parts: dict[str, Any] = found | {name: Norm.of(module) for name, module in norms.items()}
        return cls(**parts, width=attention.head_dim, scaling=attention.scaling)

    def trained(self) -> list[Tensor]:
        """The tensors that a gradient goes to."""
        norms = (self.before_attention, self.before_mlp, self.query_norm, self.key_norm)
        parts = (self.query, self.key, self.value, self.output, self.gate, self.up, self.down)
        tensors = [norm.weight for norm in norms if norm] + [tensor for part in parts for tensor in part.tensors()]
        return [tensor for tensor in tensors if tensor.requires_grad]


@dataclass(frozen=True)
class Place:
    """Where the tokens of a pass stand, and how much of it is kept."""

    packing: Packing
    rows: Rows | None  # the tokens that go on after attention; None for all
    angles: tuple[Tensor, Tensor]  # cos and sin, (N, D) each
    asked: tuple[Tensor, Tensor]  # the same of the tokens that go on


class Kept(NamedTuple):
    """What the backward pass reads; thin products of adapters stand behind the products they belong to."""

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
    thin: tuple[Tensor | None, ...]  # x A^T of query, key, value, output, gate, up, down


def layers_of(trunk: Any) -> list[Layer] | None:
    """The trunk's layers, or None where one of them is not known."""
    found = [Layer.of(layer) for layer in trunk.layers]
    return None if any(layer is None for layer in found) else cast("list[Layer]", found)


def layer_forward(layer: Layer, place: Place, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Kept]:
    """`(what the block adds to kept.again, what its backward pass reads)` of hidden + change (N, H).

    What a block adds is handed on apart, for the next norm to add it in the same pass.
    """
    rows, width = place.rows, layer.width
    added, normed, inverse = add_norm(hidden, change, layer.before_attention.weight, layer.before_attention.epsilon)
    asking, going_on = normed, added
    if rows is not None:
        asking, going_on = normed.index_select(0, rows.tokens), added.index_select(0, rows.tokens)
    query, thin_query = layer.query(asking)
    key, thin_key = layer.key(normed)
    value, thin_value = layer.value(normed)
    query, raw_query = _normed_heads(query.unflatten(-1, (-1, width)), layer.query_norm)
    key, raw_key = _normed_heads(key.unflatten(-1, (-1, width)), layer.key_norm)
    value = value.unflatten(-1, (-1, width))
    rotate(query, key, place.asked, place.angles, 1.0)
    mixed, lse = Attention.forward(query, key, value, place.packing, rows, layer.scaling)
    output, thin_output = layer.output(mixed)
    again, normed, again_inverse = add_norm(going_on, output, layer.before_mlp.weight, layer.before_mlp.epsilon)
    opened, thin_gate = layer.gate(normed)
    up, thin_up = layer.up(normed)
    result, thin_down = layer.down(gate(opened, up))
    thin = (thin_query, thin_key, thin_value, thin_output, thin_gate, thin_up, thin_down)
    kept = Kept(
        added, inverse, query, key, value, raw_query, raw_key, mixed, lse, again, again_inverse, opened, up, thin
    )
    return result, kept


def _normed_heads(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor | None]:
    """`(x normed by head, x)`, or `(x, None)` where the model does not do so; x is (N, heads, D)."""
    if norm is None:
        return x, None
    return add_norm(x.flatten(0, 1), None, norm.weight, norm.epsilon)[1].view(x.shape), x


def layer_backward(
    layer: Layer,
    place: Place,
    kept: Kept,
    grad_hidden: Tensor,
    grad_change: Tensor,
    gradients: Gradients,
    *,
    wants_input: bool,
) -> Tensor | None:
    """(N, H) the gradient of hidden, and of change alike; None where it is not wanted."""
    grad_again = _mlp_backward(layer, kept, grad_hidden, grad_change, gradients)
    return _attention_backward(layer, place, kept, grad_again, gradients, wants_input)


def _mlp_backward(layer: Layer, kept: Kept, grad_hidden: Tensor, grad_change: Tensor, gradients: Gradients) -> Tensor:
    """(n, H) the gradient of what entered the second norm."""
    *_, thin_gate, thin_up, thin_down = kept.thin
    grad_change = grad_change.contiguous()
    narrow = layer.down.narrow(grad_change)
    grad_product = layer.down.grad_input(None, grad_change, narrow)
    product = torch.empty_like(kept.gate) if layer.down.learns() else None
    grad_gate, grad_up = gate_backward(kept.gate, kept.up, grad_product, product)
    if product is not None:
        layer.down.learn(gradients, grad_change, narrow, product, thin_down)
    del product, grad_product
    norm = layer.before_mlp
    normed = None
    if layer.gate.learns() or layer.up.learns():
        normed = add_norm(kept.again, None, norm.weight, norm.epsilon)[1]
    grad_normed: Tensor | None = None
    for part, grad, thin in ((layer.gate, grad_gate, thin_gate), (layer.up, grad_up, thin_up)):
        narrow = part.narrow(grad)
        grad_normed = part.grad_input(grad_normed, grad, narrow)
        if normed is not None:
            part.learn(gradients, grad, narrow, normed, thin)
    assert grad_normed is not None
    return norm_backward(norm, grad_normed, grad_hidden, kept.again, kept.again_inverse, gradients)


def _attention_backward(
    layer: Layer, place: Place, kept: Kept, grad_again: Tensor, gradients: Gradients, wants_input: bool
) -> Tensor | None:
    """(N, H) the gradient of what entered the first norm; None where nobody wants it."""
    thin_query, thin_key, thin_value, thin_output, *_ = kept.thin
    rows, norm = place.rows, layer.before_attention
    narrow = layer.output.narrow(grad_again)
    grad_mixed = layer.output.grad_input(None, grad_again, narrow)
    layer.output.learn(gradients, grad_again, narrow, kept.mixed, thin_output)
    grad_query, grad_key, grad_value = Attention.backward(
        grad_mixed, kept.query, kept.key, kept.value, kept.mixed, kept.lse, place.packing, rows, layer.scaling
    )
    rotate(grad_query, grad_key, place.asked, place.angles, -1.0)
    grad_query = _heads_backward(grad_query, kept.raw_query, layer.query_norm, gradients).flatten(1)
    grad_key = _heads_backward(grad_key, kept.raw_key, layer.key_norm, gradients).flatten(1)
    wants = wants_input or norm.weight.requires_grad
    learns = layer.query.learns() or layer.key.learns() or layer.value.learns()
    normed = add_norm(kept.added, None, norm.weight, norm.epsilon)[1] if learns else None
    asking = normed if normed is None or rows is None else normed.index_select(0, rows.tokens)
    totals: list[Tensor | None] = [None, None]  # of all tokens, and of those that went on where they are fewer
    for part, grad, x, thin, which in (
        (layer.query, grad_query, asking, thin_query, 0 if rows is None else 1),
        (layer.key, grad_key, normed, thin_key, 0),
        (layer.value, grad_value.flatten(1), normed, thin_value, 0),
    ):
        narrow = part.narrow(grad)
        if wants:
            totals[which] = part.grad_input(totals[which], grad, narrow)
        if x is not None:
            part.learn(gradients, grad, narrow, x, thin)
    grad_normed, of_asking = totals
    if grad_normed is None:
        return None
    if rows is not None:
        assert of_asking is not None
        grad_normed.index_add_(0, rows.tokens, of_asking)
        grad_again = torch.zeros_like(grad_normed).index_copy_(0, rows.tokens, grad_again)
    return norm_backward(norm, grad_normed, grad_again, kept.added, kept.inverse, gradients)


def norm_backward(
    norm: Norm, grad_normed: Tensor, past: Tensor | None, added: Tensor, inverse: Tensor, gradients: Gradients
) -> Tensor:
    """The gradient of what entered a norm, `past` being what comes by the way past it."""
    grad, grad_weight = add_norm_backward(grad_normed, past, added, norm.weight, inverse, norm.weight.requires_grad)
    if grad_weight is not None:
        gradients.add(norm.weight, grad_weight)
    return grad


def _heads_backward(grad: Tensor, raw: Tensor | None, norm: Norm | None, gradients: Gradients) -> Tensor:
    """The gradient of heads (N, heads, D) before their norm."""
    if norm is None or raw is None:
        return grad
    flat = raw.flatten(0, 1)
    inverse = add_norm(flat, None, norm.weight, norm.epsilon)[2]
    return norm_backward(norm, grad.flatten(0, 1), None, flat, inverse, gradients).view(grad.shape)
