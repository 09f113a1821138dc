"""A decode step's parts by Triton kernels, with the same names and meanings as in `plain_step.py`.

A part that a kernel does not cover (an adapter of an unusual kind, an odd shape, OLMo 2's norm over all queries) is
computed by its plain twin.

With many tokens, in the functions whose names end in `_pass`, products are the library's, and an adapter adds to its
layer's output within its second product. What stands between products only reads and writes: each part of it is one
pass over its inputs, by the trainer's own kernels. Tensors between them are contiguous.

Tiles and stages were measured on an H200 with bfloat16.
"""

# pyright: reportIndexIssue=false
from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

from tether.accel.decode_gpu import plain_step
from tether.accel.decode_gpu.slots import (
    BLOCK,
    MAX_RANK,
    PARTS,
    PROCESSORS,
    SPLITS,
    Cache,
    SlotState,
    StepWorkspace,
)
from tether.accel.kernels import decode as decode_kernels
from tether.accel.kernels import draw as draw_kernels
from tether.accel.kernels import norm as norm_kernels
from tether.accel.kernels.lora import GateAdapters
from tether.accel.kernels.norm import power_of_two
from tether.accel.kernels.rotary import rotate
from tether.accel.kernels.swiglu import gate as gated_product
from tether.accel.spec import DecoderSpec, Layer, Linear, Norm, Tables
from tether.protocols import Sampling

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
SUMMED = 4  # blocks of ids that one program sums
COPIED = 4096  # numbers of a slot that one program copies
STORED = 4096  # numbers that one program writes into the cache, of keys and of values


def tile(kind: str, n: int) -> tuple[int, ...]:
    """The tile of a kind of product for n slots."""
    return TILES[f"{kind} few" if n <= FEW else kind]


@functools.cache
def starts_early() -> bool:
    """Whether a kernel can be started while the one before it ends: on Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def launch(n: int) -> dict[str, Any]:
    """How kernels over n slots are launched; `kernels/decode.py` says what EARLY means."""
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


def split_of(tiles: int, blocks: int, most: int = PARTS) -> int:
    """Into how many parts, `most` at most, a sum over `blocks` blocks is cut, so that `tiles` tiles fill the device."""
    useful = [split for split in range(1, min(most, PARTS) + 1) if blocks % split == 0 and blocks // split >= 2]
    return next((split for split in useful if split * tiles >= PROCESSORS * 3 // 4), useful[-1] if useful else 1)


def known(part: Linear) -> bool:
    """Whether kernels and the library's products can compute the layer without calling its module."""
    return part.weight is not None and all(tensor.is_contiguous() for tensor in part.tensors())


def covered(part: Linear) -> bool:
    """Whether a decode step's kernels compute the layer: with an adapter of small rank, or with none."""
    return known(part) and (part.adapter is None or part.adapter.rank <= MAX_RANK)


def one_rank(*parts: Linear) -> bool:
    """Whether the adapters among some layers can be computed together: of one rank and one type."""
    return len({(part.adapter.rank, part.adapter.up.dtype) for part in parts if part.adapter}) <= 1


def covers_attention(layer: Layer) -> bool:
    """Whether `project_kernel` computes the layer: norms are by head, and all three projections have a bias or none."""
    heads, norm = (layer.query, layer.key, layer.value), layer.query_norm
    if norm is not None and len(norm.weight) != layer.head_dim:
        return False
    return all(map(covered, heads)) and len({part.bias is None for part in heads}) == 1 and one_rank(*heads)


def covers_gates(layer: Layer) -> bool:
    """Whether `gated_kernel` computes the layer."""
    gates = (layer.gate, layer.up)
    plain = all(covered(part) and part.bias is None for part in gates)
    return plain and layer.activation_kind is not None and one_rank(*gates)


def embed(work: StepWorkspace, n: int, spec: DecoderSpec, state: SlotState, norm: Norm | None) -> None:
    """hidden = the embeddings of the slots' next inputs; normed = their norm."""
    if spec.embedding.table is None:
        return plain_step.embed(work, n, spec, state, norm)
    _normed(work, n, None, norm, (state.tokens, spec.embedding.table, spec.embedding.scale))
    return None


def add_norm(work: StepWorkspace, n: int, parts: Tensor, after: Norm | None, norm: Norm | None) -> None:
    """hidden += the sum of `parts`, normed first where `after` is a norm; normed = hidden's norm."""
    if parts.data_ptr() != work.parts.data_ptr():  # a plain twin's
        return plain_step.add_norm(work, n, parts, after, norm)
    _normed(work, n, after, norm, None, parts)
    return None


def _normed(
    work: StepWorkspace,
    n: int,
    after: Norm | None,
    norm: Norm | None,
    embedded: tuple[Tensor, Tensor, float] | None,
    parts: Tensor | None = None,
) -> None:
    width = work.hidden.shape[1]
    tokens, table, scale = embedded or (work.hidden, work.hidden, 1.0)
    some = norm or after or Norm(work.hidden, 0.0)
    decode_kernels.step_norm_kernel[(n,)](
        work.hidden, work.parts if parts is None else parts, (after or some).weight,
        some.weight, work.normed, n * width,
        0.0 if after is None else after.epsilon, some.epsilon, tokens, table, scale,
        H=width, PARTS=0 if parts is None else len(parts), AFTER=after is not None, OFFSET=some.offset,
        EMBED=embedded is not None, BLOCK=power_of_two(width), NORMS=norm is not None,
        num_warps=4 if width <= 2048 else 8, **launch(n),
    )  # fmt: skip


def thin(work: StepWorkspace, n: int, modules: tuple[Linear, ...], x: Tensor) -> dict[str, Any]:
    """Compute the adapters' inner states for x (rows, in); gives the arguments of the kernels that add them."""
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


def ups(work: StepWorkspace, *parts: Linear) -> list[Tensor]:
    """The adapters' outer weights; where a part has none, another's, which is then not read."""
    some = next((part.adapter.up for part in parts if part.adapter), work.normed)
    return [part.adapter.up if part.adapter else some for part in parts]


def project(
    work: StepWorkspace, n: int, layer: Layer, spec: DecoderSpec, state: SlotState, cache: Cache, index: int
) -> None:
    """Queries of the normed states, turned to their positions; keys and values go into the cache."""
    width = layer.head_dim
    if not covers_attention(layer) or width not in (32, 64, 128, 256) or spec.hidden % 64:
        return plain_step.project(work, n, layer, spec, state, cache, index)
    heads = (layer.query, layer.key, layer.value)
    adapters = thin(work, n, heads, work.normed)
    most, inner, warps, stages = tile("project", n)
    rows = tile_rows(n, most)
    has_bias = layer.query.bias is not None
    biases = [part.bias if has_bias else work.normed for part in heads]
    norms = (layer.query_norm, layer.key_norm) if layer.query_norm and layer.key_norm else None
    stages = stages_within(stages, (rows + width) * inner, work.normed)
    decode_kernels.project_kernel[(-(-n // rows), spec.heads + 2 * spec.kv_heads)](
        described(work.normed, rows, inner), *(part.weight for part in heads), *biases,
        *((norm.weight for norm in norms) if norms else (work.normed, work.normed)),
        *cache.angles[layer.rotary], state.columns, work.query, cache.keys[index], cache.values[index],
        n, cache.keys.shape[3], norms[0].epsilon if norms else 0.0, work.thin, *ups(work, *heads), work.thin.stride(0),
        K=spec.hidden, D=width, HEADS=spec.heads, KV=spec.kv_heads,
        HAS_BIAS=has_bias, HAS_NORM=norms is not None,
        OFFSET=norms[0].offset if norms else 0.0, ADAPTED=sum(bool(part.adapter) << i for i, part in enumerate(heads)),
        BM=rows, BK=inner, AHEAD=ahead(n), num_warps=warps, num_stages=stages, **adapters, **launch(n),
    )  # fmt: skip
    return None


def attend(
    work: StepWorkspace, n: int, layer: Layer, spec: DecoderSpec, state: SlotState, cache: Cache, index: int
) -> None:
    """mixed = attention of each slot's query to the columns of its own slot that it sees; of no meaning where idle."""
    width, kv, length = spec.head_dim, spec.kv_heads, cache.keys.shape[3]
    if width not in (16, 32, 64, 128, 256):
        return plain_step.attend(work, n, layer, spec, state, cache, index)
    group = spec.heads // kv
    columns, warps, stages = TILES["attend"]
    stages = stages_within(stages, 2 * columns * width, work.query)
    window = layer.window if layer.window is not None and layer.window < length else 0
    splits = 1
    while splits < SPLITS and n * kv * splits < 2 * PROCESSORS and (window or length) >= 2 * splits * columns:
        splits *= 2
    powers, cap = math.log2(math.e), layer.score_cap
    decode_kernels.attend_kernel[(n, kv, splits)](
        work.query, cache.keys[index], cache.values[index], state.columns, state.live.view(torch.int8), work.mixed,
        work.partial, work.weights, length, n, layer.scaling * (powers if cap is None else 1.0 / cap),
        (cap or 0.0) * powers,
        D=width, KV=kv, GROUP=group, PADDED=max(16, power_of_two(group)), BK=columns,
        WINDOW=window, CAPPED=cap is not None, SPLITS=splits, num_warps=warps, num_stages=stages, **launch(n),
    )  # fmt: skip
    if splits > 1:
        decode_kernels.combine_kernel[(n, spec.heads)](
            work.partial, work.weights, work.mixed, n, D=width, HEADS=spec.heads, SPLITS=splits, num_warps=1,
            **launch(n),
        )  # fmt: skip
    return None


def gated(work: StepWorkspace, n: int, layer: Layer) -> None:
    """inner = act(gate · normed) * (up · normed)."""
    width = work.normed.shape[1]
    if not covers_gates(layer) or width % 64:
        return plain_step.gated(work, n, layer)
    parts = (layer.gate, layer.up)
    adapters = thin(work, n, parts, work.normed)
    size = work.inner.shape[1]
    key = "gated wide" if size * width >= WIDE else "gated"
    most, columns, inner, warps, stages = tile(key, n)
    rows = tile_rows(n, most)
    stages = stages_within(stages, (rows + 2 * columns) * inner, work.normed)
    weights = [part.weight for part in parts if part.weight is not None]
    decode_kernels.gated_kernel[(-(-n // rows), -(-size // columns))](
        described(work.normed, rows, inner), *(described(weight, columns, inner) for weight in weights), *weights,
        work.inner, n, work.thin, *ups(work, *parts), work.thin.stride(0),
        N=size, K=width, GELU=layer.activation_kind == "gelu_tanh",
        HAS_GATE=layer.gate.adapter is not None, HAS_UP=layer.up.adapter is not None,
        BM=rows, BN=columns, BK=inner, AHEAD=ahead(n) // 2, num_warps=warps, num_stages=stages, **adapters,
        **launch(n),
    )  # fmt: skip
    return None


def linear(work: StepWorkspace, n: int, module: Linear, x: Tensor) -> Tensor:
    """(P, n, H) whose sum over P is the module's output for x (rows, in)."""
    width = x.shape[1]
    if not covered(module) or width % 64:
        return plain_step.linear(work, n, module, x)
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
    assert weight is not None
    decode_kernels.linear_kernel[(-(-n // rows), -(-size // columns), split)](
        described(x, rows, inner), described(weight, columns, inner), weight,
        weight if bias is None else bias, out, n, n * size, work.thin, *ups(work, module), work.thin.stride(0),
        N=size, K=width, HAS_BIAS=bias is not None, BM=rows, BN=columns, BK=inner, SPLIT=split, AHEAD=ahead(n),
        num_warps=warps, num_stages=stages, **adapters, **launch(n),
    )  # fmt: skip
    return out[: split * n].view(split, n, size)


def logits(work: StepWorkspace, n: int, spec: DecoderSpec) -> None:
    """Logits of the normed states."""
    output = spec.output
    if output is None or output.weight is None or output.adapter is not None or output.bias is not None:
        return plain_step.logits(work, n, spec)
    # the library's product is a fifth faster than the kernel here, and nothing is fused behind this one
    torch.mm(work.normed[:n], output.weight.t(), out=work.logits[:n])
    if spec.logit_cap is not None:
        plain_step.capped(work.logits[:n], spec.logit_cap)
    return None


def draw(work: StepWorkspace, n: int, state: SlotState, sampling: Sampling) -> None:
    """One token for each slot, by the uniform that is due, and the slots' next state.

    Temperature, top-k and top-p are read from the state, so that one captured step serves all their values.
    """
    vocabulary, blocks = work.logits.shape[1], work.highest.shape[1]
    greedy = sampling.temperature == 0.0
    truncated = not greedy and (bool(sampling.top_k) or sampling.top_p < 1.0)
    shift = 16 if work.logits.dtype == torch.bfloat16 else 0
    shape = {"V": vocabulary, "BLOCKS": blocks, "BLOCK": BLOCK}
    draw_kernels.block_sums_kernel[(n, -(-blocks // SUMMED))](
        work.logits, state.temperature, work.highest, work.sums, **shape, EACH=SUMMED, num_warps=4, **launch(n)
    )
    if truncated:
        draw_kernels.truncate_kernel[(n,)](
            work.logits, state.temperature, state.top_k, state.top_p, work.highest, work.kept, work.thresholds,
            **shape, PADDED=power_of_two(blocks), SHIFT=shift, num_warps=8, **launch(n),
        )  # fmt: skip
    draw_kernels.draw_kernel[(n,)](
        work.logits, state.temperature, work.highest, work.sums, work.kept, work.thresholds,
        state.uniforms, state.uniforms.shape[1],
        state.tokens, state.columns, state.drawn, state.limits, state.live.view(torch.int8),
        state.answers, state.behavior, state.untruncated, state.stops.view(torch.int8), **shape,
        PADDED=power_of_two(blocks), SHIFT=shift, TRUNCATED=truncated, GREEDY=greedy, num_warps=4, **launch(n),
    )  # fmt: skip


def copy_slots(cache: Cache, sources: Tensor, targets: Tensor, lengths: Tensor, longest: int) -> None:
    """Make the first `lengths[i]` columns of slot `targets[i]` those of `sources[i]`, in every layer.

    None is longer than `longest`. No source may also be a target.
    """
    layers, slots, kv, length, width = cache.keys.shape
    if longest:
        decode_kernels.copy_slots_kernel[(len(sources), layers * kv, -(-longest * width // COPIED))](
            cache.keys, cache.values, sources, targets, lengths, slots, length,
            KV=kv, D=width, BLOCK=COPIED, num_warps=4,
        )  # fmt: skip


def angles_pass(tables: Tables, prompts: int, longest: int) -> Tables:
    """Positions 0 to longest - 1 of each prompt, a row for each token: (P * L, D), the second half like the first."""
    return {
        kind: (cos[:longest].repeat(prompts, 2), sin[:longest].repeat(prompts, 2))
        for kind, (cos, sin) in tables.items()
    }


def add_norm_pass(
    hidden: Tensor, change: Tensor | None, after: Norm | None, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """`(hidden + change, its norm)`, (P, L, H) each; the change is normed first where `after` is a norm."""
    if change is not None and after is not None:
        change = _add_norm(change, None, after)[1]
    return _add_norm(hidden, change, norm)


def _add_norm(x: Tensor, change: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """`(x + change, its norm)`, over groups of features as wide as the norm's weight."""
    if norm is None:
        added = x if change is None else x + change
        return added, added
    width = len(norm.weight)
    added, normed, _ = norm_kernels.add_norm(
        x.reshape(-1, width), None if change is None else change.reshape(-1, width), norm
    )
    return added.view(x.shape), normed.view(x.shape)


def linear_pass(part: Linear, x: Tensor) -> Tensor:
    """(P, L, out) of x (P, L, in)."""
    if not known(part):
        return plain_step.linear_pass(part, x).contiguous()
    assert part.weight is not None
    rows = x.flatten(0, 1)
    y = F.linear(rows, part.weight, part.bias)
    if part.adapter is not None:
        thin = F.linear(rows, part.adapter.down.to(x.dtype))  # (P * L, rank)
        y.addmm_(thin, part.adapter.up.t().to(x.dtype), alpha=part.adapter.scaling)
    return y.unflatten(0, x.shape[:2])


def heads_pass(part: Linear, norm: Norm | None, x: Tensor, width: int, angles: tuple[Tensor, Tensor]) -> Tensor:
    """(P, L, heads, width) queries or keys of x (P, L, H): normed where there is a norm, then turned."""
    heads = linear_pass(part, x)
    if norm is not None:
        heads = _add_norm(heads, None, norm)[1]
    heads = heads.unflatten(-1, (-1, width))
    tokens = heads.flatten(0, 1)  # a view, which is turned in place
    rotate(tokens, tokens[:0], angles, angles, 1.0)
    return heads


def gated_pass(layer: Layer, x: Tensor) -> Tensor:
    """(P, L, I) act(gate · x) * (up · x); adapters of small rank are added as the gated product is made."""
    gate, raised, kind = layer.gate, layer.up, layer.activation_kind
    if kind is not None and covered(gate) and covered(raised) and gate.adapter and raised.adapter:
        assert gate.weight is not None and raised.weight is not None
        rows = x.flatten(0, 1)
        thin = F.linear(rows, torch.cat((gate.adapter.down, raised.adapter.down)).to(x.dtype))  # (P * L, both ranks)
        products = F.linear(rows, gate.weight, gate.bias), F.linear(rows, raised.weight, raised.bias)
        return GateAdapters(gate.adapter, raised.adapter, None, kind).product(*products, thin).unflatten(0, x.shape[:2])
    opened, up = linear_pass(gate, x), linear_pass(raised, x)
    return layer.activation(opened) * up if kind is None else gated_product(opened, up, kind)


def store_pass(cache: Cache, index: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Put a layer's keys and values (P, L, K, D) into the first L columns of `slots` (P,)."""
    prompts, tokens, kv, width = key.shape
    padded = power_of_two(width)
    block = max(1, STORED // padded)
    decode_kernels.store_kernel[(prompts, kv, -(-tokens // block))](
        key, value, cache.keys[index], cache.values[index], slots, tokens, cache.keys.shape[3],
        KV=kv, D=width, PADDED=padded, BLOCK=block, num_warps=4,
    )  # fmt: skip
