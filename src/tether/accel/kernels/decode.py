"""Triton kernels for a decode step: products of few rows with large weights, what follows them, and the slots' cache.

Rows are tokens, (rows, features). Weights are (out, in), as a linear layer holds them. The first grid dimension runs
over rows, so that blocks that start together read the same part of a weight. Buffers have rows up to a multiple of the
tile, so only what is stored is masked. Matrices are read through tensor
descriptors, but for the one that is chosen among three.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: D103, SIM108 (a kernel's comment stands inside it; pointers are chosen by statements)
from __future__ import annotations

import triton
import triton.language as tl

# EARLY: 0 where kernels start one after the other. Else a kernel may start while the one before it ends: at 1 it lets
# the next one start after its own product, at 2 at once: with few rows, the next weights are asked for meanwhile.
# A step is one graph, and graphs run one after the other: what the step before left may be read without waiting.


@triton.jit
def begin(EARLY: tl.constexpr):
    if EARLY == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    # Where the results of the kernel before are needed. Every kernel waits, so that what it writes is read by none of
    # those before it.
    if EARLY > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(weight, first, K: tl.constexpr, BN: tl.constexpr, LINES: tl.constexpr):
    # Asks for the first LINES lines of 128 bytes of BN rows of a weight, which no kernel before this one writes.
    line: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
    at = weight + (first + tl.arange(0, BN)[:, None] * K + tl.arange(0, LINES)[None, :] * line)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def product(x, weight, row, feature, inside, span: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # (BM, BN) of x · weightᵀ from `row` and `feature` on, over `span` inputs from `inside` on
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, span, BK):
        a = x.load([row, inside + k])
        total = tl.dot(a, weight.load([feature, inside + k]).T, total, input_precision="ieee")
    return total


@triton.jit
def thin_kernel(
    x, first, second, third, first_scale, second_scale, third_scale, out, stride_part,
    K: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, MAX_RANK: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # out[part] (rows, 3, MAX_RANK) = scale * x (rows, K) · downᵀ over the part's share of K, for up to three adapters
    begin(EARLY)
    which, part = tl.program_id(1), tl.program_id(2)
    row, inside, rank = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, PADDED)
    if which == 0:
        down = first
        scale = first_scale
    elif which == 1:
        down = second
        scale = second_scale
    else:
        down = third
        scale = third_scale
    start = part * (K // SPLIT)
    x_at = x + row[:, None] * K + start + inside[None, :]
    down_at = down + rank[None, :] * K + start + inside[:, None]
    valid = rank[None, :] < RANK
    wait_for_inputs(EARLY)
    total = tl.zeros((BM, PADDED), tl.float32)
    for _ in range(0, K // SPLIT, BK):
        a = tl.load(x_at)
        total = tl.dot(a, tl.load(down_at, mask=valid, other=0.0).to(a.dtype), total, input_precision="ieee")
        x_at += BK
        down_at += BK
    let_next_start(EARLY)
    at = out + part * stride_part + (row[:, None] * 3 + which) * MAX_RANK + rank[None, :]
    tl.store(at, total * scale)


@triton.jit
def add_adapter(
    total, thin, up, which, has, row, feature, stride_part, like,
    N: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, MAX_RANK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # total (BM, BN) + thin · upᵀ for the adapter `which`, whose inner states `thin_kernel` has left in SPLIT parts;
    # nothing where `has` is false
    rank = tl.arange(0, PADDED)
    at = thin + (row[:, None] * 3 + which) * MAX_RANK + rank[None, :]
    inner = tl.zeros((row.shape[0], PADDED), tl.float32)
    for part in tl.static_range(SPLIT):
        inner += tl.load(at + part * stride_part, mask=(rank[None, :] < RANK) & has, other=0.0)
    valid = (feature[None, :] < N) & (rank[:, None] < RANK) & has
    weight = tl.load(up + feature[None, :] * RANK + rank[:, None], mask=valid, other=0.0)
    dtype = like.dtype.element_ty
    return tl.dot(inner.to(dtype), weight.to(dtype), total, input_precision="ieee")


@triton.jit
def linear_kernel(
    x, weight, weight_at, bias, out, rows, stride_part, thin, up, stride_thin,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, MAX_RANK: tl.constexpr, THIN: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # out[part] (rows, N) = x (rows, K) · weightᵀ over the part's share of K; the bias goes with part 0
    begin(EARLY)
    part = tl.program_id(2)
    span: tl.constexpr = K // SPLIT
    first_row, first_feature = tl.program_id(0) * BM, tl.program_id(1) * BN
    if AHEAD > 0 and tl.program_id(0) == 0:
        fetch_ahead(weight_at, first_feature * K + part * span, K, BN, AHEAD)
    wait_for_inputs(EARLY)
    total = product(x, weight, first_row, first_feature, part * span, span, BM, BN, BK)
    let_next_start(EARLY)
    row, feature = first_row + tl.arange(0, BM), first_feature + tl.arange(0, BN)
    if HAS_BIAS:
        added = tl.load(bias + feature, mask=feature < N, other=0.0).to(tl.float32)
        total += tl.where(part == 0, added, 0.0)[None, :]
    if RANK > 0:
        total = add_adapter(
            total, thin, up, 0, part == 0, row, feature, stride_thin, weight_at, N, RANK, PADDED, MAX_RANK, THIN
        )  # fmt: skip
    at = out + part * stride_part + row[:, None] * N + feature[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (feature[None, :] < N))


@triton.jit
def gated_kernel(
    x, gate, up, gate_at, up_at, out, rows, thin, gate_up, up_up, stride_thin, N: tl.constexpr, K: tl.constexpr,
    GELU: tl.constexpr, HAS_GATE: tl.constexpr, HAS_UP: tl.constexpr,
    RANK: tl.constexpr, PADDED: tl.constexpr, MAX_RANK: tl.constexpr, THIN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # out (rows, N) = act(x · gateᵀ) * (x · upᵀ), act being SiLU, or GELU by its tanh formula
    begin(EARLY)
    first_row, first_feature = tl.program_id(0) * BM, tl.program_id(1) * BN
    if AHEAD > 0 and tl.program_id(0) == 0:
        fetch_ahead(gate_at, first_feature * K, K, BN, AHEAD)
        fetch_ahead(up_at, first_feature * K, K, BN, AHEAD)
    wait_for_inputs(EARLY)
    gates, ups = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = x.load([first_row, k])
        gates = tl.dot(a, gate.load([first_feature, k]).T, gates, input_precision="ieee")
        ups = tl.dot(a, up.load([first_feature, k]).T, ups, input_precision="ieee")
    let_next_start(EARLY)
    row, feature = first_row + tl.arange(0, BM), first_feature + tl.arange(0, BN)
    if HAS_GATE:
        gates = add_adapter(
            gates, thin, gate_up, 0, HAS_GATE, row, feature, stride_thin, gate_at, N, RANK, PADDED, MAX_RANK, THIN
        )  # fmt: skip
    if HAS_UP:
        ups = add_adapter(
            ups, thin, up_up, 1, HAS_UP, row, feature, stride_thin, up_at, N, RANK, PADDED, MAX_RANK, THIN
        )
    if GELU:  # g (1 + tanh u) / 2 = g sigmoid(2 u)
        mixed = gates * tl.sigmoid(1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)) * ups
    else:
        mixed = gates * tl.sigmoid(gates) * ups
    at = out + row[:, None] * N + feature[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (feature[None, :] < N))


@triton.jit
def project_kernel(
    x, query, key, value, query_bias, key_bias, value_bias, query_norm, key_norm,
    cos, sin, columns, out, keys, values, rows, length, epsilon, thin, query_up, key_up, value_up, stride_thin,
    K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, ADAPTED: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr,
    MAX_RANK: tl.constexpr, THIN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    # One head of queries, keys or values for BM rows. Queries go to out (rows, HEADS · D); keys and values to
    # (slots, KV, length, D), at each row's column. ADAPTED has a bit for each of the three that has an adapter.
    begin(EARLY)
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    first_row = tl.program_id(0) * BM
    row = first_row + tl.arange(0, BM)
    half, feature = tl.arange(0, HALF), tl.arange(0, D)
    is_query = head < HEADS
    is_value = head >= HEADS + KV
    if is_query:
        weight = query + head * D * K
    elif is_value:
        weight = value + (head - HEADS - KV) * D * K
    else:
        weight = key + (head - HEADS) * D * K
    if AHEAD > 0 and tl.program_id(0) == 0:
        fetch_ahead(weight, 0, K, D, AHEAD)
    wait_for_inputs(EARLY)
    inside = tl.arange(0, BK)[:, None]
    weight_at = weight + feature[None, :] * K + inside
    total = tl.zeros((BM, D), tl.float32)
    for k in range(0, K, BK):
        if K % BK == 0:
            w = tl.load(weight_at)
        else:
            w = tl.load(weight_at, mask=k + inside < K, other=0.0)
        total = tl.dot(x.load([first_row, k]), w, total, input_precision="ieee")
        weight_at += BK
    let_next_start(EARLY)
    if HAS_BIAS:
        if is_query:
            bias = query_bias + head * D
        elif is_value:
            bias = value_bias + (head - HEADS - KV) * D
        else:
            bias = key_bias + (head - HEADS) * D
        total += tl.load(bias + feature).to(tl.float32)[None, :]
    if RANK > 0:
        if is_query:
            up = query_up + head * D * RANK
            which = 0
        elif is_value:
            up = value_up + (head - HEADS - KV) * D * RANK
            which = 2
        else:
            up = key_up + (head - HEADS) * D * RANK
            which = 1
        has = ((ADAPTED >> which) & 1) == 1
        total = add_adapter(
            total, thin, up, which, has, row, feature, stride_thin, query, D, RANK, PADDED, MAX_RANK, THIN
        )  # fmt: skip
    column = tl.load(columns + row, mask=row < rows, other=0)
    first, second = tl.split(tl.permute(tl.reshape(total, (BM, 2, HALF)), (0, 2, 1)))
    if head < HEADS + KV:
        if HAS_NORM:
            if is_query:
                norm = query_norm
            else:
                norm = key_norm
            scale = tl.rsqrt(tl.sum(total * total, 1) / D + epsilon)[:, None]
            first = first * scale * (tl.load(norm + half).to(tl.float32) + OFFSET)[None, :]
            second = second * scale * (tl.load(norm + HALF + half).to(tl.float32) + OFFSET)[None, :]
        angle = column[:, None] * HALF + half[None, :]
        c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    if is_query:
        at = out + row * (HEADS * D) + head * D
    elif is_value:
        at = values + ((row.to(tl.int64) * KV + head - HEADS - KV) * length + column) * D
    else:
        at = keys + ((row.to(tl.int64) * KV + head - HEADS) * length + column) * D
    at = at[:, None] + half[None, :]
    valid = row[:, None] < rows
    tl.store(at, first.to(out.dtype.element_ty), mask=valid)
    tl.store(at + HALF, second.to(out.dtype.element_ty), mask=valid)


@triton.jit
def step_norm_kernel(
    hidden, parts, after, weight, out, stride_part, after_epsilon, epsilon, tokens, table, embedding_scale,
    H: tl.constexpr, PARTS: tl.constexpr, AFTER: tl.constexpr, OFFSET: tl.constexpr, EMBED: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr, NORMS: tl.constexpr = True,
):  # fmt: skip
    # hidden += the sum of the parts (normed first with AFTER), rounded as it is stored; out = its RMS norm. With EMBED
    # hidden is the embedding of the row's token. Norms multiply by OFFSET + weight. Without NORMS, out = hidden. One
    # program a row.
    begin(EARLY)
    row = tl.program_id(0)
    feature = tl.arange(0, BLOCK)
    valid = feature < H
    at = row * H + feature
    dtype = hidden.dtype.element_ty
    scales = tl.zeros((BLOCK,), tl.float32)
    if NORMS:
        scales = tl.load(weight + feature, mask=valid, other=0.0).to(tl.float32) + OFFSET
    wait_for_inputs(EARLY)
    if EMBED:
        token = tl.load(tokens + row)
        x = tl.load(table + token * H + feature, mask=valid, other=0.0).to(tl.float32) * embedding_scale
    else:
        x = tl.load(hidden + at, mask=valid, other=0.0).to(tl.float32)
        added = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(parts + part * stride_part + at, mask=valid, other=0.0).to(tl.float32)
        if AFTER:
            added = added.to(dtype).to(tl.float32)
            size = tl.rsqrt(tl.sum(added * added, 0) / H + after_epsilon)
            added = added * size * (tl.load(after + feature, mask=valid, other=0.0).to(tl.float32) + OFFSET)
            added = added.to(dtype).to(tl.float32)
        x += added
    let_next_start(EARLY)
    rounded = x.to(dtype)
    tl.store(hidden + at, rounded, mask=valid)
    if NORMS:
        x = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / H + epsilon)
        tl.store(out + at, (x * scale * scales).to(out.dtype.element_ty), mask=valid)
    else:
        tl.store(out + at, rounded, mask=valid)


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
    query, keys, values, columns, live, out, partial, weights, length, rows, scale, cap,
    D: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, BK: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # The GROUP query heads of one key head in one slot, over one part of its columns: each key and value is read once.
    # `scale` gives scores in powers of 2, or in units of `cap`, itself in powers of 2. WINDOW is how many columns are
    # seen, or 0 for all. With one part the result is stored; else the part, its highest score and its sum are. An
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
        tl.store(partial + split * rows * KV * GROUP * D + q_at, mixed, mask=valid)
        at = ((split * rows + slot) * KV * GROUP + head * GROUP + group) * 2
        tl.store(weights + at, highest, mask=group < GROUP)
        tl.store(weights + at + 1, total, mask=group < GROUP)


@triton.jit
def combine_kernel(
    partial, weights, out, rows, D: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr
):
    # The parts of one slot's head, each weighted by its sum at a common highest score.
    begin(EARLY)
    slot, head = tl.program_id(0), tl.program_id(1)
    split, feature = tl.arange(0, SPLITS), tl.arange(0, D)
    wait_for_inputs(EARLY)
    at = (split * rows + slot) * HEADS + head
    highest, total = tl.load(weights + at * 2), tl.load(weights + at * 2 + 1)
    share = tl.exp2(highest - tl.max(highest, 0))
    mixed = tl.sum(tl.load(partial + at[:, None] * D + feature[None, :]) * share[:, None], 0)
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
