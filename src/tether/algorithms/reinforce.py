"""REINFORCE (Williams 1992), with a choice of the weight on grad log pi and of its baseline."""

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
from tether.algorithms.estimators import PolicyGradientWeights
from tether.algorithms.objectives import PolicyObjective, Reinforce
from tether.config.kl_settings import KLSettings
from tether.config.methods import ReinforceSettings
from tether.config.sections import RewardSettings
from tether.ops.advantages import MovingAverage
from tether.ops.kl import FixedKL


def reinforce(settings: ReinforceSettings, kl: KLSettings, reward: RewardSettings) -> Algorithm:
    """REINFORCE: -A log pi with the chosen weight, one pass over each batch."""
    return Algorithm(
        name="reinforce",
        estimator=PolicyGradientWeights(settings.weighting, settings.gamma, settings.lam, settings.n_steps),
        objective=lambda coefficients: PolicyObjective(
            surrogate=Reinforce(),
            aggregation=aggregation(settings.aggregation),
            value_coef=settings.value_coef,
            entropy_coef=settings.entropy_coef,
            kl_coef=kl_in_loss(kl, coefficients),
            kl_estimator=kl.estimator,
        ),
        update=MinibatchEpochs(1, settings.minibatch_size),
        minibatch_size=settings.minibatch_size,
        advantage_settings=advantage_settings(
            kl, reward, whiten_advantages=settings.whiten_advantages, baseline=settings.baseline
        ),
        controllers=Controllers(
            reference_controller(kl),
            FixedKL(0.0),
            MovingAverage(settings.baseline_decay) if settings.baseline == "moving_average" else None,
        ),
        needs_critic=settings.needs_critic,
    )
