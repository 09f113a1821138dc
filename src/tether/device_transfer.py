"""Tensors on their way between the host and a device, with as little waiting as is safe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

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
