"""Losses of preferences: reward models from pairs and rankings, and DPO."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pairwise_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(N,) -log sigmoid(s_chosen - s_rejected): the Bradley-Terry loss (Christiano et al. 2017)."""
    return -F.logsigmoid(chosen - rejected)


def ranked_pairs(ranks: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(better, worse, pairs)`, each (P,): the rows of every pair with rank_better < rank_worse in one prompt.

    `ranks` (0 is best) and `group_ids` are (B,). Ties make no pair. `pairs` is how many the pair's prompt has: weighed
    by 1 / pairs, all pairs of a prompt make one example, and a prompt with many answers is not fitted many times over
    (Ouyang et al. 2022).
    """
    same = group_ids[:, None] == group_ids[None, :]
    wins = (ranks[:, None] < ranks[None, :]) & same  # (B, B)
    better, worse = torch.argwhere(wins).unbind(dim=1)
    pairs_of_prompt = same.float() @ wins.sum(dim=1).float()
    return better, worse, pairs_of_prompt[better]


def count_ranked_prompts(ranks: Tensor, group_ids: Tensor) -> float:
    """How many prompts have at least one pair; a prompt whose answers all tie has nothing to teach."""
    return round(float((1.0 / ranked_pairs(ranks, group_ids)[2]).sum()))


def kwise_total(scores: Tensor, ranks: Tensor, group_ids: Tensor) -> Tensor:
    """Scalar: the sum over prompts of the mean of -log sigmoid(s_i - s_j) over the prompt's pairs, i ranked better.

    `scores` (B,). With two answers a prompt this is the sum of `pairwise_losses`.
    """
    better, worse, pairs = ranked_pairs(ranks, group_ids)
    return (pairwise_losses(scores[better], scores[worse]) / pairs.to(scores.dtype)).sum()


def dpo_margins(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    """(N,) beta * [(log pi - log ref)(chosen) - (log pi - log ref)(rejected)], from sequence log-probs (N,)."""
    return beta * ((chosen - ref_chosen) - (rejected - ref_rejected))


def dpo_losses(margins: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """(N,) -(1 - e) log sigmoid(margin) - e log sigmoid(-margin) (Rafailov et al. 2023; e from Mitchell 2023)."""
    return -(1.0 - label_smoothing) * F.logsigmoid(margins) - label_smoothing * F.logsigmoid(-margins)
