"""A decode step's parts by Triton kernels, with the same names and meanings as in `reference.py`.

A part that a kernel does not cover (an adapter, an odd shape, top-k) is computed by its plain twin. Tiles were chosen
by measuring on an H200 with bfloat16 weights.
"""

# pyright: reportIndexIssue=false
from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

from tether.protocols import Sampling
from tether.rollout.gpu import matmul_kernels, reference, slot_kernels
from tether.rollout.gpu.layers import Layer, Trunk, is_plain
from tether.rollout.gpu.state import BLOCK, PARTS, SPLITS, Cache, SlotState, Workspace

PROCESSORS = 132
AHEAD = 4  # lines of each row of a weight that are asked for before the kernel's inputs are there
WIDE = 4096 * 2048  # numbers in a weight from which larger tiles pay
# rows, columns, inner, warps, stages of a tile; "project": a head has its columns; "attend": columns of the cache
TILES: dict[str, tuple[int, ...]] = {
    "project": (64, 64, 4, 6),
    "attend": (64, 2, 3),
    "gated": (64, 64, 64, 4, 4),
    "gated wide": (128, 128, 64, 8, 4),
    "linear": (64, 64, 64, 4, 4),
    "linear wide": (128, 64, 64, 4, 4),
    "linear widest": (128, 128, 64, 4, 4),
}


@functools.cache
def starts_early() -> bool:
    """Whether a kernel can be started while the one before it ends: on Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def launch() -> dict[str, bool]:
    """How kernels are launched."""
    return {"EARLY": True, "launch_pdl": True} if starts_early() else {"EARLY": False}


def ahead(lines: int = AHEAD) -> int:
    """Lines that a kernel asks for ahead of its inputs; none where it starts with them."""
    return lines if starts_early() else 0


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


def split_of(tiles: int, blocks: int) -> int:
    """Into how many parts a sum over `blocks` blocks is cut, so that `tiles` tiles of output fill the device."""
    useful = [split for split in range(1, PARTS + 1) if blocks % split == 0 and blocks // split >= 2]
    return next((split for split in useful if split * tiles >= PROCESSORS * 3 // 4), useful[-1] if useful else 1)


def add_norm(work: Workspace, n: int, parts: Tensor | None, weight: Tensor, epsilon: float) -> None:
    """hidden += the sum of `parts`; normed = its RMS norm."""
    width = work.hidden.shape[1]
    if parts is not None and parts.data_ptr() != work.parts.data_ptr():  # a plain twin's
        return reference.add_norm(work, n, parts, weight, epsilon)
    count = 0 if parts is None else parts.shape[0]
    matmul_kernels.add_norm_kernel[(n,)](
        work.hidden, work.parts, weight, work.normed, work.parts.stride(0), epsilon,
        H=width, PARTS=count, BLOCK=power_of_two(width), num_warps=4 if width <= 2048 else 8, **launch(),
    )  # fmt: skip
    return None


def project(work: Workspace, n: int, layer: Layer, trunk: Trunk, state: SlotState, cache: Cache, index: int) -> None:
    """Queries of the normed states, turned to their positions; keys and values go into the cache."""
    width = layer.head_dim
    if not layer.fused_attention or width not in (32, 64, 128, 256) or trunk.hidden % 64:
        return reference.project(work, n, layer, trunk, state, cache, index)
    rows = tile_rows(n, TILES["project"][0])
    biases = [part.bias for part in (layer.query, layer.key, layer.value)]
    has_bias = all(bias is not None for bias in biases)
    if not has_bias and any(bias is not None for bias in biases):
        return reference.project(work, n, layer, trunk, state, cache, index)
    query_bias, key_bias, value_bias = biases if has_bias else [work.normed] * 3
    has_norm = layer.query_norm is not None and layer.key_norm is not None
    norms = (layer.query_norm, layer.key_norm) if has_norm else (work.normed, work.normed)
    _, inner, warps, stages = TILES["project"]
    stages = stages_within(stages, (rows + width) * inner, work.normed)
    weights = (layer.query.weight, layer.key.weight, layer.value.weight)
    matmul_kernels.project_kernel[(-(-n // rows), trunk.heads + 2 * trunk.kv_heads)](
        described(work.normed, rows, inner), *weights, query_bias, key_bias, value_bias, *norms,
        trunk.cos, trunk.sin, state.columns, work.query, cache.keys[index], cache.values[index],
        n, cache.keys.shape[3], layer.epsilon,
        K=trunk.hidden, D=width, HEADS=trunk.heads, KV=trunk.kv_heads, HAS_BIAS=has_bias, HAS_NORM=has_norm,
        BM=rows, BK=inner, AHEAD=ahead(), num_warps=warps, num_stages=stages, **launch(),
    )  # fmt: skip
    return None


def attend(work: Workspace, n: int, trunk: Trunk, state: SlotState, cache: Cache, index: int) -> None:
    """mixed = attention of each slot's query to the columns 0 to `columns` of its own slot."""
    width, kv, length = trunk.head_dim, trunk.kv_heads, cache.keys.shape[3]
    if width not in (16, 32, 64, 128, 256):
        return reference.attend(work, n, trunk, state, cache, index)
    group = trunk.heads // kv
    columns, warps, stages = TILES["attend"]
    stages = stages_within(stages, 2 * columns * width, work.query)
    splits = 1
    while splits < SPLITS and n * kv * splits < 2 * PROCESSORS and length >= 2 * splits * columns:
        splits *= 2
    rows = work.query.shape[0]
    slot_kernels.attend_kernel[(n, kv, splits)](
        work.query, cache.keys[index], cache.values[index], state.columns, work.mixed, work.pieces, work.weights,
        length, rows, trunk.scaling * math.log2(math.e),
        D=width, KV=kv, GROUP=group, PADDED=max(16, power_of_two(group)), BK=columns, SPLITS=splits,
        num_warps=warps, num_stages=stages, **launch(),
    )  # fmt: skip
    if splits > 1:
        slot_kernels.combine_kernel[(n, trunk.heads)](
            work.pieces, work.weights, work.mixed, rows, D=width, HEADS=trunk.heads, SPLITS=splits, num_warps=1,
            **launch(),
        )  # fmt: skip
    return None


def gated(work: Workspace, n: int, layer: Layer) -> None:
    """inner = silu(gate · normed) * (up · normed)."""
    width = work.normed.shape[1]
    if not layer.fused_gates or width % 64:
        return reference.gated(work, n, layer)
    size = work.inner.shape[1]
    key = "gated wide" if size * width >= WIDE else "gated"
    most, columns, inner, warps, stages = TILES[key]
    rows = tile_rows(n, most)
    stages = stages_within(stages, (rows + 2 * columns) * inner, work.normed)
    weights = (layer.gate.weight, layer.up.weight)
    matmul_kernels.gated_kernel[(-(-n // rows), -(-size // columns))](
        described(work.normed, rows, inner), *(described(weight, columns, inner) for weight in weights), *weights,
        work.inner, n, N=size, K=width, BM=rows, BN=columns, BK=inner, AHEAD=ahead(AHEAD // 2),
        num_warps=warps, num_stages=stages, **launch(),
    )  # fmt: skip
    return None


def linear(work: Workspace, n: int, module: Any, x: Tensor) -> Tensor:
    """(P, n, H) whose sum over P is the module's output for x (rows, in)."""
    width = x.shape[1]
    if not is_plain(module) or width % 64:
        return reference.linear(work, n, module, x)
    numbers = width * work.hidden.shape[1]
    key = "linear widest" if numbers >= WIDE else "linear wide" if numbers >= WIDE // 4 else "linear"
    most, columns, inner, warps, stages = TILES[key]
    rows = tile_rows(n, most)
    size = work.hidden.shape[1]
    tiles = -(-n // rows) * -(-size // columns)
    split = split_of(tiles, width // inner)
    _linear(x, module, work.parts, n, split, (rows, columns, inner, warps, stages))
    return work.parts[:split, :n]


def logits(work: Workspace, n: int, trunk: Trunk) -> None:
    """Logits of the normed states."""
    if not is_plain(trunk.head) or trunk.head.bias is not None:
        return reference.logits(work, n, trunk)
    # the library's product is a fifth faster than the kernel here, and nothing is fused behind this one
    torch.mm(work.normed[:n], trunk.head.weight.detach().t(), out=work.logits[:n])
    return None


def _linear(x: Tensor, module: Any, out: Tensor, n: int, split: int, tile: tuple[int, ...]) -> None:
    rows, columns, inner, warps, stages = tile
    weight, bias = module.weight, module.bias
    size, width = weight.shape
    stages = stages_within(stages, (rows + columns) * inner, x)
    matmul_kernels.linear_kernel[(-(-n // rows), -(-size // columns), split)](
        described(x, rows, inner), described(weight, columns, inner), weight,
        weight if bias is None else bias, out, n, out.stride(0),
        N=size, K=width, HAS_BIAS=bias is not None, BM=rows, BN=columns, BK=inner, SPLIT=split, AHEAD=ahead(),
        num_warps=warps, num_stages=stages, **launch(),
    )  # fmt: skip


def draw(work: Workspace, n: int, state: SlotState, sampling: Sampling) -> None:
    """One token for each slot, by the uniform that is due, and the slots' next state."""
    if sampling.temperature == 0.0 or sampling.top_k or sampling.top_p < 1.0:
        return reference.draw(work, n, state, sampling)
    vocabulary = work.logits.shape[1]
    blocks = work.highest.shape[1]
    slot_kernels.block_sums_kernel[(n, blocks)](
        work.logits, state.temperature, work.highest, work.sums, V=vocabulary, BLOCKS=blocks, BLOCK=BLOCK,
        num_warps=4, **launch(),
    )  # fmt: skip
    slot_kernels.draw_kernel[(n,)](
        work.logits, state.temperature, work.highest, work.sums, state.uniforms, state.uniforms.shape[1],
        state.tokens, state.columns, state.drawn, state.limits, state.live.view(torch.int8),
        state.answers, state.behavior, state.untruncated, state.stops.view(torch.int8),
        V=vocabulary, BLOCKS=blocks, PADDED=power_of_two(blocks), BLOCK=BLOCK, num_warps=4, **launch(),
    )  # fmt: skip
    return None
