"""Norms, rotary positions and attention over packed tokens in plain torch, with autograd: what a CPU runs.

Norms and rotary positions have backward passes written out: where memory bounds them, that halves what autograd reads
and writes. They have no second derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tether.ops.masks import Packing, Rows


def norm(module: Any, x: Tensor) -> Tensor:
    """The module's RMS norm of x (N, H); what stands in a cut backbone where a norm was passes x on."""
    return x if isinstance(module, nn.Identity) else _apply(_RMSNorm, x, module.weight, module.variance_epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (N, heads, D): pairs (i, i + D/2) turned by the angles of cos and sin, (N, 1, D) each."""
    return _apply(_Rotate, x, cos, sin)


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, rows: Rows | None, scaling: float) -> Tensor:
    """(n, heads * D) causal attention of the query tokens to their rows: of all N, or of the n that `rows` names."""
    if rows is not None:
        everywhere = query.new_zeros(len(packing.places), *query.shape[1:])
        query = everywhere.index_copy(0, rows.tokens, query)
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
    return mixed if rows is None else mixed.index_select(0, rows.tokens)


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
