"""Copy tensors between host and device with as little waiting as is safe, and cache values per tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

AT_ONCE = 64 * 1024  # bytes; the driver buffers a copy up to this size, and a larger one waits for the device


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without blocking the host; a copy to the host waits until it is complete.

    A non-blocking copy to pinned host memory finishes at some later time, and until then the host reads old bytes. In
    the other direction the order of work on the device's stream is enough.
    """
    there = torch.device(device)
    if there.type != "cuda" or tensor.is_cuda:
        return tensor.to(there)
    # A pinned view would first be copied to pageable memory, so make it contiguous.
    return (tensor.contiguous().pin_memory() if tensor.nbytes > AT_ONCE else tensor).to(there, non_blocking=True)


def at(device: torch.device) -> AbstractContextManager[object]:
    """Make a device current for kernels launched by hand: Triton uses the current device, not the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def brought(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the host; all copies are started before the first one is waited for."""
    here = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return here


# -- values cached per tensor -------------------------------------------------------------------------------------

T = TypeVar("T")


class TensorCache(Generic[T]):
    """A function whose result is cached for as long as its first argument lives.

    Use it for facts about frozen batches and their masks, such as the positions of the response tokens: every role
    needs them, and computing them on a device makes the host wait. `set` stores a result that was already computed on
    the host.
    """

    def __init__(self, find: Callable[..., T]) -> None:
        self.find = find
        self.__doc__ = find.__doc__
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, about: Any, *others: Any) -> T:
        """The cached result of `find`; computed again if the tensor was written to in place."""
        known = self._known.get(about)
        if known is None or known[0] != _version(about):
            known = self._known[about] = (_version(about), self.find(about, *others))
        return known[1]

    def set(self, about: Any, answer: T) -> None:
        """Store the result for `about`."""
        self._known[about] = (_version(about), answer)


def _version(about: Any) -> int:
    """The version counter of a tensor, which counts in-place writes; 0 for an object without one."""
    return about._version if isinstance(about, Tensor) and not about.is_inference() else 0


def tensor_cached(find: Callable[..., T]) -> TensorCache[T]:
    """Decorator: cache the results of `find` per first argument."""
    return TensorCache(find)
