"""Baselines of the policy gradient that need no critic: the mean of a batch, and a moving average over steps.

Both are of R, the return of a whole answer, and one number is subtracted from the weight of every token. Groups of
answers to one prompt have their baselines in `tether.ops.advantages`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tether.ops.masks import last_index, widened


def mean_return(returns: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the mean over rows of R, the entry of `returns` (B, T) at the row's first sampled token.

    There the total return and the reward to go are the same number. A row without a sampled token is not counted.
    """
    width = mask.shape[1]
    first = (width - 1 - last_index(mask.flip(1))).clamp_max(width - 1)
    answered = mask.any(dim=1)
    found = widened(returns).gather(1, first[:, None])[:, 0].masked_fill(~answered, 0.0)
    return (found.sum() / answered.sum()).to(returns.dtype)


def less_baseline(returns: Tensor, mask: Tensor, baseline: Tensor | float) -> Tensor:
    """(B, T) returns - baseline on sampled tokens, 0 elsewhere (Williams 1992).

    A number that does not depend on the answer changes the variance of the gradient and not its mean. The mean of a
    batch of B answers contains the answer itself with weight 1 / B, which scales the gradient by (B - 1) / B.
    """
    return torch.where(mask, returns - baseline, 0.0)


@dataclass(frozen=True)
class MovingAverage:
    """The mean of earlier steps' numbers, the latest with the largest weight (reinforcement comparison, Sutton 1984).

        b_k = sum_(j<k) decay^(k-1-j) x_j / sum_(j<k) decay^(k-1-j);    b_1 = 0

    It is an exponential moving average without the bias of its start. A value: `after` returns the next one.
    """

    decay: float
    value: float = 0.0
    weight: float = 0.0  # the sum of the powers of decay so far

    def after(self, number: float) -> MovingAverage:
        """The average once a step's number is known."""
        weight = self.decay * self.weight + 1.0
        return replace(self, value=self.value + (number - self.value) / weight, weight=weight)
