"""Linear layers, with adapters or without, and embeddings, forward and backward: the layers' own parts use no autograd.

Autograd makes a gradient of the whole vocabulary for each micro-batch, nearly all of it zeros, and adds that to
`.grad`: four passes over V x H numbers, where three over the rows of the tokens that occur are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tether.accel.fused_pass.gradient_accumulation import Gradients, watched
from tether.accel.kernels.norm import add_rows
from tether.accel.spec import Embedding, Linear, LoraAdapter


def linear(part: Linear, x: Tensor, thin: Tensor | None) -> Tensor:
    """(N, out) y; without a thin product, what the layer gives without its adapter."""
    assert part.weight is not None
    y = F.linear(x, part.weight, part.bias)
    if part.adapter is None or thin is None:
        return y
    return y.addmm_(thin, part.adapter.up.t().to(x.dtype), alpha=part.adapter.scaling)


def learn(part: Linear, gradients: Gradients, grad: Tensor, x: Tensor, thin: Tensor | None) -> None:
    """Add the gradients of what is trained, except A: dW = dy^T x, db = sum of dy, dB = s dy^T thin."""
    if part.weight is not None and part.weight.requires_grad:
        gradients.add_product(part.weight, grad, x)
    if part.bias is not None and part.bias.requires_grad:
        gradients.add(part.bias, grad.sum(dim=0))
    if part.adapter is not None and thin is not None and part.adapter.up.requires_grad:
        gradients.add_product(part.adapter.up, grad, thin, part.adapter.scaling)


@dataclass(frozen=True)
class Readers:
    """Linear layers that read the same x, so that what their adapters do with it is one product for all of them.

    With A on A below each other, (R, in) for R the sum of the ranks, and thin and narrow products side by side, (N, R):

        thin = x A^T,    dx = sum of dy W + narrow A,    dA = narrow^T x.
    """

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """`(y of each layer, thin)`."""
        thin = self.thin(x)
        return [linear(part, x, own) for part, own in zip(self.parts, self.columns(thin), strict=True)], thin

    def learns(self) -> bool:
        """Whether any of them is trained."""
        return any(tensor.requires_grad for part in self.parts for tensor in part.tensors())

    def thin(self, x: Tensor) -> Tensor | None:
        """(N, R) x A^T, where there is an adapter."""
        return F.linear(x, self._stacked(x.dtype)) if self._adapters() else None

    def narrow(self, grads: Sequence[Tensor]) -> Tensor | None:
        """(N, R) s dy B of each layer's dy, where there is an adapter."""
        if not self._adapters():
            return None
        narrow = grads[0].new_empty(len(grads[0]), sum(self._ranks()))
        for part, grad, own in zip(self.parts, grads, self.columns(narrow), strict=True):
            if part.adapter is not None and own is not None:
                own.addmm_(grad, part.adapter.up.to(grad.dtype), beta=0, alpha=part.adapter.scaling)
        return narrow

    def columns(self, beside: Tensor | None) -> list[Tensor | None]:
        """Each layer's own (N, rank) of thin or narrow products; None for one without an adapter."""
        if beside is None:
            return [None] * len(self.parts)
        return [own if own.shape[1] else None for own in beside.split(self._ranks(), dim=1)]

    def grad_input(self, grads: Sequence[Tensor], narrow: Tensor | None) -> Tensor:
        """(N, in) dx; without a narrow product, what comes through the weights alone."""
        first, *others = (part.weight for part in self.parts)
        assert first is not None
        total = grads[0] @ first
        for weight, grad in zip(others, grads[1:], strict=True):
            assert weight is not None
            total.addmm_(grad, weight)
        return total if narrow is None else total.addmm_(narrow, self._stacked(total.dtype))

    def learn(
        self, gradients: Gradients, grads: Sequence[Tensor], x: Tensor, thin: Tensor | None, narrow: Tensor | None
    ) -> None:
        """Add the gradients of what is trained."""
        for part, grad, own in zip(self.parts, grads, self.columns(thin), strict=True):
            learn(part, gradients, grad, x, own)
        adapters = self._adapters()
        if narrow is None or not any(adapter.down.requires_grad for adapter in adapters):
            return
        if len(adapters) == 1:
            gradients.add_product(adapters[0].down, narrow, x)
            return
        for adapter, own in zip(adapters, (narrow.t() @ x).split([adapter.rank for adapter in adapters]), strict=True):
            if adapter.down.requires_grad:
                gradients.add(adapter.down, own)

    def _adapters(self) -> list[LoraAdapter]:
        return [part.adapter for part in self.parts if part.adapter is not None]

    def _ranks(self) -> list[int]:
        return [0 if part.adapter is None else part.adapter.rank for part in self.parts]

    def _stacked(self, dtype: torch.dtype) -> Tensor:
        """(R, in) A of every adapter."""
        downs = [adapter.down for adapter in self._adapters()]
        return (downs[0] if len(downs) == 1 else torch.cat(downs)).to(dtype)


def embedded(embedding: Embedding, tokens: Tensor) -> Tensor:
    """(N, H) as the embedding gives them, for tokens (N,)."""
    if not torch.is_grad_enabled() or not _trains_rows(embedding):
        return embedding(tokens)
    return cast("Callable[..., Tensor]", _Embedded.apply)(embedding.table, embedding, tokens)


def _trains_rows(embedding: Embedding) -> bool:
    """Whether it is a trained table whose rows lie one after another, and no hook sees what passes through it."""
    module, table = embedding.module, embedding.table
    if table is None or not isinstance(module, nn.Embedding) or module.scale_grad_by_freq or module.sparse:
        return False
    if module._backward_hooks or module._backward_pre_hooks or not table.requires_grad:
        return False
    return all(part is None or part.is_contiguous() for part in (table, table.grad))


class _Embedded(torch.autograd.Function):
    """y = s W[token]: dW[token] is the sum of s dy over the places of the token, and 0 for the padding token."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, embedding: Embedding, tokens: Tensor) -> Tensor:
        ctx.embedding = embedding
        ctx.save_for_backward(tokens)
        found = nn.functional.embedding(tokens, weight)
        return found if embedding.scale == 1.0 else found * embedding.scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (tokens,), weight, padding = ctx.saved_tensors, ctx.embedding.table, ctx.embedding.module.padding_idx
        grad = grad if ctx.embedding.scale == 1.0 else grad * ctx.embedding.scale
        skipped = -1 if padding is None else padding % len(weight)
        if watched(weight):
            total = torch.zeros_like(weight)
            add_rows(total, tokens, grad, skipped)
            return total, None, None
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        add_rows(weight.grad, tokens, grad, skipped)
        return None, None, None
