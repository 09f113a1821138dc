"""A trunk's pass over packed tokens, for Llama and its relatives: Mistral, Qwen2 and Qwen3.

Rows of a batch differ in length, and most of a layer's work (products, norms, activations) looks at one token at a
time. So padding is taken out before the first layer, and put back only for attention, on the right, where causality
hides it. The last layer finds keys and values of every token, but goes on only with the tokens that are wanted: those
before a sampled token for a policy, the last one for a reward model.

The weights are the model's own modules', called as they are, so adapters and tops work alike. Norms and rotary
positions have backward passes written out: on a CPU, where memory bounds them, that halves what autograd reads
and writes. They have no second derivative; `hidden_states` in `forward.py` has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tether.types import Sequences


@dataclass(frozen=True)
class Packing:
    """Where the N real tokens of a (B, T) batch stand, and where they stand with all padding on the right (B, L)."""

    shape: tuple[int, int]  # (B, T)
    places: Tensor  # (N,) in the batch, flat, row after row
    positions: Tensor  # (N,) each token's number in its row
    longest: int  # L
    padded: Tensor | None  # (N,) among the B * L places with padding on the right; None where no row is padded
    sources: Tensor | None  # (B * L,) the token at each of those places, any one on padding

    @classmethod
    def of(cls, mask: Tensor) -> Packing:
        """From the attention mask (B, T); each row's real tokens stand together."""
        places = mask.flatten().nonzero()[:, 0]
        lengths = mask.sum(dim=1)
        longest = int(lengths.max()) if mask.numel() else 0
        positions = (mask.cumsum(dim=1) - 1)[mask]
        if len(places) == mask.shape[0] * longest:
            return cls((mask.shape[0], mask.shape[1]), places, positions, longest, None, None)
        rows = torch.arange(len(mask), device=mask.device).repeat_interleave(lengths)
        padded = rows * longest + positions
        sources = torch.zeros(len(mask) * longest, dtype=torch.long, device=mask.device)
        sources[padded] = torch.arange(len(places), device=mask.device)
        return cls((mask.shape[0], mask.shape[1]), places, positions, longest, padded, sources)

    def pack(self, x: Tensor) -> Tensor:
        """(N, ...) the real tokens of x (B, T, ...)."""
        return x.flatten(0, 1).index_select(0, self.places)

    def unpack(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        """(B, T, H) of x (N, H), or of x (n, H) at the n `tokens` of the packing; 0 elsewhere."""
        places = self.places if tokens is None else self.places[tokens]
        flat = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1])
        return flat.index_copy(0, places, x).view(*self.shape, -1)

    def for_attention(self, x: Tensor) -> Tensor:
        """(B, heads, L, D) of x (N, heads, D); what stands on padding is any token's."""
        if self.padded is not None:
            assert self.sources is not None
            x = _reorder(x, self.sources, self.padded)
        return x.view(self.shape[0], self.longest, *x.shape[1:]).transpose(1, 2)

    def from_attention(self, x: Tensor) -> Tensor:
        """(N, heads * D) of x (B, heads, L, D)."""
        flat = x.transpose(1, 2).reshape(self.shape[0] * self.longest, -1)
        return flat if self.padded is None else flat.index_select(0, self.padded)


def packed_states(
    trunk: Any, batch: Sequences, embeddings: Tensor | None = None, wanted: Tensor | None = None
) -> Tensor:
    """(B, T, H) the trunk's hidden states after its last layer and norm; 0 on padding and on what is not wanted.

    `embeddings` (B, T, H), where given, stand in place of those of the batch's tokens. `wanted` (B, T) bool says whose
    states will be read; by default those of all real tokens.
    """
    packing = Packing.of(batch.attention_mask)
    tokens = None if wanted is None else packing.pack(wanted & batch.attention_mask).nonzero()[:, 0]
    hidden = packing.pack(embeddings) if embeddings is not None else trunk.embed_tokens(packing.pack(batch.tokens))
    cos, sin = trunk.rotary_emb(hidden, packing.positions[None])
    angles = cos[0, :, None], sin[0, :, None]  # (N, 1, D) each
    layers = list(trunk.layers)
    for index, layer in enumerate(layers):
        hidden = _layer(layer, hidden, angles, packing, tokens if index + 1 == len(layers) else None)
    if not layers and tokens is not None:
        hidden = hidden.index_select(0, tokens)
    return packing.unpack(_norm(trunk.norm, hidden), tokens)


def _layer(
    layer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor], packing: Packing, tokens: Tensor | None
) -> Tensor:
    """(N, H) after one block, or (n, H) of the n `tokens` alone."""
    attention, mlp = layer.self_attn, layer.mlp
    normed = _norm(layer.input_layernorm, hidden)
    asking, hidden_asking = (normed, hidden) if tokens is None else (normed[tokens], hidden[tokens])
    query = _heads(attention.q_proj(asking), attention.head_dim, getattr(attention, "q_norm", None))
    key = _heads(attention.k_proj(normed), attention.head_dim, getattr(attention, "k_norm", None))
    value = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim))
    own = angles if tokens is None else (angles[0][tokens], angles[1][tokens])
    mixed = _attend(_rotate(query, *own), _rotate(key, *angles), value, packing, tokens, attention.scaling)
    hidden = hidden_asking + attention.o_proj(mixed)
    normed = _norm(layer.post_attention_layernorm, hidden)
    return hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, tokens: Tensor | None, scaling: float
) -> Tensor:
    """(n, heads * D) causal attention of the query tokens to their rows."""
    if tokens is not None:
        everywhere = query.new_zeros(len(packing.places), *query.shape[1:])
        query = everywhere.index_copy(0, tokens, query)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    mixed = packing.from_attention(
        F.scaled_dot_product_attention(
            packing.for_attention(query),
            packing.for_attention(key),
            packing.for_attention(value),
            is_causal=True,
            scale=scaling,
        )
    )
    return mixed if tokens is None else mixed.index_select(0, tokens)


def _heads(x: Tensor, width: int, norm: nn.Module | None) -> Tensor:
    """(N, heads, D), normed by head where the model does so."""
    x = x.unflatten(-1, (-1, width))
    return x if norm is None else norm(x)


def _norm(module: Any, x: Tensor) -> Tensor:
    """The module's RMS norm of x (N, H); what stands in a cut trunk where a norm was passes x on."""
    return x if isinstance(module, nn.Identity) else _apply(_RMSNorm, x, module.weight, module.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (N, heads, D): pairs (i, i + D/2) turned by the angles of cos and sin, (N, 1, D) each."""
    return _apply(_Rotate, x, cos, sin)


def _reorder(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """x[order], where `back` finds each of x's rows once among those, and the other copies are never read."""
    return _apply(_Reorder, x, order, back)


def _apply(function: Any, *arguments: Any) -> Tensor:
    return cast("Callable[..., Tensor]", function.apply)(*arguments)


class _RMSNorm(torch.autograd.Function):
    """y = w x / r with r = sqrt(mean(x²) + ε), so with g = dL/dy and u = x / r:

    dL/dw = sum over tokens of g u,    dL/dx = (g w - u mean(g w u)) / r.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        inverse = (x * x).mean(dim=-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse
        product = grad * unit
        grad_weight = product.sum(dim=0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        mean = torch.mv(product, weight).div_(x.shape[-1]).unsqueeze(-1)
        return (grad * weight).sub_(unit.mul_(mean)).mul_(inverse), grad_weight, None


class _Rotate(torch.autograd.Function):
    """A rotation; backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: float) -> Tensor:
    half = x.shape[-1] // 2
    turned = x * cos
    turned[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-way)
    turned[..., half:].addcmul_(x[..., :half], sin[..., half:], value=way)
    return turned


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
