"""Whether an optimiser's step can leave the range of floating-point numbers."""

from __future__ import annotations

import math

import torch
from torch import nn

from tether.learner.adamw import MixedAdamW


def cannot_overflow(optimizer: torch.optim.Optimizer, largest_norm: float) -> bool:
    """True where AdamW's next step is sure to give finite weights and a finite state of its own.

    No gradient of this or an earlier step has a norm above G = `largest_norm`. The running means are convex, so
    |m| <= G and v <= G^2. The step is at most lr / (1 - beta1) * |m| / epsilon, and decay at most lr * decay * |p|:

        |p'| <= (1 + lr * decay) * max |p| + lr / (1 - beta1) * G / epsilon

    With the usual settings that is far below the largest number, and one reading of the weights settles it. Of another
    optimiser nothing is known, and the answer is False.
    """
    if type(optimizer) not in (torch.optim.AdamW, MixedAdamW):
        return False
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            continue
        # The kernels compute in float32 or better, so a narrower type bounds only what is stored.
        largest = min(torch.finfo(p.dtype).max for p in parameters) / 4.0
        rate, (beta1, _), epsilon = float(group["lr"]), group["betas"], group["eps"]
        if not (math.isfinite(rate) and beta1 < 1.0 and epsilon > 0.0):
            return False
        weights = float(nn.utils.get_total_norm([p.detach() for p in parameters]))  # no less than the largest of them
        scale, shrink = abs(rate) / (1.0 - beta1), 1.0 + abs(rate * group["weight_decay"])
        bound = shrink * weights + scale * largest_norm / epsilon
        # The kernel's intermediate numbers have to fit as well: infinity times a weight of 0 is not a number, and the
        # rate may meet the mean before it is divided by what epsilon keeps from 0.
        steps_between = (scale, shrink, largest_norm**2, largest_norm / epsilon, scale * largest_norm)
        if not all(number <= largest for number in (bound, *steps_between)):  # False for what is not a number
            return False
    return True
