"""Advantage estimators: they map rewards (B, T) to `(advantages, returns)`; returns are the critic's targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from tether.errors import ConfigError
from tether.ops.advantages import (
    decoupled_gae,
    gae,
    group_advantages,
    leave_one_out,
    length_adaptive_lambda,
    n_step,
    reward_to_go,
    total_return,
)


@dataclass(frozen=True)
class GAE:
    """Generalized advantage estimation; the returns are the critic's targets.

    `critic_lam` is the lambda of the targets, None for that of the advantages. With `lam_alpha` the lambda of the
    advantages grows with the answer's length, in place of `lam`.
    """

    gamma: float
    lam: float
    critic_lam: float | None = None
    lam_alpha: float | None = None

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A_t = sum_k (gamma lam)^k delta_(t+k)."""
        del group_ids
        if values is None:
            raise ConfigError("GAE reads the critic's values, and this algorithm has no critic: set needs_critic=True")
        if self.critic_lam is None and self.lam_alpha is None:
            return gae(rewards, values, mask, gamma=self.gamma, lam=self.lam, final_values=final_values)
        lam = self.lam
        if self.lam_alpha is not None:
            lam = length_adaptive_lambda(mask, alpha=self.lam_alpha, dtype=values.dtype)
        return decoupled_gae(
            rewards,
            values,
            mask,
            gamma=self.gamma,
            lam=lam,
            critic_lam=self.lam if self.critic_lam is None else self.critic_lam,
            final_values=final_values,
        )


@dataclass(frozen=True)
class NStep:
    """The n-step advantage; the critic's target is the n-step return."""

    gamma: float
    n: int

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A_t = sum_{k<n} gamma^k r_(t+k) + gamma^n V_(t+n) - V_t, and A + V."""
        del group_ids
        if values is None:
            raise ConfigError(
                "NStep reads the critic's values, and this algorithm has no critic: set needs_critic=True"
            )
        advantages = n_step(rewards, values, mask, gamma=self.gamma, n=self.n, final_values=final_values)
        return advantages, (advantages + values).masked_fill(~mask, 0.0)


Weighting = Literal["total", "to_go", "baselined", "advantage", "n_step"]


@dataclass(frozen=True)
class PolicyGradientWeights:
    """The weight of grad log pi: total return, reward to go, reward to go minus V, GAE, or the n-step advantage."""

    weighting: Weighting
    gamma: float
    lam: float
    n_steps: int | None = None

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ConfigError(f"PolicyGradientWeights of {self.weighting!r}: use {', '.join(get_args(Weighting))}")
        if self.weighting == "n_step" and self.n_steps is None:
            raise ConfigError('PolicyGradientWeights("n_step") needs n_steps, such as n_steps=4')

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The weights, and the critic's targets where the variant has a critic."""
        if self.weighting == "total":
            return total_return(rewards, mask, gamma=self.gamma), None
        if self.weighting == "advantage":
            estimate = GAE(self.gamma, self.lam)
            return estimate(rewards, mask, values=values, final_values=final_values, group_ids=group_ids)
        if self.weighting == "n_step":
            assert self.n_steps is not None  # checked when it was made
            estimate = NStep(self.gamma, self.n_steps)
            return estimate(rewards, mask, values=values, final_values=final_values, group_ids=group_ids)
        to_go = reward_to_go(rewards, mask, gamma=self.gamma)
        if self.weighting == "to_go":
            return to_go, None
        if values is None:
            raise ConfigError(
                "the weighting baselined reads the critic's values, and this algorithm has no critic: set "
                "needs_critic=True"
            )
        return (to_go - values).masked_fill(~mask, 0.0), to_go


def _sequence_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    return rewards.masked_fill(~mask, 0.0).sum(dim=1)


def _on_every_token(advantages: Tensor, mask: Tensor) -> Tensor:
    return advantages[:, None].expand(mask.shape).masked_fill(~mask, 0.0)


@dataclass(frozen=True)
class LeaveOneOut:
    """RLOO: a sequence's total reward minus the mean of its siblings', on each of its tokens."""

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(advantages, None): there is no critic."""
        del values, final_values
        return _on_every_token(leave_one_out(_sequence_rewards(rewards, mask), group_ids), mask), None


@dataclass(frozen=True)
class GroupRelative:
    """GRPO: a sequence's total reward minus its group's mean, optionally divided by the group's std, per token."""

    scale_by_std: bool
    epsilon: float

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(advantages, None): there is no critic."""
        del values, final_values
        advantages = group_advantages(
            _sequence_rewards(rewards, mask), group_ids, scale_by_std=self.scale_by_std, epsilon=self.epsilon
        )
        return _on_every_token(advantages, mask), None
