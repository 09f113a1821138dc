"""Triton kernels for a decode step's matrix products: few rows, large weights, and what follows fused behind them.

Rows are tokens, (rows, features). Weights are (out, in), as a linear layer holds them. The first grid dimension runs
over rows, so that blocks that start together read the same piece of a weight. Buffers have rows up to a multiple of the
tile, so only what is stored is masked. Matrices are read through tensor
descriptors, but for the one that is chosen among three.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# ruff: noqa: D103, SIM108 (a kernel's comment stands inside it; pointers are chosen by statements)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    # Where a kernel may start while the one before it ends, this is where that one's results are needed. Every kernel
    # waits, so that what it writes is read by none of those before it.
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
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
def linear_kernel(
    x, weight, weight_at, bias, out, rows, stride_part,
    N: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # out[part] (rows, N) = x (rows, K) · weightᵀ over the part's share of K; the bias goes with part 0
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
    at = out + part * stride_part + row[:, None] * N + feature[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (feature[None, :] < N))


@triton.jit
def gated_kernel(
    x, gate, up, gate_at, up_at, out, rows, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # out (rows, N) = silu(x · gateᵀ) * (x · upᵀ)
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
    mixed = gates * tl.sigmoid(gates) * ups
    row, feature = first_row + tl.arange(0, BM), first_feature + tl.arange(0, BN)
    at = out + row[:, None] * N + feature[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (feature[None, :] < N))


@triton.jit
def project_kernel(
    x, query, key, value, query_bias, key_bias, value_bias, query_norm, key_norm,
    cos, sin, columns, out, keys, values, rows, length, epsilon,
    K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # One head of queries, keys or values for BM rows. Queries go to out (rows, HEADS · D); keys and values to
    # (slots, KV, length, D), at each row's column.
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
    weight_at = weight + feature[None, :] * K + tl.arange(0, BK)[:, None]
    total = tl.zeros((BM, D), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(x.load([first_row, k]), tl.load(weight_at), total, input_precision="ieee")
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
    column = tl.load(columns + row, mask=row < rows, other=0)
    first, second = tl.split(tl.permute(tl.reshape(total, (BM, 2, HALF)), (0, 2, 1)))
    if head < HEADS + KV:
        if HAS_NORM:
            if is_query:
                norm = query_norm
            else:
                norm = key_norm
            scale = tl.rsqrt(tl.sum(total * total, 1) / D + epsilon)[:, None]
            first = first * scale * tl.load(norm + half).to(tl.float32)[None, :]
            second = second * scale * tl.load(norm + HALF + half).to(tl.float32)[None, :]
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
def add_norm_kernel(
    hidden, parts, weight, out, stride_part, epsilon,
    H: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # hidden += the sum of the parts, rounded as it is stored; out = its RMS norm. One program a row.
    row = tl.program_id(0)
    feature = tl.arange(0, BLOCK)
    valid = feature < H
    at = row * H + feature
    scales = tl.load(weight + feature, mask=valid, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    x = tl.load(hidden + at, mask=valid, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        x += tl.load(parts + part * stride_part + at, mask=valid, other=0.0)
    let_next_start(EARLY)
    rounded = x.to(hidden.dtype.element_ty)
    if PARTS > 0:
        tl.store(hidden + at, rounded, mask=valid)
    x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + epsilon)
    tl.store(out + at, (x * scale * scales).to(out.dtype.element_ty), mask=valid)
