"""Triton kernels over slots: attention to the cache, and the draw of the next token."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: D103 (a kernel's comment stands inside it)
from __future__ import annotations

import triton
import triton.language as tl

from tether.rollout.gpu.matmul_kernels import let_next_start, wait_for_inputs


@triton.jit
def attend_kernel(
    query, keys, values, columns, out, pieces, weights, length, rows, scale,
    D: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # The GROUP query heads of one key head in one slot, over one piece of its columns: each key and value is read once.
    # `scale` is in powers of 2. With one piece the result is stored; else the piece, its highest score and its sum are.
    slot, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, feature = tl.arange(0, PADDED), tl.arange(0, D)
    valid = group[:, None] < GROUP
    wait_for_inputs(EARLY)
    end = tl.load(columns + slot) + 1
    start = tl.zeros_like(end)
    if SPLITS > 1:
        span = tl.cdiv(tl.cdiv(end, SPLITS), BK) * BK
        start = split * span
        end = tl.minimum(end, start + span)
    q_at = ((slot * KV + head) * GROUP + group)[:, None] * D + feature[None, :]
    q = tl.load(query + q_at, mask=valid, other=0.0)
    base = (slot.to(tl.int64) * KV + head) * length * D
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
def block_sums_kernel(
    logits, temperature, highest, sums, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    # For one slot and one block of ids: the highest z = logit / temperature, and the sum of exp(z - highest).
    slot, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(EARLY)
    at = logits + slot.to(tl.int64) * V + token
    z = tl.load(at, mask=token < V, other=-float("inf")).to(tl.float32) / tl.load(temperature)
    let_next_start(EARLY)
    top = tl.max(z, 0)
    centre = tl.where(top == -float("inf"), 0.0, top)  # so that a block of impossible ids sums to 0, not to NaN
    tl.store(highest + slot * BLOCKS + block, top)
    tl.store(sums + slot * BLOCKS + block, tl.sum(tl.exp(z - centre), 0))


@triton.jit
def draw_kernel(
    logits, temperature, highest, sums, uniforms, room,
    tokens, columns, drawn, limits, live, answers, behavior, untruncated, stops,
    V: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # One slot's token: the first id whose cumulative probability reaches the uniform that is due. The blocks' sums say
    # which block that is in, and only that block is read again. Then the slot's next state; idle slots keep theirs.
    slot = tl.program_id(0)
    block, inside = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    wait_for_inputs(EARLY)
    count = tl.load(drawn + slot)
    alive = tl.load(live + slot) != 0
    uniform = tl.load(uniforms + slot * room + tl.minimum(count, room - 1))
    tops = tl.load(highest + slot * BLOCKS + block, mask=block < BLOCKS, other=-float("inf"))
    top = tl.max(tops, 0)
    heights = tl.load(sums + slot * BLOCKS + block, mask=block < BLOCKS, other=0.0) * tl.exp(tops - top)
    shares = heights.to(tl.float64)
    total = tl.sum(shares, 0)
    target = uniform * total
    place = tl.sum((tl.cumsum(shares, 0) < target).to(tl.int32), 0)
    place = tl.minimum(place, BLOCKS - 1)
    target -= tl.sum(tl.where(block < place, shares, 0.0), 0)
    token = place * BLOCK + inside
    at = logits + slot.to(tl.int64) * V + token
    z = tl.load(at, mask=token < V, other=-float("inf")).to(tl.float32) / tl.load(temperature)
    heights = tl.exp(z - top)
    within = tl.sum((tl.cumsum(heights.to(tl.float64), 0) < target).to(tl.int32), 0)
    # rounding may leave the block's own sum just short of the target: then it is the last id that can be drawn
    within = tl.minimum(within, tl.max(tl.where(heights > 0.0, inside, 0), 0))
    possible = tl.max(tl.where(inside == within, heights, 0.0), 0) > 0.0
    within = tl.where(possible, within, tl.argmax(heights, 0).to(tl.int32))
    chosen = tl.max(tl.where(inside == within, z, -float("inf")), 0)
    logprob = ((chosen - top).to(tl.float64) - tl.log(total)).to(tl.float32)
    finite = total == total  # NaN and +inf among the logits, or nothing but -inf, leave no number here
    next_token = tl.where(finite, place * BLOCK + within, 0).to(tl.int64)
    at = slot * room + tl.minimum(count, room - 1)
    tl.store(answers + at, tl.where(finite, next_token, -1), mask=alive)
    tl.store(behavior + at, logprob, mask=alive)
    tl.store(untruncated + at, logprob, mask=alive)
    over = (tl.load(stops + next_token) != 0) | (finite == 0) | (count + 1 >= tl.load(limits + slot))
    tl.store(tokens + slot, next_token, mask=alive)
    tl.store(columns + slot, tl.load(columns + slot) + 1, mask=alive)
    tl.store(drawn + slot, count + 1, mask=alive)
    tl.store(live + slot, (over == 0).to(tl.int8), mask=alive)
