"""Gradients that a backward pass adds to `.grad` by itself, where autograd would make a copy first and add that."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def watched(tensor: Tensor) -> bool:
    """Whether a gradient has to pass through autograd: for a hook, or because the tensor is the result of others."""
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage]
    return not tensor.is_leaf or any(map(bool, hooks))


class Gradients:
    """Adds gradients to `.grad` at once; those that someone watches are handed back for autograd to deliver."""

    def __init__(self, trained: Sequence[Tensor]) -> None:
        self.trained = trained
        self._handed: dict[int, Tensor] = {}

    def add(self, tensor: Tensor, gradient: Tensor) -> None:
        """A gradient as it is, in the tensor's type or a wider one."""
        if watched(tensor):
            known, own = self._handed.get(id(tensor)), gradient.to(tensor.dtype)
            self._handed[id(tensor)] = own if known is None else known + own
        elif tensor.grad is None:
            tensor.grad = gradient.to(tensor.dtype)
        else:
            tensor.grad.add_(gradient)

    def add_product(self, tensor: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
        """factor * left^T right, where left is (N, out) and right (N, in)."""
        if tensor.grad is None or watched(tensor) or tensor.dtype != left.dtype:
            product = left.t() @ right
            self.add(tensor, product if factor == 1.0 else product.mul_(factor))
        else:
            tensor.grad.addmm_(left.t(), right, alpha=factor)

    def returned(self) -> list[Tensor | None]:
        """For each trained tensor, what was not added."""
        return [self._handed.get(id(tensor)) for tensor in self.trained] if self._handed else [None] * len(self.trained)
