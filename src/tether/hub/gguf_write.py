"""Writing GGUF files: metadata, and tensors as F32, F16 or Q8_0. `gguf.py` describes the format and reads it.

Tensors are encoded one at a time as they are written, so that a file never has to fit into memory.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from tether.errors import DataError
from tether.hub.gguf import ALIGNMENT, ARRAY, KINDS, MAGIC, SCALARS, STRING

VERSION = 3
CODES = {"B": 0, "i": 5, "I": 4, "f": 6, "?": 7}  # of Python's struct -> GGUF's type number
F32, F16, Q8_0 = 0, 1, 8  # numbers of the kinds


class Encoding(NamedTuple):
    """How `--type` stores weights: the kind of matrices, and the number that names the whole file."""

    matrices: int
    file_type: int


TYPES = {"f32": Encoding(F32, 0), "f16": Encoding(F16, 1), "q8_0": Encoding(Q8_0, 7)}


class WrittenTensor(NamedTuple):
    """A tensor to be written; `load` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]  # as in torch: rows first
    kind: int
    load: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) // KINDS[self.kind].values * KINDS[self.kind].size


def kind_for(shape: tuple[int, ...], encoding: Encoding) -> int:
    """Vectors stay in F32. A matrix whose rows are not whole blocks is stored in F16."""
    if len(shape) < 2:
        return F32
    return encoding.matrices if shape[-1] % KINDS[encoding.matrices].values == 0 else F16


def write_gguf(path: Path, metadata: Mapping[str, Any], entries: Iterable[WrittenTensor]) -> None:
    """Write the file, whole or not at all."""
    rows = list(entries)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unfinished.open("wb") as file:
            file.write(MAGIC + struct.pack("<IQQ", VERSION, len(rows), len(metadata)))
            for key, value in metadata.items():
                file.write(_string(key) + _value(value))
            offset = 0
            for entry in rows:
                shape = tuple(reversed(entry.shape))
                file.write(_string(entry.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
                file.write(struct.pack("<IQ", entry.kind, offset))
                offset += entry.size + -entry.size % ALIGNMENT
            _align(file)
            for entry in rows:
                file.write(encode(entry.load(), entry.kind, entry.name))
                _align(file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def encode(weight: Tensor, kind: int, name: str = "tensor") -> bytes:
    """The bytes of a tensor."""
    values = weight.detach().to("cpu", torch.float32).contiguous()
    if not values.isfinite().all():
        raise DataError(f"{name} holds numbers that are not finite: the model has diverged")
    if kind == F32:
        return values.numpy().astype("<f4", copy=False).tobytes()
    if kind == F16:
        halves = values.half()
        if not halves.isfinite().all():
            raise DataError(f"{name} holds numbers above 65504, the largest of f16: use --type f32")
        return halves.numpy().astype("<f2", copy=False).tobytes()
    return _q8_0(values)


def _q8_0(values: Tensor) -> bytes:
    """Blocks of 32: scale d = max|x| / 127 in f16, then round(x / d), halves away from zero, as signed bytes."""
    blocks = values.reshape(-1, KINDS[Q8_0].values)
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127.0
    scaled = blocks * torch.where(scale == 0, 0.0, 1.0 / scale)
    rounded = (scaled.abs() + 0.5).floor() * scaled.sign()
    halves = scale.half()
    if not halves.isfinite().all():
        raise DataError("a block of weights is too large for q8_0: use --type f32")
    packed = torch.cat((halves.view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)), dim=1)
    return packed.numpy().tobytes()


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    """Type and value. Whole numbers are u32, unless a list holds them: those are i32."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list):
        return struct.pack("<I", ARRAY) + _array(value)
    code = "?" if isinstance(value, bool) else "I" if isinstance(value, int) else "f"
    assert SCALARS[CODES[code]] == code
    return struct.pack(f"<I{code}", CODES[code], value)


def _array(items: list[Any]) -> bytes:
    if all(isinstance(item, str) for item in items):
        return struct.pack("<IQ", STRING, len(items)) + b"".join(map(_string, items))
    code = "f" if any(isinstance(item, float) for item in items) else "i"
    return struct.pack(f"<IQ{len(items)}{code}", CODES[code], len(items), *items)


def _align(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
