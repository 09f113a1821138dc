"""What a decode step reads and writes, at addresses that never change: the cache, the slots, the work space.

Captured steps hold addresses. So the cache's range of addresses is reserved once, by the driver's own calls, and
memory is mapped into it for a call and taken out after it: the update phase has the memory, and no step is captured
again. This memory is not torch's: `torch.cuda.max_memory_allocated` does not count it, `Mapped.size` says it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from tether.accel.spec import DecoderSpec, Tables
from tether.device_transfer import sent

PROCESSORS = 132  # of the device that tiles were chosen on
PARTS = 8  # partial products that a linear layer's sum may come in
PART_ROWS = 256  # slots up to which all of them may be used
BLOCK = 1024  # ids of the vocabulary that are summed together before the search for a token
SPLITS = 16  # parts that a slot's cache may be read in
MAX_RANK = 64  # of an adapter that the kernels compute
FREE_SHARE = 0.8  # of the free memory, for the cache; the rest is for reading prompts and for the work space
PINNED, ON_DEVICE, READ_AND_WRITE, OUT_OF_MEMORY = 1, 1, 3, 2  # the driver's names for them, as numbers
ROWS = 128  # work space is padded to a multiple of this, so that a tile of rows is always inside


def on_device(numbers: list[list[int]] | list[int], device: torch.device) -> Tensor:
    """Host numbers as an int64 tensor on the device, without waiting for what runs there."""
    return sent(torch.tensor(numbers, dtype=torch.int64), device)


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


class Cache:
    """Keys and values, (layers, slots, K, T, D) each: a slot's tokens stand at columns 0, 1, 2, ... of T.

    `angles` has cos and sin, (T, D / 2) each, of the positions that columns are, for each rotary table.

    One length for all slots, and not pages: a batch of rollouts shares its limits, so pages would save little, and a
    slot read in a straight line is what the attention kernel is fastest at.
    """

    def __init__(self, spec: DecoderSpec, slots: int, length: int) -> None:
        shape = (2, len(spec.layers), slots, spec.kv_heads, length, spec.head_dim)
        size = slots * slot_bytes(spec, length)
        self.memory = cache_memory(size, spec.device)
        both = self.memory.tensor()[:size].view(spec.dtype).view(shape)
        self.keys, self.values = both[0], both[1]
        half = spec.head_dim // 2  # the second half of each row repeats the first
        self.angles: Tables = {
            kind: (cos[:, :half].contiguous(), sin[:, :half].contiguous())
            for kind, (cos, sin) in spec.angles(torch.arange(length, device=spec.device)).items()
        }
        self.clear()

    def clear(self) -> None:
        """Nothing but zeros: what lies past a slot's end is read by the plain kernels, with weight zero."""
        self.keys.zero_()
        self.values.zero_()


def slot_bytes(spec: DecoderSpec, length: int) -> int:
    """What the cache of one slot takes."""
    return 2 * len(spec.layers) * spec.kv_heads * length * spec.head_dim * spec.dtype.itemsize


class SlotState:
    """S running sequences: each one's next input, where it stands, and what it has drawn."""

    def __init__(self, slots: int, room: int, vocabulary: int, device: torch.device) -> None:
        """`room` is the most tokens that a sequence draws."""

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.tokens = integers(slots)  # the next input
        self.columns = integers(slots)  # the column it will be cached at
        self.drawn = integers(slots)
        self.limits = integers(slots)  # how many may be drawn
        self.live = torch.zeros(slots, dtype=torch.bool, device=device)
        self.uniforms = torch.ones(slots, room, dtype=torch.float64, device=device)  # one for each draw
        self.answers = integers(slots, room)
        self.behavior = torch.zeros(slots, room, dtype=torch.float32, device=device)
        self.untruncated = torch.zeros(slots, room, dtype=torch.float32, device=device)
        self.stops = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.temperature = torch.ones(1, dtype=torch.float32, device=device)
        self.top_k = torch.full((1,), vocabulary, dtype=torch.int32, device=device)
        self.top_p = torch.ones(1, dtype=torch.float32, device=device)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Slots change their places; the places they leave are idle."""
        columns = (self.tokens, self.columns, self.drawn, self.limits, self.live)
        for table in (*columns, self.uniforms, self.answers, self.behavior, self.untruncated):
            table[target] = table[source]
        self.live[source] = False


class StepWorkspace:
    """Room for one step's activations, token-major: (rows, features)."""

    def __init__(self, spec: DecoderSpec, slots: int) -> None:
        rows = -(-slots // ROWS) * ROWS
        features = spec.heads * spec.head_dim

        def empty(*shape: int, dtype: torch.dtype = spec.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=spec.device)

        self.hidden, self.normed = empty(rows, spec.hidden), empty(rows, spec.hidden)
        self.query, self.mixed = empty(rows, features), empty(rows, features)
        self.inner = empty(rows, spec.inner)
        self.parts = empty(max(PARTS * min(rows, PART_ROWS), rows), spec.hidden, dtype=torch.float32)
        # with many slots the parts of a sum are rounded as a linear layer's output would be: half as much to move
        self.rounded_parts = self.parts.view(spec.dtype).view(-1, spec.hidden)
        self.thin = empty(PARTS, rows, 3, MAX_RANK, dtype=torch.float32)  # adapters' inner states, in parts
        self.logits = empty(rows, spec.vocabulary)
        blocks = -(-spec.vocabulary // BLOCK)
        self.highest = empty(rows, blocks, dtype=torch.float32)  # by block of ids
        self.sums = empty(rows, blocks, dtype=torch.float32)
        self.kept = empty(rows, blocks, dtype=torch.float32)  # of the ids that top-k and top-p leave
        self.thresholds = empty(rows, dtype=torch.int32)
        splits = max(SPLITS, 4 * PROCESSORS // spec.kv_heads)
        self.partial = empty(splits, features, dtype=torch.float32)  # attention over parts of a slot, and their weights
        self.weights = empty(splits, spec.heads, 2, dtype=torch.float32)
