"""From one score a row to one reward a token."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.ops.masks import last_index


def token_rewards(scores: Tensor, kl: Tensor | None, mask: Tensor, *, kl_coef: float) -> Tensor:
    """(B, T) r_t = -kl_coef * kl_t on sampled tokens, plus the score on the row's last sampled token; 0 elsewhere.

    `scores` (B,), `kl` (B, T) or None. The episode ends on the last *sampled* token of each row, wherever the padding
    stands (Stiennon et al. 2020).
    """
    shape = (mask.shape[0], 1)
    ends = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    ends = ends.scatter(1, last_index(mask).reshape(shape), scores.reshape(shape))
    if kl is None:
        return ends
    return ends - kl_coef * kl.masked_fill(~mask, 0.0)


def missing_eos_penalty(scores: Tensor, truncated: Tensor, penalty: float | None) -> Tensor:
    """(B,) the score, or `penalty` in its place where the answer never ended (Stiennon et al. 2020); None: as is."""
    return scores if penalty is None else torch.where(truncated, penalty, scores)


def clip_scores(scores: Tensor, limit: float | None) -> Tensor:
    """(B,) clamped to [-limit, limit]; None: no change."""
    return scores if limit is None else scores.clamp(-limit, limit)
