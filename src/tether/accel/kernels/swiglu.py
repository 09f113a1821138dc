"""Gated products act(gate) * up, forward and backward, where act is SiLU or GELU. No autograd.

With GELU by its tanh formula, g (1 + tanh u) / 2 = g sigmoid(2 u), both are x times a share: sigmoid(x) or
sigmoid(2 u).
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.accel.spec import Activation

GATE_BLOCK = 4096  # numbers that one program reads


@triton.jit
def open_share(numbers, GELU: tl.constexpr):
    """What the activation of numbers is a multiple of: act(x) = x share."""
    if GELU:
        share = tl.sigmoid(1.5957691216057308 * (numbers + 0.044715 * numbers * numbers * numbers))
    else:
        share = tl.sigmoid(numbers)
    return share


@triton.jit
def bend(numbers, share, GELU: tl.constexpr):
    """The slope of the activation over its share: 1 + x (1 - share) v, v being d(2 u) / dx for GELU and 1 for SiLU."""
    if GELU:
        inner = 1.5957691216057308 * (1.0 + 0.134145 * numbers * numbers)
        bent = 1.0 + numbers * (1.0 - share) * inner
    else:
        bent = 1.0 + numbers * (1.0 - share)
    return bent


@triton.jit
def gate_kernel(gate, up, product, count, BLOCK: tl.constexpr, GELU: tl.constexpr = False):
    """product = act(gate) up, act being SiLU, or GELU by its tanh formula."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = places < count
    numbers = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
    other = tl.load(up + places, mask=real, other=0.0).to(tl.float32)
    result = numbers * open_share(numbers, GELU) * other
    tl.store(product + places, result.to(product.dtype.element_ty), mask=real)


@triton.jit
def gate_backward_kernel(
    gate, up, grad, product, grad_up, count, AGAIN: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr = False
):
    """d gate (in place of `grad`) and d up of product = act(gate) up; with AGAIN, the product itself once more.

    `product` and `grad_up` may be `gate` and `up` themselves.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = places < count
    numbers = tl.load(gate + places, mask=real, other=0.0).to(tl.float32)
    other = tl.load(up + places, mask=real, other=0.0).to(tl.float32)
    slope = tl.load(grad + places, mask=real, other=0.0).to(tl.float32)
    share = open_share(numbers, GELU)
    opened = numbers * share
    if AGAIN:
        tl.store(product + places, (opened * other).to(product.dtype.element_ty), mask=real)
    tl.store(grad_up + places, (slope * opened).to(grad_up.dtype.element_ty), mask=real)
    bent = share * bend(numbers, share, GELU)
    tl.store(grad + places, (slope * other * bent).to(grad.dtype.element_ty), mask=real)


def gate(opened: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """act(opened) * up."""
    product = torch.empty_like(opened)
    if opened.numel():
        grid = (-(-opened.numel() // GATE_BLOCK),)
        gate_kernel[grid](opened, up, product, opened.numel(), BLOCK=GATE_BLOCK, GELU=kind == "gelu_tanh", num_warps=8)
    return product


def gate_backward(
    opened: Tensor, up: Tensor, grad: Tensor, product: Tensor | None, kind: Activation
) -> tuple[Tensor, Tensor]:
    """`(d opened, d up)`; `grad` is overwritten, and `product`, where there is one, filled with act(opened) * up."""
    grad_up = torch.empty_like(up)
    if opened.numel():
        gate_backward_kernel[(-(-opened.numel() // GATE_BLOCK),)](
            opened, up, grad, opened if product is None else product, grad_up, opened.numel(),
            AGAIN=product is not None, BLOCK=GATE_BLOCK, GELU=kind == "gelu_tanh", num_warps=8,
        )  # fmt: skip
    return grad, grad_up
