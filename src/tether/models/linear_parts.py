"""Linear layers, with adapters or without, forward and backward: no autograd in here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F

from tether.ops.deposit import Gradients


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b + scaling (x A^T) B^T, the last for an adapter. With dy = dL/dy, and the narrow s dy B:

    dx = dy W + narrow A,  dW = dy^T x,  dA = narrow^T x,  dB = s dy^T (x A^T).
    """

    weight: Tensor  # (out, in)
    bias: Tensor | None
    down: Tensor | None = None  # A (rank, in)
    up: Tensor | None = None  # B (out, rank)
    scaling: float = 1.0

    @classmethod
    def of(cls, module: nn.Module) -> Linear | None:
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
        return None if up.bias is not None else cls(
            base.weight, base.bias, layer.lora_A[name].weight, up.weight, float(layer.scaling[name])
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """All that it computes with."""
        return [tensor for tensor in (self.weight, self.bias, self.down, self.up) if tensor is not None]

    def learns(self) -> bool:
        """Whether any of it is trained."""
        return any(tensor.requires_grad for tensor in self.tensors())

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """`(y, x A^T)`: (N, out), and (N, rank) where there is an adapter."""
        y = F.linear(x, self.weight, self.bias)
        if self.down is None or self.up is None:
            return y, None
        thin = F.linear(x, self.down.to(x.dtype))
        return y.addmm_(thin, self.up.t().to(x.dtype), alpha=self.scaling), thin

    def narrow(self, grad: Tensor) -> Tensor | None:
        """(N, rank) s dy B, where there is an adapter."""
        return None if self.up is None else (grad @ self.up.to(grad.dtype)).mul_(self.scaling)

    def grad_input(self, total: Tensor | None, grad: Tensor, narrow: Tensor | None) -> Tensor:
        """total + dx, in place where there is a total."""
        total = grad @ self.weight if total is None else total.addmm_(grad, self.weight)
        if narrow is not None and self.down is not None:
            total.addmm_(narrow, self.down.to(grad.dtype))
        return total

    def learn(self, gradients: Gradients, grad: Tensor, narrow: Tensor | None, x: Tensor, thin: Tensor | None) -> None:
        """Add the gradients of what is trained."""
        if self.weight.requires_grad:
            gradients.add_product(self.weight, grad, x)
        if self.bias is not None and self.bias.requires_grad:
            gradients.add(self.bias, grad.sum(dim=0))
        if narrow is not None and thin is not None and self.down is not None and self.up is not None:
            if self.down.requires_grad:
                gradients.add_product(self.down, narrow, x)
            if self.up.requires_grad:
                gradients.add_product(self.up, grad, thin, self.scaling)
