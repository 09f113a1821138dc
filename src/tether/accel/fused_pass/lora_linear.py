"""Linear layers, with adapters or without, forward and backward: no autograd in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F

from tether.accel.gradient_accumulation import Gradients


@dataclass(frozen=True)
class LoraAdapter:
    """Adds s (x A^T) B^T to what its layer makes of x.

    Its two products of a token's width are called thin, x A^T, and narrow, s dy B: (N, rank) both.
    """

    down: Tensor  # A (rank, in)
    up: Tensor  # B (out, rank)
    scaling: float  # s

    @property
    def rank(self) -> int:
        """Numbers of a token between A and B."""
        return self.down.shape[0]


@dataclass(frozen=True)
class AdaptedLinear:
    """y = x W^T + b + thin B^T s, the last for an adapter."""

    weight: Tensor  # (out, in)
    bias: Tensor | None
    adapter: LoraAdapter | None = None

    @classmethod
    def of(cls, module: nn.Module) -> AdaptedLinear | None:
        """None where the module may do more than this says."""
        if type(module) is nn.Linear:
            return cls(module.weight, module.bias)
        if type(module) is not LoraLinear or type(module.base_layer) is not nn.Linear:
            return None
        layer: Any = module
        active = list(layer.active_adapters)
        if layer.disable_adapters or layer.merged or layer.lora_variant or len(active) != 1:
            return None
        name, base = active[0], layer.base_layer
        if name not in layer.lora_A or not isinstance(layer.lora_dropout[name], nn.Identity):
            return None
        up = layer.lora_B[name]
        if up.bias is not None:
            return None
        return cls(
            base.weight, base.bias, LoraAdapter(layer.lora_A[name].weight, up.weight, float(layer.scaling[name]))
        )

    def tensors(self) -> list[Tensor]:
        """All that it computes with."""
        own = (self.weight, self.bias, *(() if self.adapter is None else (self.adapter.down, self.adapter.up)))
        return [tensor for tensor in own if tensor is not None]

    def learns(self) -> bool:
        """Whether any of it is trained."""
        return any(tensor.requires_grad for tensor in self.tensors())

    def __call__(self, x: Tensor, thin: Tensor | None) -> Tensor:
        """(N, out) y; without a thin product, what the layer gives without its adapter."""
        y = F.linear(x, self.weight, self.bias)
        if self.adapter is None or thin is None:
            return y
        return y.addmm_(thin, self.adapter.up.t().to(x.dtype), alpha=self.adapter.scaling)

    def learn(self, gradients: Gradients, grad: Tensor, x: Tensor, thin: Tensor | None) -> None:
        """Add the gradients of what is trained, but A: dW = dy^T x, dB = s dy^T thin."""
        if self.weight.requires_grad:
            gradients.add_product(self.weight, grad, x)
        if self.bias is not None and self.bias.requires_grad:
            gradients.add(self.bias, grad.sum(dim=0))
        if self.adapter is not None and thin is not None and self.adapter.up.requires_grad:
            gradients.add_product(self.adapter.up, grad, thin, self.adapter.scaling)


@dataclass(frozen=True)
class Readers:
    """Linear layers that read the same x, so that what their adapters do with it is one product for all of them.

    With A on A below each other, (R, in) for R the sum of the ranks, and thin and narrow products side by side, (N, R):

        thin = x A^T,    dx = sum of dy W + narrow A,    dA = narrow^T x.
    """

    parts: tuple[AdaptedLinear, ...]

    def __call__(self, x: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """`(y of each layer, thin)`."""
        thin = self.thin(x)
        return [part(x, own) for part, own in zip(self.parts, self.columns(thin), strict=True)], thin

    def learns(self) -> bool:
        """Whether any of them is trained."""
        return any(part.learns() for part in self.parts)

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
        total = grads[0] @ self.parts[0].weight
        for part, grad in zip(self.parts[1:], grads[1:], strict=True):
            total.addmm_(grad, part.weight)
        return total if narrow is None else total.addmm_(narrow, self._stacked(total.dtype))

    def learn(
        self, gradients: Gradients, grads: Sequence[Tensor], x: Tensor, thin: Tensor | None, narrow: Tensor | None
    ) -> None:
        """Add the gradients of what is trained."""
        for part, grad, own in zip(self.parts, grads, self.columns(thin), strict=True):
            part.learn(gradients, grad, x, own)
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
