"""How the fused kernels are launched: tiles, stages, and what a device allows. Measured on an H200 with bfloat16."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

from tether.accel.decode_gpu.slot_state import PARTS, PROCESSORS

FEW = 32  # slots up to which a step is bound by how soon it asks for the weights, not by how fast it reads them
AHEAD = 4  # lines of each row of a weight that are asked for before the kernel's inputs are there
AHEAD_FEW = 8
ROUNDED = 64  # slots above which a sum's parts are rounded to the model's type
WIDE = 4096 * 2048  # numbers in a weight from which larger tiles pay
# rows, columns, inner, warps, stages of a tile; "project": a head has its columns; "attend": columns of the cache
TILES: dict[str, tuple[int, ...]] = {
    "project": (64, 64, 4, 6),
    "project few": (32, 256, 4, 4),
    "attend": (64, 2, 3),
    "gated": (64, 64, 64, 4, 4),
    "gated wide": (128, 128, 64, 8, 4),
    "gated few": (32, 32, 256, 4, 4),
    "gated wide few": (32, 64, 256, 4, 3),
    "linear": (64, 64, 64, 4, 4),
    "linear wide": (128, 64, 64, 4, 4),
    "linear widest": (128, 128, 64, 4, 4),
    "linear few": (32, 64, 64, 4, 4),
    "linear wide few": (32, 64, 64, 4, 6),
    "linear widest few": (32, 128, 128, 4, 5),
}


def tile(kind: str, n: int) -> tuple[int, ...]:
    """The tile of a kind of product for n slots."""
    return TILES[f"{kind} few" if n <= FEW else kind]


@functools.cache
def starts_early() -> bool:
    """Whether a kernel can be started while the one before it ends: on Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def launch(n: int) -> dict[str, Any]:
    """How kernels over n slots are launched; `matmul_kernels.py` says what EARLY means."""
    return {"EARLY": 2 if n <= FEW else 1, "launch_pdl": True} if starts_early() else {"EARLY": 0}


def ahead(n: int) -> int:
    """Lines that a kernel asks for ahead of its inputs; none where it starts with them."""
    return (AHEAD_FEW if n <= FEW else AHEAD) if starts_early() else 0


@functools.cache
def shared_memory() -> int:
    """Bytes of a processor's shared memory that a kernel's tiles may take."""
    if not torch.cuda.is_available():
        return 224 * 1024
    return getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 99 * 1024) - 4096


def stages_within(stages: int, numbers: int, like: Tensor) -> int:
    """As many of `stages` tiles of so many numbers as shared memory holds."""
    return max(1, min(stages, shared_memory() // (numbers * like.element_size())))


def described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix as the kernels read it, in blocks."""
    return TensorDescriptor.from_tensor(x.detach(), [rows, columns])


def tile_rows(n: int, most: int) -> int:
    """Rows of a tile for n tokens: a power of 2 from 16 to `most`."""
    return min(max(16, 1 << (n - 1).bit_length()), most)


def power_of_two(n: int) -> int:
    """The next one from n on."""
    return 1 << (n - 1).bit_length()


def split_of(tiles: int, blocks: int, most: int = PARTS) -> int:
    """Into how many parts, `most` at most, a sum over `blocks` blocks is cut, so that `tiles` tiles fill the device."""
    useful = [split for split in range(1, min(most, PARTS) + 1) if blocks % split == 0 and blocks // split >= 2]
    return next((split for split in useful if split * tiles >= PROCESSORS * 3 // 4), useful[-1] if useful else 1)
