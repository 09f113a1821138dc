"""Log-probabilities and entropies by Triton kernels, for half-precision states on a CUDA device.

The products stay with the library and keep the states' type; each kernel reads their logits once, in place. See
`chunked_logprobs` for what is computed. Its backward pass runs once.
"""

# pyright: reportIndexIssue=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from tether.accel.fused_pass.gradient_accumulation import Gradients
from tether.device_transfer import at
from tether.ops.logprobs import rows_at_a_time

CHUNK_ELEMENTS = 2**27  # logits held at a time: 256 MiB in half precision


def logprobs(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `chunked_logprobs`, for states that `logprobs_supported` in `supported.py` names."""
    rows = rows_at_a_time(weight, chunk_elements or CHUNK_ELEMENTS)
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", FusedLogprobs.apply)
    with at(states.device):
        return apply(
            states, weight, bias, targets, scale / temperature, rows, 0.0 if softcap is None else softcap / scale
        )


class FusedLogprobs(torch.autograd.Function):
    """As `chunked_logprobs` in `ops/logprobs.py`: z = factor · limit · tanh(x / limit) of products x.

    `factor` is scale / temperature, and `limit` softcap / scale, or 0 for z = factor · x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        factor: float,
        rows: int,
        limit: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """`(logprobs, entropy)`, (N,) each."""
        logprobs, entropy, normaliser = torch.empty(3, len(targets), dtype=torch.float32, device=states.device)
        frozen = not any(ctx.needs_input_grad[1:3]) and limit == 0.0  # else the mean of rows is not what is needed
        mean_rows = torch.empty_like(states) if frozen and ctx.needs_input_grad[0] else None
        logits: Tensor | None = None
        for part in _parts(len(targets), rows):
            logits = torch.nn.functional.linear(states[part], weight, bias)
            read_rows(logits, targets[part], logprobs[part], entropy[part], normaliser[part], factor, limit)
            if mean_rows is not None:
                torch.mm(to_shares(logits, normaliser[part], factor), weight, out=mean_rows[part])
        # Where one chunk is all there is, it waits for the backward pass, which turns it into slopes.
        ctx.logits = logits if len(targets) <= rows and not frozen and any(ctx.needs_input_grad[:3]) else None
        ctx.save_for_backward(states, weight, bias, targets, normaliser, entropy, mean_rows)
        ctx.factor, ctx.rows, ctx.limit = factor, rows, limit
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """d logprob / dz = onehot - p,  d entropy / dz = -p (log p + entropy); then the chain rule through z."""
        if torch.is_grad_enabled():
            raise RuntimeError("chunked_logprobs has no second derivative: use log_distributions")
        states, weight, bias, targets, normaliser, entropy, mean_rows = ctx.saved_tensors
        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normaliser)
        if mean_rows is not None and grad_entropy is None:
            slope = (grad_logprobs * ctx.factor).to(states.dtype)
            return (weight[targets].sub_(mean_rows).mul_(slope[:, None]), *[None] * 6)
        grad_states = torch.empty_like(states) if wants_states else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        gradients = Gradients([weight])
        kept, ctx.logits = ctx.logits, None
        parts = _parts(len(targets), ctx.rows)
        for part in parts:
            slope = kept if kept is not None else torch.nn.functional.linear(states[part], weight, bias)
            slopes = None if grad_entropy is None else grad_entropy[part]
            row = targets[part], normaliser[part], entropy[part], grad_logprobs[part], slopes
            to_slopes(slope, *row, ctx.factor, ctx.limit)
            if grad_states is not None:
                torch.mm(slope, weight, out=grad_states[part])
            if wants_weight and len(parts) == 1:
                gradients.add_product(weight, slope, states)
                grad_weight = gradients.returned()[0]
            elif wants_weight:
                grad_weight = _sum(grad_weight, slope.t() @ states[part])
            if wants_bias:
                grad_bias = _sum(grad_bias, slope.sum(dim=0))
        return (
            grad_states,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum over chunks, in fp32 from the second one on: half-precision sums would lose the small ones."""
    if total is None:
        return part
    return (total if total.dtype == torch.float32 else total.float()).add_(part)


def read_rows(
    logits: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
    normaliser: Tensor,
    factor: float,
    limit: float = 0.0,
) -> None:
    """Fill in what each row of logits (n, V) says of its target (n,)."""
    from tether.accel.kernels.logprobs import BLOCK, row_kernel

    row_kernel[(len(logits),)](
        logits, targets, logprobs, entropy, normaliser, logits.shape[1], factor, BLOCK=BLOCK, LIMIT=limit, num_warps=8
    )


def to_slopes(
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    factor: float,
    limit: float = 0.0,
) -> None:
    """Turn logits (n, V) into the slope of the loss in them, in place."""
    from tether.accel.kernels.logprobs import BLOCK, slope_kernel

    slope_kernel[(len(logits), -(-logits.shape[1] // BLOCK))](
        logits, targets, normaliser, entropy, grad_logprobs.contiguous(),
        (grad_logprobs if grad_entropy is None else grad_entropy).contiguous(), logits.shape[1], factor,
        ENTROPY=grad_entropy is not None, BLOCK=BLOCK, LIMIT=limit, num_warps=8,
    )  # fmt: skip


def to_shares(logits: Tensor, normaliser: Tensor, factor: float) -> Tensor:
    """Turn logits (n, V) into probabilities, in place."""
    from tether.accel.kernels.logprobs import BLOCK, share_kernel

    grid = (len(logits), -(-logits.shape[1] // BLOCK))
    share_kernel[grid](logits, normaliser, logits.shape[1], factor, BLOCK=BLOCK, num_warps=8)
    return logits
