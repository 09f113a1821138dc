"""GGUF, the file format of llama.cpp: reading and writing metadata and tensors.

A file is a header (magic, version, counts), key-value metadata, a table of tensors, and their data, all little-endian.
Quantised tensors are rows of blocks, each with its own scales. Tensors of the kinds in `KINDS` are read, as float32;
F32, F16 and Q8_0 are written, one tensor at a time, so that a file never has to fit into memory.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from tether.errors import DataError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # where the file states none
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Kind(NamedTuple):
    """How a kind of tensor is stored: `values` numbers in `size` bytes, and how such blocks are read."""

    name: str
    values: int
    size: int
    decode: Callable[[Tensor], Tensor]  # (blocks, size) uint8 -> (blocks, values) float32


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file."""

    shape: tuple[int, ...]  # as in torch: rows first
    kind: Kind
    offset: int  # from the start of the file
    size: int  # in bytes


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its metadata in memory, its tensors on disk until read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]

    def read(self, name: str) -> Tensor:
        """The tensor of that name, in float32."""
        entry = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            raw = torch.frombuffer(bytearray(file.read(entry.size)), dtype=torch.uint8)
        return entry.kind.decode(raw.reshape(-1, entry.kind.size)).reshape(entry.shape)


def open_gguf(path: Path) -> GgufFile:
    """Read the metadata and the table of tensors, and check that the file is as long as they say."""
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            return _read_head(_Reader(file, size), path)
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise DataError(f"{path.name} is not a whole GGUF file: fetch it again ({error})") from error


# -- the head -----------------------------------------------------------------------------------------------------


class _Reader:
    """Values one after the other from a file of known size."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():  # before memory is allocated
            raise struct.error("it ends too early")
        return self.file.read(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in SCALARS:
            code = SCALARS[inner]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))
        return [self.value(inner) for _ in range(count)]


def _read_head(reader: _Reader, path: Path) -> GgufFile:
    if reader.take(4) != MAGIC:
        raise DataError(f"{path.name} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    version = reader.scalar("I")
    if version not in VERSIONS:
        raise DataError(f"{path.name} is GGUF version {version}: only versions {VERSIONS} are read")
    tensor_count, pair_count = reader.scalar("Q"), reader.scalar("Q")
    metadata = {}
    for _ in range(pair_count):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    rows = [_read_row(reader) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment") or ALIGNMENT
    start = math.ceil(reader.file.tell() / alignment) * alignment
    tensors = {}
    for name, shape, number, offset in rows:
        if number not in KINDS:
            readable = ", ".join(kind.name for kind in KINDS.values())
            raise DataError(f"{path.name}: tensor {name} is of GGML type {number}: only {readable} are read")
        kind = KINDS[number]
        if not shape or shape[-1] % kind.values:
            raise DataError(f"{path.name}: tensor {name} of shape {shape} is not whole blocks of {kind.name}")
        entry = TensorEntry(shape, kind, start + offset, math.prod(shape) // kind.values * kind.size)
        if entry.offset + entry.size > reader.size:
            raise struct.error(f"tensor {name} reaches past its end")
        tensors[name] = entry
    return GgufFile(path, metadata, tensors)


def _read_row(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, number of the kind, offset) of a tensor; the file lists the fastest-moving dimension first."""
    name = reader.string()
    shape = tuple(reader.scalar("Q") for _ in range(reader.scalar("I")))
    return name, shape[::-1], reader.scalar("I"), reader.scalar("Q")


# -- kinds of tensors: blocks (N, bytes) to values (N, values) ------------------------------------------------------


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """(N, B) bytes to (N, 2B) floats: the low halves of all bytes first, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=1).float()


def _q4_0(blocks: Tensor) -> Tensor:
    """scale f16, 32 nibbles: scale * (q - 8)."""
    return _f16(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    """scale f16, minimum f16, 32 nibbles: scale * q + minimum."""
    return _f16(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + _f16(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Tensor:
    """scale f16, 32 signed bytes: scale * q."""
    return _f16(blocks[:, :2]) * blocks[:, 2:].view(torch.int8).float()


def _q6_k(blocks: Tensor) -> Tensor:
    """256 six-bit values in two halves, a signed scale for each 16 of them, one f16 over all: d * scale * (q - 32).

    In a half, 64 bytes hold the low four bits of 128 values and 32 bytes their high two bits, in quarters of 32.
    """
    count = len(blocks)
    low = blocks[:, :128].reshape(count, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=2).reshape(count, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).reshape(4, 1)
    high = (blocks[:, 128:192].reshape(count, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).reshape(count, 16, 16).float() - 32.0
    scales = blocks[:, 192:208].view(torch.int8).float() * _f16(blocks[:, 208:])
    return (values * scales[:, :, None]).reshape(count, 256)


KINDS: dict[int, Kind] = {
    0: Kind("F32", 1, 4, _f32),
    1: Kind("F16", 1, 2, _f16),
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    8: Kind("Q8_0", 32, 34, _q8_0),
    14: Kind("Q6_K", 256, 210, _q6_k),
}

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
    return _pack_q8_0(values)


def _pack_q8_0(values: Tensor) -> bytes:
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
