"""The parts of a step that look at slots, by Triton kernels: the draw of tokens, and copies within the cache."""

# pyright: reportIndexIssue=false
from __future__ import annotations

import torch
from torch import Tensor

from tether.accel.decode_gpu.slot_state import BLOCK, Cache, SlotState, StepWorkspace
from tether.accel.kernels import draw as draw_kernels
from tether.accel.kernels import slots as slots_kernels
from tether.accel.kernels.tiles import launch, power_of_two
from tether.protocols import Sampling

SUMMED = 4  # blocks of ids that one program sums
COPIED = 4096  # numbers of a slot that one program copies


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
        slots_kernels.copy_slots_kernel[(len(sources), layers * kv, -(-longest * width // COPIED))](
            cache.keys, cache.values, sources, targets, lengths, slots, length,
            KV=kv, D=width, BLOCK=COPIED, num_warps=4,
        )  # fmt: skip
