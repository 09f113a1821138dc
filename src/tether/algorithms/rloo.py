"""RLOO (Kool et al. 2019; Ahmadian et al. 2024): each sample against the mean of its siblings."""

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
from tether.algorithms.estimators import LeaveOneOut
from tether.algorithms.objectives import Clip, PolicyObjective, Reinforce
from tether.config.kl_settings import KLSettings
from tether.config.methods import RLOOSettings
from tether.config.sections import RewardSettings
from tether.ops.kl import FixedKL


def rloo(settings: RLOOSettings, kl: KLSettings, reward: RewardSettings) -> Algorithm:
    """RLOO: each sample's reward minus the mean of its siblings'."""
    clip = Clip(settings.clip_range, settings.clip_range)
    return Algorithm(
        name="rloo",
        estimator=LeaveOneOut(),
        objective=lambda coefficients: PolicyObjective(
            surrogate=clip if settings.objective == "clip" else Reinforce(),
            aggregation=aggregation(settings.aggregation),
            entropy_coef=settings.entropy_coef,
            kl_coef=kl_in_loss(kl, coefficients),
            kl_estimator=kl.estimator,
        ),
        update=MinibatchEpochs(settings.epochs, settings.minibatch_size, settings.target_kl),
        minibatch_size=settings.minibatch_size,
        advantage_settings=advantage_settings(kl, reward, whiten_advantages=settings.whiten_advantages),
        controllers=Controllers(reference_controller(kl), FixedKL(0.0)),
        needs_groups=True,
    )
