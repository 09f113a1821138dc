"""Advantage estimators: from rewards (B, T) to `(advantages, returns)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tether.ops.advantages import gae, group_advantages, leave_one_out, reward_to_go, total_return


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation; the returns teach the critic."""

    gamma: float
    lam: float

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A_t = sum_k (gamma lam)^k delta_(t+k)."""
        del group_ids
        assert values is not None, "GAE needs a critic"
        return gae(rewards, values, mask, gamma=self.gamma, lam=self.lam, final_values=final_values)


Weighting = Literal["total", "to_go", "baselined", "advantage"]


@dataclass(frozen=True)
class PolicyGradientWeights:
    """The weight on grad log pi, four ways: total return, reward to go, reward to go minus V, or GAE."""

    weighting: Weighting
    gamma: float
    lam: float

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The weights, and the critic's target where the weighting has a critic."""
        if self.weighting == "total":
            return total_return(rewards, mask, gamma=self.gamma), None
        if self.weighting == "advantage":
            estimate = GAE(self.gamma, self.lam)
            return estimate(rewards, mask, values=values, final_values=final_values, group_ids=group_ids)
        to_go = reward_to_go(rewards, mask, gamma=self.gamma)
        if self.weighting == "to_go":
            return to_go, None
        assert values is not None, "a baseline needs a critic"
        return (to_go - values).masked_fill(~mask, 0.0), to_go


def _sequence_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    return rewards.masked_fill(~mask, 0.0).sum(dim=1)


def _on_every_token(advantages: Tensor, mask: Tensor) -> Tensor:
    return advantages[:, None].expand(mask.shape).masked_fill(~mask, 0.0)


@dataclass(frozen=True)
class LeaveOneOut:
    """RLOO: a sequence's whole reward minus the mean of its siblings', on each of its tokens."""

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """No critic, no returns."""
        del values, final_values
        return _on_every_token(leave_one_out(_sequence_rewards(rewards, mask), group_ids), mask), None


@dataclass(frozen=True)
class GroupRelative:
    """GRPO: a sequence's whole reward relative to its group's mean, and deviation if wanted, on each of its tokens."""

    scale_by_std: bool
    epsilon: float

    def __call__(
        self, rewards: Tensor, mask: Tensor, *, values: Tensor | None, final_values: Tensor | None, group_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """No critic, no returns."""
        del values, final_values
        advantages = group_advantages(
            _sequence_rewards(rewards, mask), group_ids, scale_by_std=self.scale_by_std, epsilon=self.epsilon
        )
        return _on_every_token(advantages, mask), None
