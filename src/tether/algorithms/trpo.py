"""TRPO: the longest natural-gradient step that improves the surrogate within a hard bound on KL(old || new)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tether.algorithms.algorithm import (
    Algorithm,
    Controllers,
    ExtraGradient,
    MinibatchEpochs,
    Passes,
    TokenObjective,
    advantage_settings,
    reference_controller,
)
from tether.algorithms.estimators import GAE
from tether.algorithms.objectives import PolicyObjective, Unclipped, ValueObjective
from tether.config.kl_settings import KLSettings
from tether.config.methods import TRPOSettings
from tether.config.sections import RewardSettings
from tether.errors import ConfigError
from tether.learner.batching import within_memory
from tether.learner.learner import Learner
from tether.ops.distributions import as_distribution
from tether.ops.kl import FixedKL, log_ratio
from tether.ops.trust_region import LineSearch, conjugate_gradient, fisher_vector_product, line_search, step_scale
from tether.protocols import Distribution, PolicyModel
from tether.types import Experience, Metrics


def trpo(settings: TRPOSettings, kl: KLSettings, reward: RewardSettings) -> Algorithm:
    """TRPO: GAE, the unclipped surrogate, a trust-region step; then the critic is trained separately."""
    return Algorithm(
        name="trpo",
        estimator=GAE(settings.gamma, settings.lam),
        objective=lambda _: PolicyObjective(surrogate=Unclipped()),
        update=TrustRegionStep(settings),
        minibatch_size=settings.minibatch_size,
        advantage_settings=advantage_settings(
            kl,
            reward,
            whiten_advantages=settings.whiten_advantages,
            bootstrap_truncated=settings.bootstrap_truncated,
        ),
        controllers=Controllers(reference_controller(kl), FixedKL(0.0)),
        needs_critic=True,
    )


@dataclass(frozen=True)
class TrustRegionStep:
    """One step of the policy, then epochs of the critic.

    The exact KL needs the old policy's full distribution at every sampled token, so (tokens, vocabulary) numbers stay
    in memory during the update.
    """

    settings: TRPOSettings

    @property
    def passes(self) -> Passes:
        """One step of the policy over the whole batch, then the critic's epochs."""
        return Passes(1, self.settings.critic_epochs, whole_batch=True)

    def __call__(
        self,
        learner: Learner,
        experience: Experience,
        objective: TokenObjective,
        generator: torch.Generator,
        extra: ExtraGradient | None = None,
    ) -> Metrics:
        """s solves (F + damping I) s = g; step back from s * sqrt(2 max_kl / s^T (F + damping I) s) until it holds."""
        if extra is not None:
            raise ConfigError("a trust region covers the surrogate alone: leave out ptx.data, or use MinibatchEpochs")
        refused = learner.skip_if_nonfinite(experience)
        if refused is not None:
            return refused
        metrics = learner.backward(experience, objective)
        gradient = -learner.flat_gradient("policy")
        sound = learner.finite and bool(torch.isfinite(gradient).all())
        search = self.move_within_memory(learner, experience, gradient) if sound else None
        if search is None:
            metrics = learner.skip("the natural-gradient step is not finite")
        else:
            learner.discard()
            metrics.count("steps", float(search.accepted))
            metrics.add("approx_kl_after", search.kl)
            metrics.add("surrogate_gain", search.surrogate - surrogate_at_old(experience))
            metrics.add("step_fraction", search.fraction)
        skipped = learner.skipped_in_a_row if search is None else 0
        critic = MinibatchEpochs(self.settings.critic_epochs, self.settings.minibatch_size)
        with learner.training_only("critic"):
            taught = critic(learner, experience, ValueObjective(), generator)
        # Successful critic steps must not reset the policy's count of skipped steps.
        learner.skipped_in_a_row = max(skipped, learner.skipped_in_a_row)
        for name in {"skipped_steps", "out_of_memory"} & taught.counts.keys():
            metrics.count(name, taught.counts[name])
        for name in {"value_loss", "grad_norm/critic", "micro_batch_tokens"} & taught.weighted.keys():
            metrics.add(name, *taught.weighted[name])
        return metrics

    def move_within_memory(self, learner: Learner, experience: Experience, gradient: Tensor) -> LineSearch | None:
        """`move`, repeated from the initial policy with smaller micro-batches whenever memory runs out."""
        start = learner.flat_parameters("policy")

        def make_room() -> None:
            learner.set_flat_parameters("policy", start)
            learner.shrink_micro_batch([experience])

        return within_memory(lambda: self.move(learner, experience, gradient), make_room)

    def move(self, learner: Learner, experience: Experience, gradient: Tensor) -> LineSearch | None:
        """Set the policy's parameters to the accepted step along the natural gradient, or leave them unchanged.

        Returns None where the step is not finite because a number overflowed.
        """
        settings, region = self.settings, TrustRegion(learner, experience)

        def curvature(vector: Tensor) -> Tensor:
            return region.curvature(vector, damping=settings.damping)

        direction = conjugate_gradient(curvature, gradient, iterations=settings.cg_iterations)
        full_step = direction * step_scale(direction, curvature(direction), max_kl=settings.max_kl)
        if not bool(torch.isfinite(full_step).all()):
            return None
        start = learner.flat_parameters("policy")

        def trial(fraction: float) -> tuple[float, float]:
            learner.set_flat_parameters("policy", start + fraction * full_step)
            return region.measure()

        search = line_search(
            trial,
            surrogate_before=surrogate_at_old(experience),
            max_kl=settings.max_kl,
            backtrack=settings.backtrack,
            max_backtracks=settings.max_backtracks,
        )
        if not search.accepted:
            learner.set_flat_parameters("policy", start)
        return search


def surrogate_at_old(experience: Experience) -> float:
    """mean r A at r = 1."""
    mask = experience.response_mask
    return float(experience.advantages[mask].double().sum() / mask.sum())


class TrustRegion:
    """The old policy's distributions, and the surrogate and exact KL of the current policy against them."""

    def __init__(self, learner: Learner, experience: Experience) -> None:
        self.model: PolicyModel = learner.model  # pyright: ignore[reportAttributeAccessIssue]
        self.parameters = learner.groups["policy"]
        self.tokens = float(experience.response_mask.sum())
        self.micro_batches: list[Experience] = list(learner.micro_batches(experience))
        with torch.no_grad():
            self.old = [self.distributions(micro) for micro in self.micro_batches]

    def distributions(self, micro: Experience) -> Distribution:
        """The current policy's distribution at each sampled token."""
        return as_distribution(self.model.distributions(micro))

    def curvature(self, vector: Tensor, *, damping: float) -> Tensor:
        """(P,) (F + damping I) v, by differentiating the exact KL twice; only plain attention kernels support that."""

        def share(micro: Experience) -> Callable[[], Tensor]:
            def mean_kl() -> Tensor:
                new = self.distributions(micro)
                return new.detach().kl(new).sum() / self.tokens

            return mean_kl

        with PlainAttention():
            product = fisher_vector_product(map(share, self.micro_batches), self.parameters, vector)
        return product + damping * vector

    @torch.no_grad()
    def measure(self) -> tuple[float, float]:
        """`(surrogate, kl)` of the current parameters, means over sampled tokens."""
        surrogate = kl = 0.0
        for micro, old in zip(self.micro_batches, self.old, strict=True):
            new = self.distributions(micro)
            sampled = micro.tokens[micro.response_mask]
            ratio = torch.exp(log_ratio(new.logprobs(sampled), old.logprobs(sampled)))
            surrogate += float((ratio * micro.advantages[micro.response_mask]).double().sum())
            kl += float(old.kl(new).double().sum())
        return surrogate / self.tokens, kl / self.tokens


class PlainAttention(TorchFunctionMode):
    """Attention by plain operations, which can be differentiated twice, in this thread alone.

    `sdpa_kernel(SDPBackend.MATH)` gives the same bits and switches the whole process: an engine that samples in another
    thread would then round differently from one moment to the next.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _plain_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` with its own arguments: queries (..., T, D) to (..., T, D)."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    attend: Any = torch.ops.aten._scaled_dot_product_attention_math
    return attend(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]  # fmt: skip
