"""Triton kernels over the slots' cache: attention to it, and copies into it and within it."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: D103 (a kernel's comment stands inside it)
from __future__ import annotations

import triton
import triton.language as tl

from tether.accel.kernels.decode import begin, let_next_start, wait_for_inputs


@triton.jit
def ask_for(table, start, end, D: tl.constexpr, BK: tl.constexpr):
    # Asks for the lines of 128 bytes of BK columns of a slot, from `start` on and before `end`.
    line: tl.constexpr = 128 // (table.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = 1 if line >= D else D // line
    column = tl.minimum(start + tl.arange(0, BK), tl.maximum(end - 1, 0))
    at = table + (column[:, None] * D + tl.arange(0, LINES)[None, :] * line)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def attend_kernel(
    query, keys, values, columns, live, out, pieces, weights, length, rows, scale, cap,
    D: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # The GROUP query heads of one key head in one slot, over one piece of its columns: each key and value is read once.
    # `scale` gives scores in powers of 2, or in units of `cap`, itself in powers of 2. WINDOW is how many columns are
    # seen, or 0 for all. With one piece the result is stored; else the piece, its highest score and its sum are. An
    # idle slot reads its first column only, and its result means nothing.
    # Of the kernel before, only the query and the newest key and value are needed: the columns were known when the
    # step began, and the first keys and values are asked for while that kernel ends.
    begin(EARLY)
    slot, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, feature = tl.arange(0, PADDED), tl.arange(0, D)
    valid = group[:, None] < GROUP
    end = tl.where(tl.load(live + slot) != 0, tl.load(columns + slot), 0) + 1
    start = tl.zeros_like(end)
    if WINDOW > 0:
        start = tl.maximum(end - WINDOW, 0)
    if SPLITS > 1:
        span = tl.cdiv(tl.cdiv(end - start, SPLITS), BK) * BK
        start += split * span
        end = tl.minimum(end, start + span)
    q_at = ((slot * KV + head) * GROUP + group)[:, None] * D + feature[None, :]
    base = (slot.to(tl.int64) * KV + head) * length * D
    if EARLY > 0:
        ask_for(keys + base, start, end, D, BK)
        ask_for(values + base, start, end, D, BK)
    wait_for_inputs(EARLY)
    q = tl.load(query + q_at, mask=valid, other=0.0)
    highest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mixed = tl.zeros((PADDED, D), tl.float32)
    for first in range(start, end, BK):
        column = first + tl.arange(0, BK)
        at = base + column[:, None] * D + feature[None, :]
        inside = column[:, None] < end
        k = tl.load(keys + at, mask=inside, other=0.0)
        v = tl.load(values + at, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:  # tanh s = 2 sigmoid(2 s) - 1
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        scores = tl.where(column[None, :] < end, scores, -1e30)
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        heights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(heights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(heights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    let_next_start(EARLY)
    if SPLITS == 1:
        tl.store(out + q_at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=valid)
    else:
        tl.store(pieces + split * rows * KV * GROUP * D + q_at, mixed, mask=valid)
        at = ((split * rows + slot) * KV * GROUP + head * GROUP + group) * 2
        tl.store(weights + at, highest, mask=group < GROUP)
        tl.store(weights + at + 1, total, mask=group < GROUP)


@triton.jit
def combine_kernel(
    pieces, weights, out, rows, D: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr
):
    # The pieces of one slot's head, each weighted by its sum at a common highest score.
    begin(EARLY)
    slot, head = tl.program_id(0), tl.program_id(1)
    split, feature = tl.arange(0, SPLITS), tl.arange(0, D)
    wait_for_inputs(EARLY)
    at = (split * rows + slot) * HEADS + head
    highest, total = tl.load(weights + at * 2), tl.load(weights + at * 2 + 1)
    share = tl.exp2(highest - tl.max(highest, 0))
    mixed = tl.sum(tl.load(pieces + at[:, None] * D + feature[None, :]) * share[:, None], 0)
    let_next_start(EARLY)
    mixed = mixed / tl.sum(total * share, 0)
    tl.store(out + (slot * HEADS + head) * D + feature, mixed.to(out.dtype.element_ty))


@triton.jit
def copy_slots_kernel(
    keys, values, sources, targets, lengths, slots, length,
    KV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One key head of one layer: BLOCK numbers of the first lengths[pair] columns of a slot, into another slot.
    pair, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * BLOCK
    count = tl.load(lengths + pair).to(tl.int32) * D
    if first < count:
        layer = (head // KV).to(tl.int64) * slots
        at = first + tl.arange(0, BLOCK)
        inside = at < count
        source = ((layer + tl.load(sources + pair)) * KV + head % KV) * length * D + at
        target = ((layer + tl.load(targets + pair)) * KV + head % KV) * length * D + at
        tl.store(keys + target, tl.load(keys + source, mask=inside), mask=inside)
        tl.store(values + target, tl.load(values + source, mask=inside), mask=inside)


@triton.jit
def store_kernel(
    key, value, keys, values, slots, tokens, length,
    KV: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One key head of one prompt: BLOCK tokens of key and value (prompts, tokens, KV, D) into the same columns of the
    # prompt's slot of one layer's keys and values (slots, KV, length, D).
    prompt, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, feature = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    inside = (token[:, None] < tokens) & (feature[None, :] < D)
    source = prompt * tokens * KV * D + (token[:, None] * KV + head) * D + feature[None, :]
    target = (tl.load(slots + prompt) * KV + head) * length * D + token[:, None] * D + feature[None, :]
    tl.store(keys + target, tl.load(key + source, mask=inside), mask=inside)
    tl.store(values + target, tl.load(value + source, mask=inside), mask=inside)
