"""Triton kernels for the draw of each slot's next token: sums by blocks of ids, top-k and top-p, the token itself."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: D103 (a kernel's comment stands inside it)
from __future__ import annotations

import triton
import triton.language as tl

from tether.accel.kernels.decode import begin, let_next_start, wait_for_inputs


@triton.jit
def block_sums_kernel(
    logits, temperature, highest, sums, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # For one slot and EACH blocks of ids: the highest z = logit / temperature, and the sum of exp(z - highest).
    begin(EARLY)
    slot = tl.program_id(0)
    block = tl.program_id(1) * EACH + tl.arange(0, EACH)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    wait_for_inputs(EARLY)
    at = logits + slot.to(tl.int64) * V + token
    z = tl.load(at, mask=token < V, other=-float("inf")).to(tl.float32) / tl.load(temperature)
    let_next_start(EARLY)
    top = tl.max(z, 1)
    centre = tl.where(top == -float("inf"), 0.0, top)  # so that a block of impossible ids sums to 0, not to NaN
    valid = block < BLOCKS
    tl.store(highest + slot * BLOCKS + block, top, mask=valid)
    tl.store(sums + slot * BLOCKS + block, tl.sum(tl.exp(z - centre[:, None]), 1), mask=valid)


@triton.jit
def order_of(logit, SHIFT: tl.constexpr):
    # A whole number for each logit, in the same order; SHIFT drops the bits that 16-bit logits do not have.
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def truncate_kernel(
    logits, temperature, top_k, top_p, highest, kept, thresholds,
    V: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # One slot. top-k keeps an id iff fewer than k are strictly more likely; top-p keeps it iff those strictly more
    # likely hold less than top_p of what top-k left. Both are thresholds, found by halving an interval. Stored are the
    # threshold and, for each block of ids, the sum of exp(z - highest of all) over the ids kept.
    begin(EARLY)
    slot = tl.program_id(0)
    block, inside = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    row = logits + slot.to(tl.int64) * V
    wait_for_inputs(EARLY)
    heat, k, p = tl.load(temperature), tl.load(top_k), tl.load(top_p)
    top = tl.max(tl.load(highest + slot * BLOCKS + block, mask=block < BLOCKS, other=-float("inf")), 0)
    low, high = tl.full((), -(1 << (31 - SHIFT)), tl.int32), tl.full((), (1 << (31 - SHIFT)) - 1, tl.int32)
    if k < V:  # the greatest threshold that at least k ids reach
        for _ in range(32 - SHIFT):
            middle = ((low.to(tl.int64) + high + 1) >> 1).to(tl.int32)
            count = tl.zeros((BLOCK,), tl.int32)
            for first in range(0, V, BLOCK):
                logit = tl.load(row + first + inside, mask=first + inside < V, other=-float("inf")).to(tl.float32)
                count += ((order_of(logit, SHIFT) >= middle) & (first + inside < V)).to(tl.int32)
            reached = tl.sum(count, 0) >= k
            low = tl.where(reached, middle, low)
            high = tl.where(reached, high, middle - 1)
    if p < 1.0:  # the least threshold above which less than top_p of the mass lies
        mass = tl.zeros((BLOCK,), tl.float32)
        most = tl.full((BLOCK,), -(1 << (31 - SHIFT)), tl.int32)
        for first in range(0, V, BLOCK):
            logit = tl.load(row + first + inside, mask=first + inside < V, other=-float("inf")).to(tl.float32)
            order = order_of(logit, SHIFT)
            mass += tl.where(order >= low, tl.exp(logit / heat - top), 0.0)
            most = tl.maximum(most, order)
        wanted = p * tl.sum(mass, 0)
        high = tl.max(most, 0)
        for _ in range(32 - SHIFT):
            middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
            mass = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, V, BLOCK):
                logit = tl.load(row + first + inside, mask=first + inside < V, other=-float("inf")).to(tl.float32)
                mass += tl.where(order_of(logit, SHIFT) > middle, tl.exp(logit / heat - top), 0.0)
            enough, searching = tl.sum(mass, 0) < wanted, low < high
            low = tl.where(searching & (enough == 0), middle + 1, low)
            high = tl.where(searching & enough, middle, high)
    let_next_start(EARLY)
    tl.store(thresholds + slot, low)
    for place in range(BLOCKS):
        token = place * BLOCK + inside
        logit = tl.load(row + token, mask=token < V, other=-float("inf")).to(tl.float32)
        height = tl.where(order_of(logit, SHIFT) >= low, tl.exp(logit / heat - top), 0.0)
        tl.store(kept + slot * BLOCKS + place, tl.sum(height, 0))


@triton.jit
def draw_kernel(
    logits, temperature, highest, sums, kept, thresholds, uniforms, room,
    tokens, columns, drawn, limits, live, answers, behavior, untruncated, stops,
    V: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
    TRUNCATED: tl.constexpr, GREEDY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # One slot's token: the first id whose cumulative probability reaches the uniform that is due. The blocks' sums say
    # which block that is in, and only that block is read again. TRUNCATED leaves out the ids under the slot's
    # threshold; GREEDY takes the likeliest. Then the slot's next state; idle slots keep theirs.
    begin(EARLY)
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
    whole = tl.sum(shares, 0)
    if TRUNCATED:
        shares = tl.load(kept + slot * BLOCKS + block, mask=block < BLOCKS, other=0.0).to(tl.float64)
    total = tl.sum(shares, 0)
    target = uniform * total
    place = tl.sum((tl.cumsum(shares, 0) < target).to(tl.int32), 0)
    place = tl.minimum(place, BLOCKS - 1)
    if GREEDY:
        place = tl.argmax(tops, 0).to(tl.int32)
    target -= tl.sum(tl.where(block < place, shares, 0.0), 0)
    token = place * BLOCK + inside
    at = logits + slot.to(tl.int64) * V + token
    logit = tl.load(at, mask=token < V, other=-float("inf")).to(tl.float32)
    z = logit / tl.load(temperature)
    heights = tl.exp(z - top)
    if TRUNCATED:
        heights = tl.where(order_of(logit, SHIFT) >= tl.load(thresholds + slot), heights, 0.0)
    within = tl.sum((tl.cumsum(heights.to(tl.float64), 0) < target).to(tl.int32), 0)
    # rounding may leave the block's own sum just short of the target: then it is the last id that can be drawn
    within = tl.minimum(within, tl.max(tl.where(heights > 0.0, inside, 0), 0))
    possible = tl.max(tl.where(inside == within, heights, 0.0), 0) > 0.0
    within = tl.where(possible, within, tl.argmax(heights, 0).to(tl.int32))
    if GREEDY:
        within = tl.argmax(z, 0).to(tl.int32)
    chosen = tl.max(tl.where(inside == within, z, -float("inf")), 0)
    above = (chosen - top).to(tl.float64)
    finite = whole == whole  # NaN and +inf among the logits, or nothing but -inf, leave no number here
    next_token = tl.where(finite, place * BLOCK + within, 0).to(tl.int64)
    at = slot * room + tl.minimum(count, room - 1)
    tl.store(answers + at, tl.where(finite, next_token, -1), mask=alive)
    tl.store(behavior + at, (above - tl.log(total)).to(tl.float32), mask=alive)
    tl.store(untruncated + at, (above - tl.log(whole)).to(tl.float32), mask=alive)
    over = (tl.load(stops + next_token) != 0) | (finite == 0) | (count + 1 >= tl.load(limits + slot))
    tl.store(tokens + slot, next_token, mask=alive)
    tl.store(columns + slot, tl.load(columns + slot) + 1, mask=alive)
    tl.store(drawn + slot, count + 1, mask=alive)
    tl.store(live + slot, (over == 0).to(tl.int8), mask=alive)
