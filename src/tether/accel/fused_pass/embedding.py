"""Embeddings on a CUDA device, whose gradient goes to the rows of the tokens that occur.

Autograd makes a gradient of the whole vocabulary for each micro-batch, nearly all of it zeros, and adds that to
`.grad`: four passes over V x H numbers, where three over those of the tokens that occur are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from tether.accel.fused_pass.fused_ops import add_rows
from tether.accel.gradient_accumulation import watched


def embedded(module: nn.Module, tokens: Tensor) -> Tensor:
    """(N, H) as the module gives them, for tokens (N,)."""
    if not torch.is_grad_enabled() or not _known(module):
        return module(tokens)
    return cast("Callable[..., Tensor]", _Embedded.apply)(module.weight, module, tokens)


def _known(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether it is a trained table whose rows lie one after another, and nobody looks at what passes through it."""
    if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return False
    if module._backward_hooks or module._backward_pre_hooks or not module.weight.requires_grad:
        return False
    return all(table is None or table.is_contiguous() for table in (module.weight, module.weight.grad))


class _Embedded(torch.autograd.Function):
    """y = W[token]: dW[token] is the sum of dy over the places of the token, and 0 for the padding token."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, module: nn.Embedding, tokens: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(tokens)
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (tokens,), weight = ctx.saved_tensors, ctx.module.weight
        skipped = -1 if ctx.module.padding_idx is None else ctx.module.padding_idx % len(weight)
        if watched(weight):
            total = torch.zeros_like(weight)
            add_rows(total, tokens, grad, skipped)
            return total, None, None
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        add_rows(weight.grad, tokens, grad, skipped)
        return None, None, None
