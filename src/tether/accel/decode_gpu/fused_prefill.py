"""The parts of a pass over whole prompts by Triton kernels, with the same names and meanings as in `reference_step.py`.

With many tokens the products are the library's, and an adapter adds to its layer's output within its second product.
What stands between products only reads and writes: each part of it is one pass over its inputs, by the trainer's own
kernels. Tensors between them are contiguous.
"""

# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tether.accel.decode_gpu import reference_step
from tether.accel.decode_gpu.reference_step import Angles
from tether.accel.decode_gpu.slot_state import Cache
from tether.accel.decode_gpu.step_layers import StepBackbone, StepLayer, StepLinear
from tether.accel.families import Norm
from tether.accel.fused_pass import fused_ops
from tether.accel.fused_pass.lora_swiglu import GateAdapters
from tether.accel.kernels import slots as slots_kernels
from tether.accel.kernels.tiles import power_of_two

STORED = 4096  # numbers that one program writes into the cache, of keys and of values


def angles_pass(backbone: StepBackbone, prompts: int, longest: int) -> Angles:
    """Positions 0 to longest - 1 of each prompt, a row for each token: (P * L, D), the second half like the first."""
    return {
        kind: (cos[:longest].repeat(prompts, 2), sin[:longest].repeat(prompts, 2))
        for kind, (cos, sin) in backbone.angles.items()
    }


def add_norm_pass(hidden: Tensor, change: Tensor | None, after: Norm | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """`(hidden + change, its norm)`, (P, L, H) each; the change is normed first where `after` is a norm."""
    if change is not None and after is not None:
        change = _add_norm(change, None, after)[1]
    return _add_norm(hidden, change, norm)


def _add_norm(x: Tensor, change: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """`(x + change, its norm)` over the last dimension."""
    weight = norm.weight if norm.offset == 0.0 else norm.weight.float() + norm.offset  # as precise as the kernel is
    rows = None if change is None else change.flatten(0, -2)
    added, normed, _ = fused_ops.add_norm(x.flatten(0, -2), rows, weight, norm.epsilon)
    return added.view(x.shape), normed.view(x.shape)


def linear_pass(part: StepLinear, x: Tensor) -> Tensor:
    """(P, L, out) of x (P, L, in)."""
    if not part.known:
        return reference_step.linear_pass(part, x).contiguous()
    rows = x.flatten(0, 1)
    y = F.linear(rows, part.weight, part.bias)
    if part.adapter is not None:
        thin = F.linear(rows, part.adapter.down.to(x.dtype))  # (P * L, rank)
        y.addmm_(thin, part.adapter.up.t().to(x.dtype), alpha=part.adapter.scaling)
    return y.unflatten(0, x.shape[:2])


def heads_pass(part: StepLinear, norm: Norm | None, x: Tensor, width: int, angles: tuple[Tensor, Tensor]) -> Tensor:
    """(P, L, heads, width) queries or keys of x (P, L, H): normed by head where there is a norm, then turned."""
    heads = linear_pass(part, x).unflatten(-1, (-1, width))
    if norm is not None:
        heads = _add_norm(heads, None, norm)[1]
    tokens = heads.flatten(0, 1)  # a view, which is turned in place
    fused_ops.rotate(tokens, tokens[:0], angles, angles, 1.0)
    return heads


def gated_pass(layer: StepLayer, x: Tensor) -> Tensor:
    """(P, L, I) act(gate · x) * (up · x); adapters of small rank are added as the gated product is made."""
    gate, raised = layer.gate, layer.up
    if layer.is_silu and gate.fused and raised.fused and gate.adapter and raised.adapter:
        rows = x.flatten(0, 1)
        thin = F.linear(rows, torch.cat((gate.adapter.down, raised.adapter.down)).to(x.dtype))  # (P * L, both ranks)
        products = F.linear(rows, gate.weight, gate.bias), F.linear(rows, raised.weight, raised.bias)
        return GateAdapters(gate.adapter, raised.adapter, None).product(*products, thin).unflatten(0, x.shape[:2])
    opened, up = linear_pass(gate, x), linear_pass(raised, x)
    return fused_ops.gate(opened, up) if layer.is_silu else layer.activation(opened) * up


def store_pass(cache: Cache, index: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Put a layer's keys and values (P, L, K, D) into the first L columns of `slots` (P,)."""
    prompts, tokens, kv, width = key.shape
    padded = power_of_two(width)
    block = max(1, STORED // padded)
    slots_kernels.store_kernel[(prompts, kv, -(-tokens // block))](
        key, value, cache.keys[index], cache.values[index], slots, tokens, cache.keys.shape[3],
        KV=kv, D=width, PADDED=padded, BLOCK=block, num_warps=4,
    )  # fmt: skip
