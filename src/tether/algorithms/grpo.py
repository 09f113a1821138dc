"""GRPO (Shao et al. 2024), and by settings Dr. GRPO, DAPO, GSPO and CISPO."""

from __future__ import annotations

from tether.algorithms.algorithm import (
    Algorithm,
    Controllers,
    MinibatchEpochs,
    advantage_settings,
    aggregation,
    kl_in_loss,
    reference_controller,
)
from tether.algorithms.estimators import GroupRelative
from tether.algorithms.objectives import CISPO, GSPO, Clip, PolicyObjective, Surrogate
from tether.config.kl_settings import KLSettings
from tether.config.methods import GRPOSettings
from tether.config.sections import RewardSettings
from tether.ops.kl import FixedKL


def surrogate(settings: GRPOSettings) -> Surrogate:
    """The clipped ratio of each token, that of the whole answer (GSPO), or a clipped weight (CISPO)."""
    low, high = settings.clip_range, settings.clip_range_high or settings.clip_range
    if settings.objective == "gspo":
        return GSPO(low, high)
    if settings.objective == "cispo":
        return CISPO(low, high)
    return Clip(low, high, settings.dual_clip)


def grpo(settings: GRPOSettings, kl: KLSettings, reward: RewardSettings) -> Algorithm:
    """GRPO: each sample relative to its group's mean and standard deviation."""
    chosen = surrogate(settings)
    return Algorithm(
        name="grpo",
        estimator=GroupRelative(settings.scale_by_std, settings.std_epsilon),
        objective=lambda coefficients: PolicyObjective(
            surrogate=chosen,
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
