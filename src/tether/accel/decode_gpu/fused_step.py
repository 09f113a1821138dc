"""A decode step's parts by Triton kernels, with the same names and meanings as in `reference_step.py`.

A part that a kernel does not cover (an adapter of an unusual kind, an odd shape) is computed by its plain twin.
Those for whole prompts, whose names end in `_pass`, are written in `fused_prefill.py`.
"""

# pyright: reportIndexIssue=false
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tether.accel.decode_gpu import reference_step
from tether.accel.decode_gpu.fused_prefill import (
    add_norm_pass,
    angles_pass,
    gated_pass,
    heads_pass,
    linear_pass,
    store_pass,
)
from tether.accel.decode_gpu.fused_slots import copy_slots, draw
from tether.accel.decode_gpu.slot_state import PARTS, PROCESSORS, SPLITS, Cache, SlotState, StepWorkspace
from tether.accel.decode_gpu.step_layers import MAX_RANK, StepBackbone, StepLayer, StepLinear
from tether.accel.families import Norm
from tether.accel.kernels import decode as decode_kernels
from tether.accel.kernels import slots as slots_kernels
from tether.accel.kernels.tiles import (
    ROUNDED,
    TILES,
    WIDE,
    ahead,
    described,
    launch,
    power_of_two,
    split_of,
    stages_within,
    tile,
    tile_rows,
)

__all__ = ["add_norm", "attend", "copy_slots", "draw", "embed", "gated", "linear", "logits", "project"]
__all__ += ["add_norm_pass", "angles_pass", "gated_pass", "heads_pass", "linear_pass", "store_pass"]


def embed(work: StepWorkspace, n: int, backbone: StepBackbone, state: SlotState, norm: Norm) -> None:
    """hidden = the embeddings of the slots' next inputs; normed = their norm."""
    table: Any = backbone.embedding
    scale = getattr(table, "scalar_embed_scale", None)  # a Gemma module's own
    if type(table) is not nn.Embedding and scale is None:
        return reference_step.embed(work, n, backbone, state, norm)
    weight = table.weight.detach()
    if scale is not None:
        scale = float(torch.tensor(scale, dtype=weight.dtype))  # rounded as the module does
    _normed(work, n, None, norm, (state.tokens, weight, backbone.embedding_scale if scale is None else scale))
    return None


def add_norm(work: StepWorkspace, n: int, parts: Tensor, after: Norm | None, norm: Norm) -> None:
    """hidden += the sum of `parts`, normed first where `after` is a norm; normed = hidden's norm."""
    if parts.data_ptr() != work.parts.data_ptr():  # a plain twin's
        return reference_step.add_norm(work, n, parts, after, norm)
    _normed(work, n, after, norm, None, parts)
    return None


def _normed(
    work: StepWorkspace,
    n: int,
    after: Norm | None,
    norm: Norm,
    embedded: tuple[Tensor, Tensor, float] | None,
    parts: Tensor | None = None,
) -> None:
    width = work.hidden.shape[1]
    tokens, table, scale = embedded or (work.hidden, work.hidden, 1.0)
    decode_kernels.add_norm_kernel[(n,)](
        work.hidden, work.parts if parts is None else parts, norm.weight if after is None else after.weight,
        norm.weight, work.normed, n * width,
        0.0 if after is None else after.epsilon, norm.epsilon, tokens, table, scale,
        H=width, PARTS=0 if parts is None else len(parts), AFTER=after is not None, OFFSET=norm.offset,
        EMBED=embedded is not None, BLOCK=power_of_two(width), num_warps=4 if width <= 2048 else 8, **launch(n),
    )  # fmt: skip


def thin(work: StepWorkspace, n: int, modules: tuple[StepLinear, ...], x: Tensor) -> dict[str, Any]:
    """The adapters' inner states for x (rows, in), and what the kernels that add them are told."""
    adapters = [part.adapter for part in modules]
    some = next((adapter for adapter in adapters if adapter is not None), None)
    if some is None:
        return {"RANK": 0, "PADDED": 16, "MAX_RANK": MAX_RANK, "THIN": 1}
    rank, width = some.down.shape
    padded = max(16, power_of_two(rank))
    split = next(
        split for split in (PARTS, 4, 2, 1) if width % (64 * split) == 0 and (width >= 256 * split or split == 1)
    )
    rows = tile_rows(n, 64)
    each = [adapter or some for adapter in adapters] + [some] * (3 - len(adapters))
    decode_kernels.thin_kernel[(-(-n // rows), len(modules), split)](
        x, *(adapter.down for adapter in each), *(adapter.scaling for adapter in each), work.thin, work.thin.stride(0),
        K=width, RANK=rank, PADDED=padded, MAX_RANK=MAX_RANK, BM=rows, BK=64, SPLIT=split,
        num_warps=4, num_stages=4, **launch(n),
    )  # fmt: skip
    return {"RANK": rank, "PADDED": padded, "MAX_RANK": MAX_RANK, "THIN": split}


def ups(work: StepWorkspace, *parts: StepLinear) -> list[Tensor]:
    """The adapters' outer weights; where a part has none, another's, which is then not read."""
    some = next((part.adapter.up for part in parts if part.adapter), work.normed)
    return [part.adapter.up if part.adapter else some for part in parts]


def project(
    work: StepWorkspace, n: int, layer: StepLayer, backbone: StepBackbone, state: SlotState, cache: Cache, index: int
) -> None:
    """Queries of the normed states, turned to their positions; keys and values go into the cache."""
    width = layer.head_dim
    if not layer.fused_attention or width not in (32, 64, 128, 256) or backbone.hidden % 64:
        return reference_step.project(work, n, layer, backbone, state, cache, index)
    heads = (layer.query, layer.key, layer.value)
    adapters = thin(work, n, heads, work.normed)
    most, inner, warps, stages = tile("project", n)
    rows = tile_rows(n, most)
    has_bias = layer.query.bias is not None
    biases = [part.bias if has_bias else work.normed for part in heads]
    norms = layer.head_norms
    stages = stages_within(stages, (rows + width) * inner, work.normed)
    decode_kernels.project_kernel[(-(-n // rows), backbone.heads + 2 * backbone.kv_heads)](
        described(work.normed, rows, inner), *(part.weight for part in heads), *biases,
        *((norm.weight for norm in norms) if norms else (work.normed, work.normed)),
        *backbone.angles[layer.facts.rotary], state.columns, work.query, cache.keys[index], cache.values[index],
        n, cache.keys.shape[3], norms[0].epsilon if norms else 0.0, work.thin, *ups(work, *heads), work.thin.stride(0),
        K=backbone.hidden, D=width, HEADS=backbone.heads, KV=backbone.kv_heads,
        HAS_BIAS=has_bias, HAS_NORM=norms is not None,
        OFFSET=norms[0].offset if norms else 0.0, ADAPTED=sum(bool(part.adapter) << i for i, part in enumerate(heads)),
        BM=rows, BK=inner, AHEAD=ahead(n), num_warps=warps, num_stages=stages, **adapters, **launch(n),
    )  # fmt: skip
    return None


def attend(
    work: StepWorkspace, n: int, layer: StepLayer, backbone: StepBackbone, state: SlotState, cache: Cache, index: int
) -> None:
    """mixed = attention of each slot's query to the columns of its own slot that it sees; of no meaning where idle."""
    width, kv, length = backbone.head_dim, backbone.kv_heads, cache.keys.shape[3]
    if width not in (16, 32, 64, 128, 256):
        return reference_step.attend(work, n, layer, backbone, state, cache, index)
    group, facts = backbone.heads // kv, layer.facts
    columns, warps, stages = TILES["attend"]
    stages = stages_within(stages, 2 * columns * width, work.query)
    window = facts.window if facts.window is not None and facts.window < length else 0
    splits = 1
    while splits < SPLITS and n * kv * splits < 2 * PROCESSORS and (window or length) >= 2 * splits * columns:
        splits *= 2
    powers = math.log2(math.e)
    slots_kernels.attend_kernel[(n, kv, splits)](
        work.query, cache.keys[index], cache.values[index], state.columns, state.live.view(torch.int8), work.mixed,
        work.pieces, work.weights, length, n, facts.scaling * (powers if facts.cap is None else 1.0 / facts.cap),
        (facts.cap or 0.0) * powers,
        D=width, KV=kv, GROUP=group, PADDED=max(16, power_of_two(group)), BK=columns,
        WINDOW=window, CAPPED=facts.cap is not None, SPLITS=splits, num_warps=warps, num_stages=stages, **launch(n),
    )  # fmt: skip
    if splits > 1:
        slots_kernels.combine_kernel[(n, backbone.heads)](
            work.pieces, work.weights, work.mixed, n, D=width, HEADS=backbone.heads, SPLITS=splits, num_warps=1,
            **launch(n),
        )  # fmt: skip
    return None


def gated(work: StepWorkspace, n: int, layer: StepLayer) -> None:
    """inner = act(gate · normed) * (up · normed)."""
    width = work.normed.shape[1]
    if not layer.fused_gates or width % 64:
        return reference_step.gated(work, n, layer)
    parts = (layer.gate, layer.up)
    adapters = thin(work, n, parts, work.normed)
    size = work.inner.shape[1]
    key = "gated wide" if size * width >= WIDE else "gated"
    most, columns, inner, warps, stages = tile(key, n)
    rows = tile_rows(n, most)
    stages = stages_within(stages, (rows + 2 * columns) * inner, work.normed)
    weights = [part.weight for part in parts]
    decode_kernels.gated_kernel[(-(-n // rows), -(-size // columns))](
        described(work.normed, rows, inner), *(described(weight, columns, inner) for weight in weights), *weights,
        work.inner, n, work.thin, *ups(work, *parts), work.thin.stride(0), N=size, K=width, GELU=layer.is_gelu,
        HAS_GATE=layer.gate.adapter is not None, HAS_UP=layer.up.adapter is not None,
        BM=rows, BN=columns, BK=inner, AHEAD=ahead(n) // 2, num_warps=warps, num_stages=stages, **adapters,
        **launch(n),
    )  # fmt: skip
    return None


def linear(work: StepWorkspace, n: int, module: StepLinear, x: Tensor) -> Tensor:
    """(P, n, H) whose sum over P is the module's output for x (rows, in)."""
    width = x.shape[1]
    if not module.fused or width % 64:
        return reference_step.linear(work, n, module, x)
    adapters = thin(work, n, (module,), x)
    size = work.hidden.shape[1]
    key = "linear widest" if width * size >= WIDE else "linear wide" if width * size >= WIDE // 4 else "linear"
    most, columns, inner, warps, stages = tile(key, n)
    inner = inner if width % inner == 0 else 64
    rows = tile_rows(n, most)
    out = work.rounded_parts if n > ROUNDED else work.parts
    split = split_of(-(-n // rows) * -(-size // columns), width // inner, len(out) // n)
    stages = stages_within(stages, (rows + columns) * inner, x)
    weight, bias = module.weight, module.bias
    decode_kernels.linear_kernel[(-(-n // rows), -(-size // columns), split)](
        described(x, rows, inner), described(weight, columns, inner), weight,
        weight if bias is None else bias, out, n, n * size, work.thin, *ups(work, module), work.thin.stride(0),
        N=size, K=width, HAS_BIAS=bias is not None, BM=rows, BN=columns, BK=inner, SPLIT=split, AHEAD=ahead(n),
        num_warps=warps, num_stages=stages, **adapters, **launch(n),
    )  # fmt: skip
    return out[: split * n].view(split, n, size)


def logits(work: StepWorkspace, n: int, backbone: StepBackbone) -> None:
    """Logits of the normed states."""
    if type(backbone.head) is not nn.Linear or backbone.head.bias is not None:
        return reference_step.logits(work, n, backbone)
    # the library's product is a fifth faster than the kernel here, and nothing is fused behind this one
    torch.mm(work.normed[:n], backbone.head.weight.detach().t(), out=work.logits[:n])
    if backbone.logit_cap is not None:
        reference_step.capped(work.logits[:n], backbone.logit_cap)
    return None
