"""The GGUF reader against hand-made files: each kind of tensor by its formula, one value at a time."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from gguf_writer import write_gguf

from tether.errors import DataError
from tether.hub.gguf import KINDS, open_gguf

BLOCK_SIZE = {2: 18, 3: 20, 8: 34, 14: 210}
BLOCK_VALUES = {2: 32, 3: 32, 8: 32, 14: 256}


def half(raw: bytes) -> float:
    return struct.unpack("<e", raw)[0]


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q4_0(block: bytes) -> list[float]:
    low = [(byte & 15) - 8 for byte in block[2:]]
    high = [(byte >> 4) - 8 for byte in block[2:]]
    return [half(block[:2]) * q for q in low + high]


def q4_1(block: bytes) -> list[float]:
    low = [byte & 15 for byte in block[4:]]
    high = [byte >> 4 for byte in block[4:]]
    return [half(block[:2]) * q + half(block[2:4]) for q in low + high]


def q8_0(block: bytes) -> list[float]:
    return [half(block[:2]) * signed(byte) for byte in block[2:]]


def q6_k(block: bytes) -> list[float]:
    """As ggml's own loop has it: four values from each step."""
    d = half(block[208:210])
    out = [0.0] * 256
    for part in range(2):
        ql, qh = block[64 * part :], block[128 + 32 * part :]
        scales = [signed(byte) for byte in block[192 + 8 * part : 200 + 8 * part]]
        for i in range(32):
            values = (
                (ql[i] & 15) | ((qh[i] & 3) << 4),
                (ql[i + 32] & 15) | (((qh[i] >> 2) & 3) << 4),
                (ql[i] >> 4) | (((qh[i] >> 4) & 3) << 4),
                (ql[i + 32] >> 4) | (((qh[i] >> 6) & 3) << 4),
            )
            for quarter, q in enumerate(values):
                out[128 * part + 32 * quarter + i] = d * scales[i // 16 + 2 * quarter] * (q - 32)
    return out


FORMULAS = {2: q4_0, 3: q4_1, 8: q8_0, 14: q6_k}


def random_blocks(kind: int, count: int) -> list[bytes]:
    """Random bytes, with scales that are finite numbers."""
    rng = random.Random(kind)
    scales = {2: [0], 3: [0, 2], 8: [0], 14: [208]}[kind]
    blocks = []
    for _ in range(count):
        block = bytearray(rng.randbytes(BLOCK_SIZE[kind]))
        for place in scales:
            block[place : place + 2] = struct.pack("<e", rng.uniform(-2, 2))
        blocks.append(bytes(block))
    return blocks


@pytest.mark.parametrize("kind", FORMULAS)
def test_quantised_blocks(tmp_path: Path, kind: int):
    blocks = random_blocks(kind, 6)  # 3 rows of 2 blocks
    shape = (3, 2 * BLOCK_VALUES[kind])
    file = open_gguf(write_gguf(tmp_path / "a.gguf", {}, {"w": (kind, shape, b"".join(blocks))}))
    expected = torch.tensor([FORMULAS[kind](block) for block in blocks], dtype=torch.float64).reshape(shape)
    found = file.read("w")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_every_kind_is_tested():
    assert set(KINDS) == {0, 1, *FORMULAS}


@pytest.mark.parametrize(("kind", "code"), [(0, "f"), (1, "e")])
def test_plain_floats(tmp_path: Path, kind: int, code: str):
    values = [0.5, -1.25, 3.0, 65504.0, -0.0, 0.125]
    file = open_gguf(write_gguf(tmp_path / "a.gguf", {}, {"w": (kind, (2, 3), struct.pack(f"<6{code}", *values))}))
    assert file.read("w").tolist() == [values[:3], values[3:]]


@pytest.mark.parametrize("alignment", [32, 64])
def test_metadata_and_several_tensors(tmp_path: Path, alignment: int):
    metadata = {
        "general.alignment": alignment,
        "name": "é 日本",
        "yes": True,
        "rate": 0.5,
        "words": ["a", "", "ü"],
        "numbers": [1, -2, 3],
        "none": [],
    }
    tensors = {
        "one": (0, (1,), struct.pack("<f", 1.5)),
        "blocks": (8, (2, 32), b"".join(random_blocks(8, 2))),
        "two": (1, (3, 1, 2), struct.pack("<6e", *range(6))),
    }
    file = open_gguf(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    assert dict(file.metadata) == metadata
    assert file.read("one").tolist() == [1.5]
    assert file.read("two").flatten().tolist() == [0, 1, 2, 3, 4, 5] and file.read("two").shape == (3, 1, 2)
    assert file.read("blocks")[1].tolist() == pytest.approx(q8_0(random_blocks(8, 2)[1]))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path):
    whole = write_gguf(tmp_path / "a.gguf", {"k": ["x", "y"], "n": [1]}, {"w": (0, (4,), bytes(16))}).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(DataError, match="GGUF"):
            open_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("version", "tensor", "message"),
    [
        (1, (0, (1,), bytes(4)), "version 1"),
        (3, (12, (256,), bytes(144)), "GGML type 12"),
        (3, (8, (2, 16), bytes(34)), "whole blocks"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, version: int, tensor, message: str):
    path = write_gguf(tmp_path / "a.gguf", {}, {"w": tensor}, version)
    with pytest.raises(DataError, match=message):
        open_gguf(path)


def test_a_length_that_is_a_lie_asks_for_no_memory(tmp_path: Path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60))
    with pytest.raises(DataError, match="ends too early"):
        open_gguf(path)
