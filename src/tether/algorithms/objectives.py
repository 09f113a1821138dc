"""Objectives: the losses that the learner minimizes, each as a sum and a size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

from tether.errors import ConfigError
from tether.mask_cache import loss_size
from tether.ops.kl import Estimator, kl_estimate, log_ratio, ratio_clamped
from tether.ops.losses import (
    Aggregation,
    ClipCases,
    cispo_loss,
    clip_cases,
    clip_loss,
    count_ranked_prompts,
    dpo_losses,
    dpo_margins,
    gspo_loss,
    kl_penalty_loss,
    kwise_total,
    ranked_pairs,
    reinforce_loss,
    sequence_log_ratio,
    unclipped_loss,
    value_loss,
)
from tether.ops.masks import masked_sum
from tether.types import Experience, Loss, Metrics, PairBatch, RankedBatch, ScoreOutputs, Sequences, TokenOutputs


class Surrogate(Protocol):
    """A per-token policy loss."""

    def __call__(self, logprobs: Tensor, batch: Experience) -> Tensor:
        """(B, T) loss to minimize."""
        ...

    def measure(self, logprobs: Tensor, batch: Experience, metrics: Metrics) -> None:
        """Add the metrics that only this surrogate has."""
        ...


@dataclass(frozen=True)
class Reinforce:
    """-A log pi."""

    def __call__(self, logprobs: Tensor, batch: Experience) -> Tensor:
        """(B, T)."""
        return reinforce_loss(logprobs, batch.advantages)

    def measure(self, logprobs: Tensor, batch: Experience, metrics: Metrics) -> None:
        """It has no metrics of its own."""


@dataclass(frozen=True)
class Unclipped:
    """-r A."""

    def __call__(self, logprobs: Tensor, batch: Experience) -> Tensor:
        """(B, T)."""
        return unclipped_loss(logprobs, batch.old_logprobs, batch.advantages)

    def measure(self, logprobs: Tensor, batch: Experience, metrics: Metrics) -> None:
        """It has no metrics of its own."""


@dataclass(frozen=True)
class Clip:
    """-min(r A, clip(r) A); counts the four cases of sign and side."""

    low: float
    high: float
    dual: float | None = None

    def __call__(self, logprobs: Tensor, batch: Experience) -> Tensor:
        """(B, T)."""
        return clip_loss(
            logprobs, batch.old_logprobs, batch.advantages, clip_low=self.low, clip_high=self.high, dual_clip=self.dual
        )

    def measure(self, logprobs: Tensor, batch: Experience, metrics: Metrics) -> None:
        """The fraction of tokens in each case, and of tokens whose gradient the clip removed."""
        add_clip_cases(self.cases(logprobs, batch), batch, metrics)

    def cases(self, logprobs: Tensor, batch: Experience) -> ClipCases:
        """Which case each token is in."""
        return clip_cases(
            logprobs, batch.old_logprobs, batch.advantages, clip_low=self.low, clip_high=self.high, dual_clip=self.dual
        )


def add_clip_cases(cases: ClipCases, batch: Experience, metrics: Metrics) -> None:
    """Add the fraction of tokens in each case, and of tokens whose gradient the clip removed."""
    tokens = batch.response_mask.sum()
    for name in ("positive_high", "positive_low", "negative_high", "negative_low"):
        metrics.add(f"clip/{name}", (getattr(cases, name) & batch.response_mask).sum(), tokens)
    metrics.add("clip_fraction", (cases.clipped & batch.response_mask).sum(), tokens)


@dataclass(frozen=True)
class GSPO:
    """-min(s A, clip(s) A) with one ratio s for each answer; counts the four cases of sign and side, in tokens."""

    low: float
    high: float

    def __call__(self, logprobs: Tensor, batch: Experience) -> Tensor:
        """(B, T)."""
        return gspo_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.response_mask,
            clip_low=self.low,
            clip_high=self.high,
        )

    def cases(self, logprobs: Tensor, batch: Experience) -> ClipCases:
        """Which case each token is in; the tokens of an answer share its ratio."""
        log_s = sequence_log_ratio(logprobs, batch.old_logprobs, batch.response_mask)
        return clip_cases(log_s, torch.zeros_like(log_s), batch.advantages, clip_low=self.low, clip_high=self.high)

    def measure(self, logprobs: Tensor, batch: Experience, metrics: Metrics) -> None:
        """The fraction of tokens in each case, and of tokens whose gradient the clip removed."""
        add_clip_cases(self.cases(logprobs, batch), batch, metrics)


@dataclass(frozen=True)
class CISPO:
    """-sg(clip(r)) A log pi; counts the tokens whose weight was clipped."""

    low: float
    high: float

    def __call__(self, logprobs: Tensor, batch: Experience) -> Tensor:
        """(B, T)."""
        return cispo_loss(logprobs, batch.old_logprobs, batch.advantages, clip_low=self.low, clip_high=self.high)

    def measure(self, logprobs: Tensor, batch: Experience, metrics: Metrics) -> None:
        """The fraction of tokens whose weight the clip changed; they keep their gradient."""
        mask, ratio = batch.response_mask, log_ratio(logprobs, batch.old_logprobs).exp()
        outside = (ratio < 1.0 - self.low) | (ratio > 1.0 + self.high)
        metrics.add("weight_clip_fraction", (outside & mask).sum(), mask.sum())


@dataclass(frozen=True)
class KLPenalty:
    """-r A + beta k(old || new)."""

    beta: float
    estimator: Estimator

    def __call__(self, logprobs: Tensor, batch: Experience) -> Tensor:
        """(B, T)."""
        return kl_penalty_loss(logprobs, batch.old_logprobs, batch.advantages, beta=self.beta, estimator=self.estimator)

    def measure(self, logprobs: Tensor, batch: Experience, metrics: Metrics) -> None:
        """It has no metrics of its own."""


@dataclass(frozen=True)
class PolicyObjective:
    """surrogate + value_coef * value loss - entropy_coef * entropy + kl_coef * KL(new || ref), aggregated.

    Every term is per token and uses the same aggregation, so the whole loss is one sum with one size.
    """

    surrogate: Surrogate
    aggregation: Aggregation = field(default_factory=Aggregation)
    value_coef: float = 0.0
    value_clip: float | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: Estimator = "k3"

    def __post_init__(self) -> None:
        surrogate, aggregation = cast("tuple[object, object]", (self.surrogate, self.aggregation))
        if isinstance(surrogate, type):
            name = surrogate.__name__
            raise ConfigError(f"PolicyObjective: surrogate is the class {name}: pass an object of it, {name}(...)")
        if not callable(surrogate) or not callable(getattr(surrogate, "measure", None)):
            raise ConfigError(
                f"PolicyObjective: surrogate {type(surrogate).__name__} needs __call__(logprobs, batch) and "
                "measure(logprobs, batch, metrics): see docs/extending.md"
            )
        if not isinstance(aggregation, Aggregation):
            raise ConfigError(f'PolicyObjective: aggregation is {aggregation!r}: pass Aggregation("token")')

    def size(self, batch: Experience) -> float:
        """The divisor: tokens, sequences, or sequences times a fixed length."""
        return loss_size(self.aggregation, batch.response_mask)

    def __call__(self, outputs: TokenOutputs, batch: Experience) -> Loss:
        """The sum over a micro-batch."""
        mask = batch.response_mask
        loss = policy = self.surrogate(outputs.logprobs, batch)
        if policy.shape != mask.shape:
            raise ConfigError(
                f"surrogate {type(self.surrogate).__name__} returned a loss of shape {tuple(policy.shape)}: it must "
                f"return one for each token, {tuple(mask.shape)}"
            )
        if self.entropy_coef != 0.0:
            loss = loss - self.entropy_coef * outputs.entropy
        if self.kl_coef != 0.0:
            if batch.ref_logprobs is None:
                raise ConfigError(
                    "PolicyObjective: kl_coef is not 0, and the algorithm has no reference policy: set kl_apply_to of "
                    'its AdvantageSettings to "loss"'
                )
            loss = loss + self.kl_coef * kl_estimate(outputs.logprobs, batch.ref_logprobs, self.kl_estimator)
        metrics = self._measure(outputs, batch, policy)
        if outputs.values is not None and batch.returns is not None and batch.values is not None:
            critic = value_loss(outputs.values, batch.values, batch.returns, clip=self.value_clip)
            loss = loss + self.value_coef * critic
            metrics.add("value_loss", self.aggregation.total(critic.detach(), mask), loss_size(self.aggregation, mask))
        return Loss(self.aggregation.total(loss, mask), metrics)

    @torch.no_grad()
    def _measure(self, outputs: TokenOutputs, batch: Experience, policy: Tensor) -> Metrics:
        mask, metrics = batch.response_mask, Metrics()
        tokens = mask.sum()
        approx_kl = kl_estimate(batch.old_logprobs, outputs.logprobs, "k3")
        metrics.add("policy_loss", self.aggregation.total(policy, mask), loss_size(self.aggregation, mask))
        metrics.add("entropy", masked_sum(outputs.entropy, mask), tokens)
        metrics.add("approx_kl", masked_sum(approx_kl, mask), tokens)
        metrics.add("ratio_clamped", (self._clamped(outputs, batch) & mask).sum(), tokens)
        self.surrogate.measure(outputs.logprobs, batch, metrics)
        return metrics

    def _clamped(self, outputs: TokenOutputs, batch: Experience) -> Tensor:
        """(B, T) tokens whose ratio in the loss was clamped: new / old, or ref / new in the estimator k3."""
        clamped = ratio_clamped(outputs.logprobs, batch.old_logprobs)
        if self.kl_coef != 0.0 and self.kl_estimator == "k3" and batch.ref_logprobs is not None:
            clamped = clamped | ratio_clamped(batch.ref_logprobs, outputs.logprobs)
        return clamped


@dataclass(frozen=True)
class ValueObjective:
    """The critic alone: value_coef * value loss, over tokens."""

    coef: float = 1.0
    clip: float | None = None

    def size(self, batch: Experience) -> float:
        """Tokens."""
        return float(batch.response_mask.sum())

    def __call__(self, outputs: TokenOutputs, batch: Experience) -> Loss:
        """The sum over a micro-batch."""
        if outputs.values is None or batch.values is None or batch.returns is None:
            raise ConfigError(
                "ValueObjective trains a critic, and the algorithm has none, or its estimator returns no returns: set "
                "needs_critic=True and return (advantages, returns)"
            )
        losses = value_loss(outputs.values, batch.values, batch.returns, clip=self.clip)
        total, metrics = masked_sum(losses, batch.response_mask), Metrics()
        metrics.add("value_loss", total, batch.response_mask.sum())
        return Loss(self.coef * total, metrics)


@dataclass(frozen=True)
class SFTObjective:
    """-log pi over the answer's tokens, times a weight."""

    coef: float = 1.0

    def size(self, batch: Sequences) -> float:
        """Tokens."""
        return float(batch.response_mask.sum())

    def __call__(self, outputs: TokenOutputs, batch: Sequences) -> Loss:
        """The sum over a micro-batch."""
        return Loss(-self.coef * masked_sum(outputs.logprobs, batch.response_mask), Metrics())


@dataclass(frozen=True)
class DPOObjective:
    """The logistic loss of the margin between the two answers of a pair."""

    beta: float
    label_smoothing: float = 0.0

    def size(self, batch: PairBatch) -> float:
        """Pairs."""
        return float(batch.chosen.sum())

    def __call__(self, outputs: TokenOutputs, batch: PairBatch) -> Loss:
        """The sum over a micro-batch; the two rows of a pair come in the order of `pair_ids`."""
        order = torch.argsort(batch.pair_ids, stable=True)
        chosen, rejected = order[batch.chosen[order]], order[~batch.chosen[order]]
        policy = outputs.logprobs.masked_fill(~batch.response_mask, 0.0).sum(dim=1)
        reference = batch.ref_logprobs.masked_fill(~batch.response_mask, 0.0).sum(dim=1)
        margins = dpo_margins(policy[chosen], policy[rejected], reference[chosen], reference[rejected], beta=self.beta)
        metrics = Metrics()
        metrics.add("margin", margins.sum(), len(margins))
        metrics.add("accuracy", (margins > 0).sum(), len(margins))
        return Loss(dpo_losses(margins, label_smoothing=self.label_smoothing).sum(), metrics)


@dataclass(frozen=True)
class RewardModelObjective:
    """The K-wise ranking loss: all pairs of a prompt form one example."""

    def size(self, batch: RankedBatch) -> float:
        """The number of prompts with at least one pair."""
        return count_ranked_prompts(batch.ranks, batch.group_ids)

    def __call__(self, outputs: ScoreOutputs, batch: RankedBatch) -> Loss:
        """The sum over the prompts of a micro-batch."""
        better, worse, _ = ranked_pairs(batch.ranks, batch.group_ids)
        margins, metrics = (outputs.scores[better] - outputs.scores[worse]).detach(), Metrics()
        metrics.add("margin", margins.sum(), len(margins))
        metrics.add("accuracy", (margins > 0).sum(), len(margins))
        return Loss(kwise_total(outputs.scores, batch.ranks, batch.group_ids), metrics)
