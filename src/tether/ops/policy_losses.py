"""Per-token policy losses (to be minimised), all (B, T), with r = exp(new - old) the ratio of probabilities.

The exponent is clamped from above (`ops.kl.log_ratio`). Without that, r overflows, and even where the clip takes the
other branch of the minimum the backward pass multiplies 0 by infinity, which is NaN.

Clipping only ever removes an *incentive*: where A < 0 and r > 1 + eps the loss is not bounded, on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tether.ops.kl import Estimator, kl_estimate, log_ratio


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi (Williams 1992); its gradient is -A grad log pi."""
    return -advantages * logprobs


def unclipped_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-r A: the surrogate L^CPI (Kakade and Langford 2002; PPO paper, equation 6)."""
    return -torch.exp(log_ratio(logprobs, old_logprobs)) * advantages


def clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): the pessimistic bound L^CLIP (PPO paper, equation 7).

    With `dual_clip` c > 1, where A < 0: -max(min(...), c A) (Ye et al. 2020).
    """
    ratio = torch.exp(log_ratio(logprobs, old_logprobs))
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


@dataclass(frozen=True)
class ClipCases:
    """(B, T) bool each: where the ratio lies outside the range, by the sign of A and the side; and where that bound."""

    positive_high: Tensor  # A > 0, r above: the clip binds, no more incentive to raise
    positive_low: Tensor  # A > 0, r below: the clip does not bind, the token is still pulled up
    negative_high: Tensor  # A < 0, r above: the clip does not bind, the token is still pushed down
    negative_low: Tensor  # A < 0, r below: the clip binds, no more incentive to lower
    clipped: Tensor  # the gradient is removed


def clip_cases(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClipCases:
    """Which of the four cases each token is in; a token with A = 0 is in none."""
    ratio = torch.exp(log_ratio(logprobs, old_logprobs))
    high, low = ratio > 1.0 + clip_high, ratio < 1.0 - clip_low
    positive, negative = advantages > 0, advantages < 0
    clipped = (positive & high) | (negative & low)
    if dual_clip is not None:
        clipped = clipped | (negative & (ratio > dual_clip))
    return ClipCases(positive & high, positive & low, negative & high, negative & low, clipped)


def truncated_importance(old_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(old / behavior, cap), a weight for tokens drawn from `behavior` as if the old policy had drawn them.

    Without a cap the weight is unbiased and its variance unbounded (Ionides 2008; for engines that round otherwise than
    the trainer, Yao et al. 2025). Exactly 1 where the two agree to the bit and the cap is at least 1.
    """
    return torch.exp(log_ratio(old_logprobs, behavior_logprobs)).clamp(max=cap)


def kl_penalty_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float, estimator: Estimator
) -> Tensor:
    """-r A + beta * k(old || new): the penalised surrogate L^KLPEN (PPO paper, equation 8), tokens drawn from old."""
    return unclipped_loss(logprobs, old_logprobs, advantages) + beta * kl_estimate(old_logprobs, logprobs, estimator)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Tensor:
    """(v - R)^2 / 2; with `clip`, the larger of that and the same at old + clamp(v - old, -clip, clip).

    The clipped form is the one in the PPO authors' released code.
    """
    loss = (values - returns) ** 2 / 2
    if clip is None:
        return loss
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(loss, (clipped - returns) ** 2 / 2)
