"""PPO (Schulman et al. 2017): clipped, unclipped, or with a KL penalty against the old policy."""

from __future__ import annotations

from tether.algorithms.algorithm import (
    Algorithm,
    Coefficients,
    Controllers,
    CriticWarmup,
    MinibatchEpochs,
    advantage_settings,
    aggregation,
    kl_in_loss,
    penalty_controller,
    reference_controller,
)
from tether.algorithms.estimators import GAE, NStep
from tether.algorithms.objectives import Clip, KLPenalty, PolicyObjective, Surrogate, Unclipped, ValueObjective
from tether.config.kl_settings import KLSettings
from tether.config.methods import PPOSettings
from tether.config.sections import RewardSettings
from tether.ops.kl import FixedKL
from tether.protocols import AdvantageEstimator


def estimator(settings: PPOSettings) -> AdvantageEstimator:
    """GAE, or the n-step advantage."""
    if settings.n_steps is not None:
        return NStep(settings.gamma, settings.n_steps)
    return GAE(settings.gamma, settings.lam, settings.critic_lam, settings.lam_alpha)


def ppo(settings: PPOSettings, kl: KLSettings, reward: RewardSettings) -> Algorithm:
    """PPO: GAE, a surrogate that stays close to the old policy, a clipped value loss, epochs of minibatches."""
    penalised = settings.objective == "kl_penalty"

    def surrogate(coefficients: Coefficients) -> Surrogate:
        if settings.objective == "clip":
            return Clip(settings.clip_range, settings.clip_range_high or settings.clip_range, settings.dual_clip)
        if penalised:
            return KLPenalty(coefficients.old, settings.penalty.estimator)
        return Unclipped()

    return Algorithm(
        name="ppo",
        estimator=estimator(settings),
        objective=lambda coefficients: PolicyObjective(
            surrogate=surrogate(coefficients),
            aggregation=aggregation(settings.aggregation),
            value_coef=settings.value_coef,
            value_clip=settings.value_clip,
            entropy_coef=settings.entropy_coef,
            kl_coef=kl_in_loss(kl, coefficients),
            kl_estimator=kl.estimator,
        ),
        update=MinibatchEpochs(
            settings.epochs,
            settings.minibatch_size,
            settings.target_kl,
            measure_after=penalised and settings.penalty.adaptive,
        ),
        minibatch_size=settings.minibatch_size,
        advantage_settings=advantage_settings(
            kl,
            reward,
            whiten_advantages=settings.whiten_advantages,
            bootstrap_truncated=settings.bootstrap_truncated,
        ),
        controllers=Controllers(
            reference_controller(kl), penalty_controller(settings.penalty) if penalised else FixedKL(0.0)
        ),
        critic_warmup=CriticWarmup(
            settings.critic_warmup,
            ValueObjective(settings.value_coef, settings.value_clip),
            MinibatchEpochs(settings.epochs, settings.minibatch_size),  # no KL(old || new): the policy does not change
        ),
        needs_critic=True,
    )
