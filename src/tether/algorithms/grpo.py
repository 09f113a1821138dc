"""GRPO (Shao et al. 2024) and its common variants of normalization."""

from __future__ import annotations

from tether.algorithms.algorithm import (
    Algorithm,
    Controllers,
    GroupRelative,
    MinibatchEpochs,
    advantage_settings,
    aggregation,
    kl_in_loss,
    reference_controller,
)
from tether.algorithms.objectives import Clip, PolicyObjective
from tether.config.recipes import GRPOSettings
from tether.config.sections import KLSettings, RewardSettings
from tether.ops.kl import FixedKL


def grpo(settings: GRPOSettings, kl: KLSettings, reward: RewardSettings) -> Algorithm:
    """GRPO: each sample relative to its group's mean and standard deviation."""
    clip = Clip(settings.clip_range, settings.clip_range_high or settings.clip_range, settings.dual_clip)
    return Algorithm(
        name="grpo",
        estimator=GroupRelative(settings.scale_by_std, settings.std_epsilon),
        objective=lambda coefficients: PolicyObjective(
            surrogate=clip,
            aggregation=aggregation(settings.aggregation),
            entropy_coef=settings.entropy_coef,
            kl_coef=kl_in_loss(kl, coefficients),
            kl_estimator=kl.estimator,
        ),
        update=MinibatchEpochs(settings.epochs, settings.minibatch_size, settings.target_kl),
        minibatch_size=settings.minibatch_size,
        advantage_settings=advantage_settings(kl, reward),
        controllers=Controllers(reference_controller(kl), FixedKL(0.0)),
        needs_groups=True,
    )
