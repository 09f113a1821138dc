"""What a loss is averaged over: per-token weights, and the size that the weighted sum is divided by.

A sum divided by a size that is known before the forward pass makes micro-batches, packing and ranks leave the gradient
unchanged: sum over micro-batches of (sum_i w_i l_i) / size is the same number however the rows are split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tether.ops.statistics import masked_sum
from tether.tensor_cache import tensor_cached


@tensor_cached
def true_places(mask: Tensor) -> float:
    """How many places of `mask` (B, T) are True."""
    return float(mask.sum())


@tensor_cached
def true_rows(mask: Tensor) -> float:
    """How many rows of `mask` (B, T) have a True place."""
    return float(mask.any(dim=1).sum())


@dataclass(frozen=True)
class Aggregation:
    """Which mean a loss is.

    token      sum over sampled tokens / their number
    sequence   mean over rows of each row's own mean (Shao et al. 2024); a row with no sampled token is not one
    fixed      sum over sampled tokens / (rows * fixed_length) (Liu et al. 2025)
    """

    over: Literal["token", "sequence", "fixed"] = "token"
    fixed_length: int | None = None

    def size(self, mask: Tensor) -> float:
        """What the sum over `mask` (B, T) is divided by."""
        if self.over == "token":
            return true_places(mask)
        if self.over == "sequence":
            return true_rows(mask)
        assert self.fixed_length is not None
        return float(mask.shape[0] * self.fixed_length)

    def total(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Scalar: the weighted sum of `losses` (B, T) over True places."""
        if self.over == "sequence":
            losses = losses / mask.sum(dim=1, keepdim=True).clamp_min(1)
        return masked_sum(losses, mask)
