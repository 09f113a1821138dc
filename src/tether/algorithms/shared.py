"""What several algorithms share: reading the recipe's choices of mean, KL and credit."""

from __future__ import annotations

from tether.algorithms.algorithm import AdvantageSettings, Coefficients
from tether.config.sections import AggregationSettings, KLSettings, PenaltySettings, RewardSettings
from tether.ops.aggregation import Aggregation
from tether.ops.kl import AdaptiveKL, FixedKL, KLController, ProportionalKL


def aggregation(settings: AggregationSettings) -> Aggregation:
    """The recipe's choice of mean."""
    return Aggregation(settings.over, settings.fixed_length)


def kl_in_loss(kl: KLSettings, coefficients: Coefficients) -> float:
    """The weight of the KL to the reference in the loss: 0 where it acts elsewhere."""
    return coefficients.reference if kl.apply_to == "loss" else 0.0


def advantage_settings(
    kl: KLSettings, reward: RewardSettings, *, whiten_advantages: bool = False, bootstrap_truncated: bool = False
) -> AdvantageSettings:
    """How this recipe turns scores into credit."""
    return AdvantageSettings(
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
