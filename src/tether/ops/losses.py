"""Losses of policies and of preferences, to be minimised, and what each is averaged over.

A loss is a weighted sum divided by a size that is known before the forward pass. Micro-batches, packing and ranks
therefore leave the gradient unchanged: the sum over micro-batches of (sum_i w_i l_i) / size does not depend on the
split. Policy losses are per token, (B, T), with r = exp(new - old) the ratio of probabilities. The exponent is clamped
from above (`ops.kl.log_ratio`): an overflow of r gives NaN gradients even where the clip takes the other branch.
Clipping only removes an incentive: where A < 0 and r > 1 + eps the loss is unbounded on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tether.errors import ConfigError
from tether.ops.kl import Estimator, kl_estimate, log_ratio
from tether.ops.masks import masked_sum


def count_tokens(mask: Tensor) -> float:
    """The number of True entries of `mask` (B, T)."""
    return float(mask.sum())


def count_rows(mask: Tensor) -> float:
    """The number of rows of `mask` (B, T) with a True entry."""
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

    def __post_init__(self) -> None:
        if self.over not in ("token", "sequence", "fixed"):
            raise ConfigError(f"Aggregation over {self.over!r}: use token, sequence or fixed")
        if self.over == "fixed" and self.fixed_length is None:
            raise ConfigError('Aggregation over "fixed" needs its length: Aggregation("fixed", 128)')

    def size(self, mask: Tensor, *, tokens: float | None = None, rows: float | None = None) -> float:
        """The divisor of the sum over `mask` (B, T).

        `tokens` and `rows` are `count_tokens(mask)` and `count_rows(mask)`; pass them where they are known already.
        """
        if self.over == "token":
            return count_tokens(mask) if tokens is None else tokens
        if self.over == "sequence":
            return count_rows(mask) if rows is None else rows
        assert self.fixed_length is not None
        return float(mask.shape[0] * self.fixed_length)

    def total(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Scalar: the weighted sum of `losses` (B, T) over True positions."""
        if self.over == "sequence":
            losses = losses / mask.sum(dim=1, keepdim=True).clamp_min(1)
        return masked_sum(losses, mask)


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


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(B, T) log s = (1/l) sum_t (log pi - log pi_old) over a row's l sampled tokens, on every token of the row.

    s is the ratio of the probabilities of the whole answer to the power 1/l: the geometric mean of its tokens' ratios
    (GSPO, Zheng et al. 2025).
    """
    difference = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    mean = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp_min(1)
    return mean.expand_as(logprobs)


def gspo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A): the clip of the answer's ratio (GSPO, Zheng et al. 2025).

    (B, T), the same on every token of a row whose tokens share A, so its mean over sequences is GSPO's. The clip keeps
    or removes the gradient of a whole answer, -s A / l at each token. For answers of one token it is PPO's.
    """
    log_s = sequence_log_ratio(logprobs, old_logprobs, mask)
    return clip_loss(log_s, torch.zeros_like(log_s), advantages, clip_low=clip_low, clip_high=clip_high)


def cispo_weight(logprobs: Tensor, old_logprobs: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """clip(r, 1 - clip_low, 1 + clip_high), without a gradient; a clip_low of 1 or more is no lower bound."""
    return torch.exp(log_ratio(logprobs, old_logprobs)).clamp(1.0 - clip_low, 1.0 + clip_high).detach()


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, MiniMax 2025).

    The clip bounds the weight of a token and removes no token's gradient. At r = 1 it is `reinforce_loss`.
    """
    weight = cispo_weight(logprobs, old_logprobs, clip_low=clip_low, clip_high=clip_high)
    return -weight * advantages * logprobs


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


def sequence_importance(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """(B, T) min(prod_t old_t / behavior_t, cap), the weight of a whole answer on each of its tokens.

    Unbiased for the answer where the cap does not bind; its variance grows with the length.
    """
    answers = [logprobs.masked_fill(~mask, 0.0).sum(dim=1) for logprobs in (old_logprobs, behavior_logprobs)]
    weights = torch.exp(log_ratio(*answers)).clamp(max=cap)
    return weights[:, None].expand(mask.shape)


def masked_importance(old_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float) -> Tensor:
    """w = old / behavior where 1 / cap <= w <= cap, else 0: a token that the two disagree on teaches nothing.

    Masked importance sampling, with both bounds (IcePop, Zhao et al. 2025).
    """
    weights = torch.exp(log_ratio(old_logprobs, behavior_logprobs))
    return weights.masked_fill((weights > cap) | (weights < 1.0 / cap), 0.0)


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
