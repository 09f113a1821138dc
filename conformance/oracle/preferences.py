"""Losses from people's choices: DPO, pairs, and rankings of K answers."""

import math

from conformance.oracle.grids import Row
from conformance.oracle.masks import mean


def log_sigmoid(x: float) -> float:
    """log(1 / (1 + exp(-x))) = min(x, 0) - log(1 + exp(-|x|)), safe at both ends."""
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def dpo_loss(
    chosen: Row, rejected: Row, ref_chosen: Row, ref_rejected: Row, beta: float, label_smoothing: float
) -> dict[str, Row]:
    """m = beta ((chosen - ref_chosen) - (rejected - ref_rejected)); L = -(1 - e) log s(m) - e log s(-m)."""
    losses: Row = []
    margins: Row = []
    for good, bad, ref_good, ref_bad in zip(chosen, rejected, ref_chosen, ref_rejected, strict=True):
        margin = beta * ((good - ref_good) - (bad - ref_bad))
        margins.append(margin)
        losses.append(-(1 - label_smoothing) * log_sigmoid(margin) - label_smoothing * log_sigmoid(-margin))
    return {"loss": losses, "margin": margins}


def pairwise_loss(chosen: Row, rejected: Row) -> dict[str, float]:
    """L = mean of -log s(chosen - rejected)."""
    return {"loss": mean([-log_sigmoid(good - bad) for good, bad in zip(chosen, rejected, strict=True)])}


def kwise_loss(scores: Row, ranks: list[int], group_ids: list[int]) -> dict[str, float]:
    """L = mean over prompts of the mean over their pairs (rank_i < rank_j) of -log s(s_i - s_j).

    Rank 1 is the best. Equal ranks make no pair, and a prompt without a pair is not counted.
    """
    prompt_losses: Row = []
    for group in sorted(set(group_ids)):
        members = [i for i, g in enumerate(group_ids) if g == group]
        pairs = [(i, j) for i in members for j in members if ranks[i] < ranks[j]]
        if pairs:
            prompt_losses.append(mean([-log_sigmoid(scores[i] - scores[j]) for i, j in pairs]))
    return {"loss": mean(prompt_losses)}
