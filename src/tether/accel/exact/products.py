"""Products, activations and norms whose result for a token does not depend on the tokens beside it.

A library chooses the order of the sums in a matrix product by its shape, so one token multiplied alone and the same
token among a hundred others may differ in the last bit. Here tokens go through a weight in tiles of exactly `ROWS`, the
last one filled up with zeros: every product with a weight is the same call on the same shape. Torch's vectorised SiLU
and GELU round the numbers at the end of a tensor differently from those in its middle; exp and tanh do not, so both
activations are written with these. Sums over a row's features, division and square roots do not depend on the row's
place. `exact_pass.misplaced` tries this for the shapes of a model before a run relies on it.

Backward passes are ordinary products: a gradient needs to be right, not the same in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from tether.accel.spec import Layer, Linear

ROWS = 32  # tokens in a tile
# Outputs that a weight has at least, zeros added: products with 1 to 10 outputs depend on a token's place in the tile
# for some widths (measured on an AMD EPYC), as those of a LoRA adapter of rank 1 do.
LEAST = 16


def tiled(x: Tensor, weight: Tensor) -> Tensor:
    """(N, out) x Wᵀ for x (N, in) and W (out, in), in tiles of `ROWS` tokens."""
    if len(weight) < LEAST:
        return tiled(x, torch.cat((weight, weight.new_zeros(LEAST - len(weight), weight.shape[1]))))[:, : len(weight)]
    x = x.contiguous()
    count, width = x.shape
    whole = count - count % ROWS
    out = x.new_empty(count, len(weight))
    turned = weight.t()
    if whole:
        _tiles(x[:whole], turned, out[:whole])
    if whole < count:
        last, found = x.new_zeros(ROWS, width), x.new_empty(ROWS, len(weight))
        last[: count - whole] = x[whole:]
        _tiles(last, turned, found)
        out[whole:] = found[: count - whole]
    return out


def _tiles(x: Tensor, turned: Tensor, out: Tensor) -> None:
    """out (n ROWS, out) = x (n ROWS, in) times `turned` (in, out), a batch of n products of one shape."""
    tiles = len(x) // ROWS
    each = turned.expand(tiles, *turned.shape)
    torch.bmm(x.view(tiles, ROWS, -1), each, out=out.view(tiles, ROWS, -1))


class _Product(torch.autograd.Function):
    """y = x Wᵀ, so with g = dL/dy: dL/dx = g W and dL/dW = gᵀ x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return tiled(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            grad.t() @ x if ctx.needs_input_grad[1] else None,
        )


def product(x: Tensor, weight: Tensor) -> Tensor:
    """(N, out) x Wᵀ in tiles, differentiable once."""
    return cast("Callable[..., Tensor]", _Product.apply)(x, weight)


def linear(part: Linear, x: Tensor) -> Tensor:
    """(N, out) of x (N, in): the weight, then the bias, then the adapter."""
    assert part.weight is not None, "supported.exact_unsupported lets no such layer through"
    out = product(x, part.weight)
    if part.bias is not None:
        out = out + part.bias
    if part.adapter is not None:
        out = out + part.adapter.scaling * product(product(x, part.adapter.down), part.adapter.up)
    return out


class _SiLU(torch.autograd.Function):
    """y = x s with s = 1 / (1 + exp(-x)), so dy/dx = s (1 + x (1 - s))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / x.neg().exp_().add_(1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ops.aten.silu_backward(grad, ctx.saved_tensors[0])


class _GELU(torch.autograd.Function):
    """y = x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        inner = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(0.7978845608028654)
        return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ops.aten.gelu_backward(grad, ctx.saved_tensors[0], approximate="tanh")


def activated(layer: Layer, gate: Tensor) -> Tensor:
    """act(gate)."""
    kind = {"silu": _SiLU, "gelu_tanh": _GELU}[cast("str", layer.activation_kind)]
    return cast("Callable[..., Tensor]", kind.apply)(gate)
