"""Where a backward pass puts the gradients of weights: into `.grad` by itself, in a captured pass on a side stream.

Autograd would make a copy of each gradient first and add that.

A layer's backward pass is a chain: products, and between them short kernels that read and write much and compute
little. The gradients of its weights branch off that chain. Nothing waits for them before the pass ends, and they fill
what the chain leaves idle. They read tensors that the chain has done with, whose memory must not be used again before
that: those of a layer are held until the next layer's chain is through, which then waits for its work.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
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


@cache
def capture_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """`(chain, side)` to capture on, a device's only ones: where both could go on, the chain's kernels do.

    Whatever is put on them during a capture is captured, so only what captures may use them, one at a time.
    """
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For the length of a capture: to free another graph, as the collector may at any time, makes the capture fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class SideStream:
    """The side stream of one backward pass; without a stream, what is meant for it runs at once."""

    def __init__(self, side: torch.cuda.Stream | None = None) -> None:
        self._side = side
        self._held: list[object] = []
        self._before: tuple[Any, list[object]] | None = None  # the end of the layer before, and what it reads

    @contextmanager
    def __call__(self, *read: object) -> Iterator[None]:
        """Run what is inside on the side, after everything the chain has done so far; hold `read` until it has run."""
        if self._side is None:
            yield
            return
        self._held.extend(read)
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield

    def next_layer(self) -> None:
        """Wait for the side's work of the layer before, and let go of what it read."""
        if self._side is None or not self._held:
            return
        own = self._side.record_event(), self._held
        if self._before is not None:
            torch.cuda.current_stream(self._side.device).wait_event(self._before[0])
        self._before, self._held = own, []

    def join(self) -> None:
        """Wait for all of the side's work."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._held, self._before = [], None


class BackwardContext(NamedTuple):
    """Where a backward pass puts the gradients of weights."""

    gradients: Gradients
    side: SideStream
