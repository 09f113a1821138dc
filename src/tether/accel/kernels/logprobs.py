"""Triton kernels over logits: what a row of them says of its token, and the slope of a loss, in one pass each.

Logits are read in the weights' type and multiplied by `factor` (scale over temperature); sums are in float32. With
LIMIT (softcap over scale) a logit x is LIMIT tanh(x / LIMIT) first; it is 0 where logits are not capped.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096  # logits that a program holds at a time
# One number a row each, from anywhere in a longer column: a kernel for every alignment would gain nothing.
BY_ROW = ["targets", "logprobs", "entropy", "normaliser", "grad_logprobs", "grad_entropy"]


@triton.jit
def limited(logits, LIMIT: tl.constexpr):
    """LIMIT tanh(logits / LIMIT), or the logits where there is no limit; tanh s = 2 sigmoid(2 s) - 1."""
    if LIMIT > 0.0:
        logits = LIMIT * (2.0 * tl.sigmoid(logits * (2.0 / LIMIT)) - 1.0)
    return logits


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
def row_kernel(
    logits, targets, logprobs, entropy, normaliser, width, factor, BLOCK: tl.constexpr, LIMIT: tl.constexpr = 0.0
):
    """One row of z = factor * logits: z[target] - logsumexp(z), the entropy of softmax(z), and logsumexp(z).

    The sums s = Σ exp(z - m) and t = Σ exp(z - m) (z - m) are moved to each new maximum m; entropy = log s - t / s.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    top, mass, spread = -1.0e38, 0.0, 0.0
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(start + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        if LIMIT > 0.0:  # where there is no column, the limit would be a number
            z = tl.where(columns < width, limited(z, LIMIT), -float("inf"))
        z = z * factor
        higher = tl.maximum(top, tl.max(z, axis=0))
        moved = tl.exp(top - higher)
        spread = moved * (spread + mass * (top - higher))
        mass = moved * mass
        top = higher
        below = tl.maximum(z - top, -1.0e30)  # finite where there is no column: 0 times infinity is no number
        share = tl.exp(below)
        mass += tl.sum(share, axis=0)
        spread += tl.sum(share * below, axis=0)
    chosen = limited(tl.load(start + tl.load(targets + row)).to(tl.float32), LIMIT) * factor
    log_mass = tl.log(mass)
    tl.store(logprobs + row, chosen - top - log_mass)
    tl.store(entropy + row, log_mass - spread / mass)
    tl.store(normaliser + row, top + log_mass)


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
def slope_kernel(
    logits, targets, normaliser, entropy, grad_logprobs, grad_entropy, width, factor,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr = 0.0,
):  # fmt: skip
    """In place of logits: d loss / d logits = factor * (g (onehot - p) - h p (log p + entropy)), g and h the row's.

    With LIMIT, times 1 - tanh².
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    places = logits + row * width + columns
    z = limited(tl.load(places, mask=real, other=0.0).to(tl.float32), LIMIT)
    logp = z * factor - tl.load(normaliser + row)
    g = tl.load(grad_logprobs + row)
    slope = tl.where(columns == tl.load(targets + row), g, 0.0)
    if ENTROPY:
        g += tl.load(grad_entropy + row) * (logp + tl.load(entropy + row))
    slope -= g * tl.exp(logp)
    if LIMIT > 0.0:
        slope *= 1.0 - (z / LIMIT) * (z / LIMIT)
    tl.store(places, (slope * factor).to(logits.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
def share_kernel(logits, normaliser, width, factor, BLOCK: tl.constexpr):
    """In place of logits: the probabilities softmax(factor * logits)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    places = logits + row * width + columns
    logp = tl.load(places, mask=real, other=0.0).to(tl.float32) * factor - tl.load(normaliser + row)
    tl.store(places, tl.exp(logp).to(logits.dtype.element_ty), mask=real)
