"""Device memory for the cache: sized from what is free, and handed back between calls at an address that stays.

Captured steps hold addresses. So the cache's range of addresses is reserved once, by the driver's own calls, and
memory is mapped into it for a call and taken out after it: the update phase has the memory, and no step is captured
again. This memory is not torch's: `torch.cuda.max_memory_allocated` does not count it, `Mapped.size` says it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

FREE_SHARE = 0.8  # of the free memory, for the cache; the rest is for reading prompts and for the work space
PINNED, ON_DEVICE, READ_AND_WRITE, OUT_OF_MEMORY = 1, 1, 3, 2  # the driver's names for them, as numbers


def free_memory(device: torch.device) -> int:
    """Bytes of the device that nobody holds, and those that torch holds and does not use."""
    if device.type != "cuda":
        return 1 << 62
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def slots_that_fit(slots: int, each: int, free: int) -> int:
    """How many of `slots` slots of `each` bytes lie within the cache's share of `free` bytes; at least 1."""
    return max(1, min(slots, int(FREE_SHARE * free) // each))


class _Property(ctypes.Structure):
    """What kind of memory is asked for: CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", ctypes.c_int),
        ("device", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """Who may read and write it: CUmemAccessDesc."""

    _fields_ = [("location", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class Mapped:
    """Memory of a CUDA device that can be handed back and taken again at the same address."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.driver: Any = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream(device).synchronize()  # a context must be there
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.index)
        self.property = _Property(PINNED, 0, ON_DEVICE, self.index)
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self.property), ctypes.c_int(0))
        self.size = -(-size // unit.value) * unit.value
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), self._bytes(), *[ctypes.c_uint64(0)] * 3)
        self.address: int = address.value
        self.mapped = False

    def take(self) -> None:
        """Put memory behind the address; OutOfMemoryError where there is not enough."""
        if self.mapped:
            return
        if torch.cuda.mem_get_info(self.device)[0] < self.size:
            torch.cuda.empty_cache()  # what torch holds and does not use
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), self._bytes(), ctypes.byref(self.property), ctypes.c_uint64(0))
        place = ctypes.c_uint64(self.address)
        self._call("cuMemMap", place, self._bytes(), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self._call("cuMemRelease", handle)  # the mapping holds the memory from here on
        access = _Access(ON_DEVICE, self.index, READ_AND_WRITE)
        self._call("cuMemSetAccess", place, self._bytes(), ctypes.byref(access), ctypes.c_size_t(1))
        self.mapped = True

    def hand_back(self) -> None:
        """Give the memory to the device; whatever reads the address now fails, until it is taken again."""
        if self.mapped:
            torch.cuda.synchronize(self.device)
            self._call("cuMemUnmap", ctypes.c_uint64(self.address), self._bytes())
            self.mapped = False

    def tensor(self) -> Tensor:
        """(size,) uint8 over all of it; made while the memory is there, and good whenever it is."""
        return torch.as_tensor(self, device=self.device)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.hand_back()
            self._call("cuMemAddressFree", ctypes.c_uint64(self.address), self._bytes())

    def _bytes(self) -> ctypes.c_size_t:
        return ctypes.c_size_t(self.size)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code == OUT_OF_MEMORY:
            raise torch.cuda.OutOfMemoryError(f"{name}: no {self.size / 2**30:.1f} GiB of device memory are free")
        if code:
            raise RuntimeError(f"{name} failed with the driver's code {code}")


class Lasting:
    """Memory of torch's, which is held for as long as this is."""

    mapped = True

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def take(self) -> None:
        """It is there."""

    def hand_back(self) -> None:
        """It goes with the object only."""

    def tensor(self) -> Tensor:
        """(size,) uint8 over all of it."""
        return self.bytes


def cache_memory(size: int, device: torch.device) -> Mapped | Lasting:
    """Room for a cache of `size` bytes, taken."""
    if device.type != "cuda":
        return Lasting(size, device)
    try:
        memory = Mapped(size, device)
    except (OSError, AttributeError, RuntimeError):  # a driver without these calls
        return Lasting(size, device)
    memory.take()
    return memory
