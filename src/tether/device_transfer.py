"""Tensors between host and device with as little waiting as is safe, and values cached per tensor.

Tensors on their way between the host and a device, with as little waiting as is safe.

Answers that are remembered for as long as what they are about lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

AT_ONCE = 64 * 1024  # bytes; the driver takes so many in at once, where more would wait until the device is free


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device, where later work finds it; the host goes on. What comes home is waited for.

    A copy to the host that nobody waits for arrives in pinned memory at some later time, and until then whatever lies
    there is read. In the other direction the order of work on the device is enough.
    """
    there = torch.device(device)
    if there.type != "cuda" or tensor.is_cuda:
        return tensor.to(there)
    # A pinned view would be copied to ordinary memory on its way, so its numbers are put side by side first.
    return (tensor.contiguous().pin_memory() if tensor.nbytes > AT_ONCE else tensor).to(there, non_blocking=True)


def at(device: torch.device) -> AbstractContextManager[object]:
    """Where kernels that are launched by hand run: Triton asks for the current device, not for the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def brought(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host; all are under way before any is waited for."""
    here = [tensor.to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return here


T = TypeVar("T")


class TensorCache(Generic[T]):
    """A function that remembers what it said of its first argument for as long as that lives.

    Where a batch's tokens stand is asked by every role, and on a device each answer makes the host wait. So this is
    for questions about frozen batches and their masks. Who knows an answer beforehand, because
    the batch was on the host a moment ago, can say it with `set`.
    """

    def __init__(self, find: Callable[..., T]) -> None:
        self.find = find
        self.__doc__ = find.__doc__
        self._known: Any = WeakIdKeyDictionary()

    def __call__(self, about: Any, *others: Any) -> T:
        """What `find` says; it is asked again of a tensor that was written to since."""
        known = self._known.get(about)
        if known is None or known[0] != _version(about):
            known = self._known[about] = (_version(about), self.find(about, *others))
        return known[1]

    def set(self, about: Any, answer: T) -> None:
        """What it will say."""
        self._known[about] = (_version(about), answer)


def _version(about: Any) -> int:
    """How often a tensor was written to; 0 of what keeps no count."""
    return about._version if isinstance(about, Tensor) and not about.is_inference() else 0


def tensor_cached(find: Callable[..., T]) -> TensorCache[T]:
    """`find` as a function that remembers."""
    return TensorCache(find)
