"""`Algorithm`: an advantage estimator, an objective, an update rule and where the KL is applied.

The module also has the update rule `MinibatchEpochs`, which turns a batch of experience into optimizer steps. Helpers
at the end read a recipe's choice of loss aggregation, KL and advantages. The estimators are in `estimators.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast
from weakref import ref

import torch
from torch import Tensor

from tether.config.kl_settings import KLSettings
from tether.config.sections import AggregationSettings, PenaltySettings, RewardSettings
from tether.errors import ConfigError
from tether.learner.batching import minibatches
from tether.learner.learner import Learner
from tether.ops.advantages import (
    MovingAverage,
    clip_scores,
    less_baseline,
    mean_return,
    missing_eos_penalty,
    overlong_penalty,
    token_rewards,
)
from tether.ops.kl import AdaptiveKL, Estimator, FixedKL, KLController, ProportionalKL, kl_estimate
from tether.ops.losses import Aggregation, masked_importance, sequence_importance, truncated_importance
from tether.ops.masks import masked_mean, masked_variance, whiten
from tether.protocols import AdvantageEstimator, Objective
from tether.types import EvaluatedBatch, Experience, Metrics, TokenOutputs, extend

TokenObjective = Objective[Experience, TokenOutputs]

ImportanceSampling = Literal["token", "sequence", "masked"]

ExtraGradient = Callable[[Learner], Metrics]
"""Adds another gradient (of pretraining data, in PPO-ptx) to the accumulated one."""


@dataclass(frozen=True)
class Coefficients:
    """The numbers that controllers change from step to step: the KL weights, and a moving average."""

    reference: float  # weight of the KL to the reference
    old: float  # weight of the KL(old || new) penalty
    baseline: float = 0.0  # average return of earlier steps, where it is the baseline


class _Watched(Coefficients):
    """Coefficients that record which of them are read."""

    @property
    def reads(self) -> set[str]:
        """The names that were read."""
        return self.__dict__.setdefault("_reads", set[str]())

    def __getattribute__(self, name: str) -> Any:
        if name in ("reference", "old", "baseline"):
            self.reads.add(name)
        return super().__getattribute__(name)


@dataclass(frozen=True)
class Controllers:
    """The state of both KL controllers, and of a baseline that is averaged over steps."""

    reference: KLController
    old: KLController
    baseline: MovingAverage | None = None

    def coefficients(self) -> Coefficients:
        """The current numbers."""
        return Coefficients(self.reference.coef, self.old.coef, 0.0 if self.baseline is None else self.baseline.value)

    def after(
        self,
        *,
        kl_reference: float | None,
        approx_kl: float | None,
        samples: int,
        mean_return: float | None = None,
    ) -> Controllers:
        """The controllers after a step; a number of None leaves its controller unchanged."""
        return Controllers(
            self.reference if kl_reference is None else self.reference.after(kl_reference, samples),
            self.old if approx_kl is None else self.old.after(approx_kl, samples),
            self.baseline if self.baseline is None or mean_return is None else self.baseline.after(mean_return),
        )


@dataclass(frozen=True)
class Passes:
    """How often one update runs over its rollouts; `tether plan` counts memory and time with it."""

    epochs: int = 1  # of the policy, in minibatches
    critic_epochs: int = 0  # further ones, of the critic alone
    whole_batch: bool = False  # the policy takes one step over all rollouts, in place of minibatches


class UpdateRule(Protocol):
    """How a batch of experience becomes optimiser steps. A rule may state its `passes`; without it has one epoch."""

    def __call__(
        self,
        learner: Learner,
        experience: Experience,
        objective: TokenObjective,
        generator: torch.Generator,
        extra: ExtraGradient | None = None,
    ) -> Metrics:
        """Update the learner and return metrics. `extra` adds its gradient to every step."""
        ...


@dataclass(frozen=True)
class Overlong:
    """A penalty on the score of an answer that comes close to the length limit."""

    max_length: int  # the limit, in sampled tokens
    buffer: int  # tokens before the limit over which the penalty grows
    penalty: float  # at the limit


@dataclass(frozen=True)
class AdvantageSettings:
    """How scores and KL become rewards, and how rewards and advantages are normalized."""

    kl_apply_to: Literal["reward", "loss", "none"] = "reward"
    kl_estimator: Estimator = "k1"
    missing_eos_penalty: float | None = None
    score_clip: float | None = None
    overlong: Overlong | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool = False
    bootstrap_truncated: bool = False
    baseline: Literal["none", "batch_mean", "moving_average"] = "none"  # subtracted from the estimator's weights
    importance_sampling_cap: float | None = (
        None  # maximum of the weight old / behavior on each token's policy loss; None: no weights
    )
    importance_sampling: ImportanceSampling = "token"


@dataclass(frozen=True)
class CriticWarmup:
    """The first iterations, which train only the critic: the policy and the KL controllers do not change."""

    steps: int
    objective: TokenObjective
    update: UpdateRule


@dataclass(frozen=True)
class Algorithm:
    """Everything the training loop needs to know about an algorithm."""

    name: str
    estimator: AdvantageEstimator
    objective: Callable[[Coefficients], TokenObjective]
    update: UpdateRule
    minibatch_size: int
    advantage_settings: AdvantageSettings
    controllers: Controllers = Controllers(FixedKL(0.0), FixedKL(0.0))
    critic_warmup: CriticWarmup | None = None
    needs_critic: bool = False
    needs_groups: bool = False

    def warmup_at(self, step: int) -> CriticWarmup | None:
        """The critic warm-up if iteration `step` is part of it, else None."""
        return self.critic_warmup if self.critic_warmup is not None and step < self.critic_warmup.steps else None

    def objective_at(self, step: int, coefficients: Coefficients) -> TokenObjective:
        """The objective that iteration `step` minimizes: during warm-up, the critic's loss alone."""
        warmup = self.warmup_at(step)
        if warmup is not None:
            return warmup.objective
        made = self.objective(coefficients)
        given: Any = made  # by the user's own function
        if not callable(given) or not callable(getattr(given, "size", None)):
            raise ConfigError(
                f"algorithm {self.name}: objective returned a {type(made).__name__}: it must return an object with "
                "size(batch) and __call__(outputs, batch), such as PolicyObjective(...)"
            )
        return made

    def update_at(self, step: int) -> UpdateRule:
        """The update rule of iteration `step`."""
        warmup = self.warmup_at(step)
        return self.update if warmup is None else warmup.update

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to the reference is used."""
        return self.advantage_settings.kl_apply_to != "none"

    @property
    def ignores_reference_kl(self) -> bool:
        """Whether the KL belongs in the loss, and the objective neither reads nor keeps its coefficient."""
        if self.advantage_settings.kl_apply_to != "loss":
            return False
        coefficients = _Watched(1.0, 1.0)
        kept = ref(coefficients)
        made = self.objective(coefficients)
        was_read = "reference" in coefficients.reads
        del coefficients
        is_kept = kept() is not None  # by what was made, which is still alive
        del made
        return not (was_read or is_kept)

    @property
    def passes(self) -> Passes:
        """How often an update runs over its rollouts, as the update rule states it; one epoch where it does not."""
        stated = getattr(self.update, "passes", None)
        return stated if isinstance(stated, Passes) else Passes()

    def check(self) -> None:
        """Raise where a field is no part that the loop can use, such as a class in place of an object of it."""
        parts: dict[str, object] = {"estimator": self.estimator, "objective": self.objective, "update": self.update}
        for field, part in parts.items():
            wrong = f"algorithm {self.name}: {field} is"
            if isinstance(part, type) and field != "objective":
                raise ConfigError(f"{wrong} the class {part.__name__}: pass an object of it, {part.__name__}(...)")
            if field == "objective" and hasattr(part, "size"):
                raise ConfigError(
                    f"{wrong} a {type(part).__name__}: pass a function that returns it, such as "
                    "lambda coefficients: PolicyObjective(...)"
                )
            if not callable(part):
                raise ConfigError(f"{wrong} a {type(part).__name__}: pass a function, or an object that can be called")
        if self.warmup_at(0) is not None and not self.needs_critic:
            raise ConfigError(
                f"algorithm {self.name}: critic_warmup is set, and needs_critic is False: set critic_warmup=None"
            )
        size, rules = cast("tuple[Any, Any]", (self.minibatch_size, self.advantage_settings))
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"algorithm {self.name}: minibatch_size is {size!r}: it must be at least 1")
        if not isinstance(rules, AdvantageSettings):
            raise ConfigError(
                f"algorithm {self.name}: advantage_settings is a {type(rules).__name__}: pass AdvantageSettings(...)"
            )

    def _checked(self, estimated: object, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """The estimator's result, checked: a wrong shape would broadcast and train on wrong advantages."""
        name = f"algorithm {self.name}: {type(self.estimator).__name__}"
        kind = type(estimated).__name__
        given: tuple[Any, ...] = cast("tuple[Any, ...]", estimated) if isinstance(estimated, tuple) else ()
        if len(given) != 2:
            raise ConfigError(f"{name} returned a {kind}: it must return (advantages, returns)")
        advantages, returns = given
        for what, column in (("advantages", advantages), ("returns", returns)):
            shape = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
            if shape != tuple(mask.shape) and not (what == "returns" and column is None):
                raise ConfigError(
                    f"{name} returned {what} of shape {shape}: it must return one for each token, {tuple(mask.shape)}"
                )
        if self.needs_critic and returns is None:
            raise ConfigError(f"{name} returned no returns, and needs_critic is True: the critic has no target")
        return advantages, returns

    def advantages(self, batch: EvaluatedBatch, kl_coef: float, baseline: float = 0.0) -> tuple[Experience, Metrics]:
        """Rewards, advantages and returns of a batch. Baselines use the whole batch, never a minibatch.

        `baseline` is the average return of earlier steps, for the setting `moving_average`.
        """
        rules, mask = self.advantage_settings, batch.response_mask
        scores = clip_scores(batch.scores, rules.score_clip)
        scores = missing_eos_penalty(scores, batch.truncated, rules.missing_eos_penalty)
        if rules.overlong is not None:
            limits = {"max_length": rules.overlong.max_length, "buffer": rules.overlong.buffer}
            overlong = overlong_penalty(mask.sum(dim=1), **limits).to(scores.dtype)
            scores = scores + rules.overlong.penalty * overlong
        kl = None
        if rules.kl_apply_to == "reward":
            assert batch.ref_logprobs is not None
            kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, rules.kl_estimator)
        rewards = token_rewards(scores, kl, mask, kl_coef=kl_coef)
        return self.estimate(batch, rewards, answer_metrics(batch, scores), baseline)

    def estimate(
        self, batch: EvaluatedBatch, rewards: Tensor, metrics: Metrics, baseline: float = 0.0
    ) -> tuple[Experience, Metrics]:
        """Advantages and returns of a batch whose rewards (B, T) are known; adds to `metrics`, and returns them."""
        rules, mask = self.advantage_settings, batch.response_mask
        if rules.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        final_values = None
        if rules.bootstrap_truncated and batch.final_values is not None:
            final_values = torch.where(batch.truncated, batch.final_values, 0.0)
        estimated = self.estimator(
            rewards, mask, values=batch.values, final_values=final_values, group_ids=batch.group_ids
        )
        advantages, returns = self._checked(estimated, mask)
        mean = None if rules.baseline == "none" else float(mean_return(advantages, mask))
        if mean is not None:
            baseline = mean if rules.baseline == "batch_mean" else baseline
            advantages = less_baseline(advantages, mask, baseline)
            metrics.add("mean_return", mean)
            metrics.add("baseline", baseline)
        metrics.merge(advantage_metrics(batch, advantages, returns))
        if rules.whiten_advantages:
            advantages = whiten(advantages, mask)
        if rules.importance_sampling_cap is not None:
            advantages = importance_weights(
                advantages, batch, rules.importance_sampling_cap, metrics, rules.importance_sampling
            )
        columns: dict[str, Any] = {"rewards": rewards, "advantages": advantages, "returns": returns}
        return extend(batch, Experience, **columns), metrics


def importance_weights(
    advantages: Tensor, batch: EvaluatedBatch, cap: float, metrics: Metrics, kind: ImportanceSampling = "token"
) -> Tensor:
    """(B, T) advantages times a weight w from old / behavior; reports its mean and the fraction that the cap changed.

    `token` is min(old / behavior, cap), `sequence` the same of whole answers, and `masked` is 0 where the weight of a
    token is above the cap or below its inverse. Every surrogate's term in A satisfies w * f(A) = f(w A) for w >= 0, so
    weighting the advantage weights the token's policy loss, also in the line search of a trust region. The critic's
    targets are not weighted.
    """
    mask, tokens = batch.response_mask, batch.response_mask.sum()
    old, behavior = batch.old_logprobs, batch.behavior_logprobs
    gap = (old - behavior).masked_fill(~mask, 0.0)
    if kind == "sequence":
        weights = sequence_importance(old, behavior, mask, cap=cap)
        changed = (gap.sum(dim=1, keepdim=True) > math.log(cap)) & mask
    elif kind == "masked":
        weights = masked_importance(old, behavior, cap=cap)
        changed = (weights == 0.0) & mask
    else:
        weights = truncated_importance(old, behavior, cap=cap)
        changed = (gap > math.log(cap)) & mask
    metrics.add("importance/mean", weights.masked_fill(~mask, 0.0).sum(), tokens)
    metrics.add("importance/masked" if kind == "masked" else "importance/truncated", changed.sum(), tokens)
    return advantages * weights.masked_fill(~mask, 1.0)


def answer_metrics(batch: EvaluatedBatch, scores: Tensor) -> Metrics:
    """Metrics of whole answers, with the scores that rewards were made from."""
    metrics, rows = Metrics(), len(batch)
    metrics.add("score", batch.scores.sum(), rows)
    metrics.add("score_used", scores.sum(), rows)  # after clipping and the missing-EOS penalty
    metrics.add("score_std", scores.std(correction=0))
    metrics.add("response_length", batch.response_mask.sum(), rows)
    metrics.add("truncated", batch.truncated.sum(), rows)
    return metrics


def advantage_metrics(batch: EvaluatedBatch, advantages: Tensor, returns: Tensor | None) -> Metrics:
    """Metrics of a batch's tokens before the update."""
    mask, metrics = batch.response_mask, Metrics()
    tokens, rows = mask.sum(), len(batch)
    metrics.add("advantage_std", masked_variance(advantages, mask).sqrt())
    gap = (batch.old_logprobs - batch.untruncated_logprobs).abs().masked_fill(~mask, 0.0)
    metrics.add("logprob_diff", gap.sum(), tokens)
    metrics.add("logprob_diff_max", gap.max())
    kl = kl_estimate(batch.untruncated_logprobs, batch.old_logprobs, "k3").masked_fill(~mask, 0.0)
    metrics.add("sampler_kl", kl.sum(), tokens)  # KL(sampler || trainer) per token
    cut = (batch.behavior_logprobs - batch.untruncated_logprobs).masked_fill(~mask, 0.0)
    metrics.add("truncation_gap", cut.sum(), tokens)  # above 0 where top-p or top-k changed the distribution
    if batch.ref_logprobs is not None:
        for estimator in ("k1", "k3"):
            kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, estimator).masked_fill(~mask, 0.0)
            metrics.add(f"kl_ref_{estimator}", kl.sum(), rows)
    if returns is not None and batch.values is not None:
        unexplained, variance = masked_variance(returns - batch.values, mask), masked_variance(returns, mask)
        if float(variance) > 1e-8:  # undefined where all returns are equal
            metrics.add("explained_variance", 1.0 - unexplained / variance)
        metrics.add("value", masked_mean(batch.values, mask))
    return metrics


@dataclass(frozen=True)
class MinibatchEpochs:
    """K epochs of minibatches (PPO paper, algorithm 1).

    The forward pass of each step also measures KL(old || new), with the estimator k3, which is never negative. Above
    `max_kl` the step is not taken and the update ends. `measure_after` adds one pass without gradients at the end, for
    a controller that adapts to the KL after the update.

    A batch that contains a value that is not finite is skipped as a whole and counts as one skipped step. A minibatch
    whose forward pass is not finite is skipped, and its metrics are excluded from the means.
    """

    epochs: int
    minibatch_size: int
    max_kl: float | None = None
    measure_after: bool = False

    @property
    def passes(self) -> Passes:
        """Its epochs."""
        return Passes(self.epochs)

    def __call__(
        self,
        learner: Learner,
        experience: Experience,
        objective: TokenObjective,
        generator: torch.Generator,
        extra: ExtraGradient | None = None,
    ) -> Metrics:
        """Take the steps; the first epoch is in the batch's own order, later ones are shuffled."""
        refused = learner.skip_if_nonfinite(experience)
        if refused is not None:
            return refused
        metrics = Metrics()
        stopped = False
        steps = map(experience.select, self._steps(experience, generator))
        batch = next(steps, None)
        while batch is not None:
            seen = learner.backward(batch, objective)
            batch = next(steps, None)
            if batch is not None:
                learner.begin(batch)  # prepare it while the device computes the previous one
            if learner.finite:
                if not metrics.weighted and "approx_kl" in seen.weighted:
                    metrics.add("first_approx_kl", seen.mean("approx_kl"))  # against the policy that sampled: must be 0
                metrics.merge(seen)
                if self.max_kl is not None and "approx_kl" in seen.weighted and seen.mean("approx_kl") > self.max_kl:
                    learner.discard()
                    stopped = True
                    break
            if extra is not None:
                added = extra(learner)
                metrics.merge(added if learner.finite else Metrics())
            metrics.merge(learner.step())
        metrics.count("early_stop", float(stopped))
        if self.measure_after:
            metrics.add("approx_kl_after", *learner.measure(experience, objective).weighted["approx_kl"])
        return metrics

    def _steps(self, experience: Experience, generator: torch.Generator) -> Iterator[Tensor]:
        for epoch in range(self.epochs):
            yield from minibatches(experience, self.minibatch_size, None if epoch == 0 else generator)


def aggregation(settings: AggregationSettings) -> Aggregation:
    """The loss aggregation that the recipe selects."""
    return Aggregation(settings.over, settings.fixed_length)


def kl_in_loss(kl: KLSettings, coefficients: Coefficients) -> float:
    """The weight of the KL to the reference in the loss; 0 where it is applied elsewhere."""
    return coefficients.reference if kl.apply_to == "loss" else 0.0


def advantage_settings(
    kl: KLSettings,
    reward: RewardSettings,
    *,
    whiten_advantages: bool = False,
    bootstrap_truncated: bool = False,
    baseline: Literal["none", "batch_mean", "moving_average"] = "none",
) -> AdvantageSettings:
    """How this recipe turns scores into advantages."""
    return AdvantageSettings(
        baseline=baseline,
        kl_apply_to=kl.apply_to,
        kl_estimator=kl.estimator,
        missing_eos_penalty=reward.missing_eos_penalty,
        score_clip=reward.clip,
        whiten_rewards=reward.whiten,
        whiten_advantages=whiten_advantages,
        bootstrap_truncated=bootstrap_truncated,
    )


def reference_controller(kl: KLSettings) -> KLController:
    """The controller of the KL to the reference."""
    if kl.controller == "adaptive":
        return AdaptiveKL(kl.coef, kl.target)
    if kl.controller == "proportional":
        return ProportionalKL(kl.coef, kl.target, kl.horizon)
    return FixedKL(kl.coef)


def penalty_controller(penalty: PenaltySettings) -> KLController:
    """The controller of the penalty on KL(old || new)."""
    return AdaptiveKL(penalty.coef, penalty.target) if penalty.adaptive else FixedKL(penalty.coef)
