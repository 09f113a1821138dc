"""Rewards per token, returns, advantages, and baselines that need no critic.

Time runs over *sampled* tokens. Other tokens between two of them (tool output) take no time: the state after the first
sampled token is the state before the second, and the rewards and values of the others are never read. After a row's
last sampled token the value is `final_values` if the answer was truncated, else 0. Results are (B, T), 0 off the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tether.ops.masks import last_index, widened


def token_rewards(scores: Tensor, kl: Tensor | None, mask: Tensor, *, kl_coef: float) -> Tensor:
    """(B, T) r_t = -kl_coef * kl_t on sampled tokens, plus the score on the row's last sampled token; 0 elsewhere.

    `scores` (B,), `kl` (B, T) or None. The episode ends on the last *sampled* token of each row, wherever the padding
    is (Stiennon et al. 2020).
    """
    shape = (mask.shape[0], 1)
    ends = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    ends = ends.scatter(1, last_index(mask).reshape(shape), scores.reshape(shape))
    if kl is None:
        return ends
    return ends - kl_coef * kl.masked_fill(~mask, 0.0)


def missing_eos_penalty(scores: Tensor, truncated: Tensor, penalty: float | None) -> Tensor:
    """(B,) the score, or `penalty` instead if the answer was truncated (Stiennon et al. 2020); None: no change."""
    return scores if penalty is None else torch.where(truncated, penalty, scores)


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """(B,) the soft overlong punishment of DAPO (Yu et al. 2025), from 0 down to -1.

        0                                       l <= max_length - buffer
        (max_length - buffer - l) / buffer      in between
        -1                                      l > max_length

    `lengths` (B,) are sampled tokens.
    """
    return ((max_length - buffer - widened(lengths)) / buffer).clamp(-1.0, 0.0)


def clip_scores(scores: Tensor, limit: float | None) -> Tensor:
    """(B,) clamped to [-limit, limit]; None: no change."""
    return scores if limit is None else scores.clamp(-limit, limit)


def _steps(mask: Tensor) -> list[int]:
    """The columns in which some row has a sampled token; other columns, such as those of prompts, change nothing."""
    used = mask.any(dim=0)
    return [column for column in range(len(used)) if used[column]]


def reward_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_(t+1)."""
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(_steps(mask)):
        following = torch.where(mask[:, t], rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(mask[:, t], following, 0.0)
    return returns


def total_return(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """R = sum_k gamma^k r_k from the row's first sampled token, the same on each of its sampled tokens."""
    step = (mask.long().cumsum(dim=1) - 1).clamp_min(0)
    discounted = (rewards * gamma ** step.to(rewards.dtype)).masked_fill(~mask, 0.0)
    return discounted.sum(dim=1, keepdim=True).expand_as(rewards).masked_fill(~mask, 0.0)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016): `(advantages, returns)`.

        delta_t = r_t + gamma * V_(t+1) - V_t
        A_t     = delta_t + gamma * lam * A_(t+1)
        returns = A + V

    lam = 0 is the TD residual; lam = 1 is Monte Carlo: reward to go minus value. `lam` may be one number for each row,
    (B,). `final_values` is (B,).
    """
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(values[:, 0]) if final_values is None else final_values
    following = torch.zeros_like(values[:, 0])
    for t in reversed(_steps(mask)):
        sampled = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(sampled, delta + gamma * lam * following, following)
        next_value = torch.where(sampled, values[:, t], next_value)
        advantages[:, t] = torch.where(sampled, following, 0.0)
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


def decoupled_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    critic_lam: float | Tensor,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE with a lambda of its own for the critic (Yuan et al. 2025): `(advantages, returns)`.

        advantages = GAE(gamma, lam)
        returns    = GAE(gamma, critic_lam) + V

    critic_lam = 1 gives the critic unbiased targets; lam < 1 still trades bias for variance in the policy's gradient.
    """
    advantages, _ = gae(rewards, values, mask, gamma=gamma, lam=lam, final_values=final_values)
    _, returns = gae(rewards, values, mask, gamma=gamma, lam=critic_lam, final_values=final_values)
    return advantages, returns


def length_adaptive_lambda(mask: Tensor, *, alpha: float, dtype: torch.dtype | None = None) -> Tensor:
    """(B,) lambda = 1 - 1 / (alpha * l) for an answer of l sampled tokens, at least 0 (VAPO, Yue et al. 2025).

    The weights of GAE then sum to about alpha * l, in proportion to the answer's length.
    """
    lengths = mask.sum(dim=1).clamp_min(1).to(dtype or torch.get_default_dtype())
    return (1.0 - 1.0 / (alpha * lengths)).clamp_min(0.0)


def td_residuals(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, final_values: Tensor | None = None
) -> Tensor:
    """delta_t = r_t + gamma * V_(t+1) - V_t."""
    return gae(rewards, values, mask, gamma=gamma, lam=0.0, final_values=final_values)[0]


def n_step(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, n: int, final_values: Tensor | None = None
) -> Tensor:
    """A_t = sum_{k<n} gamma^k r_(t+k) + gamma^n V_(t+n) - V_t.

    Where only m < n steps remain, the sum has m terms and gamma^m * final value closes it. n = 1 is the TD residual; an
    n of at least the answer's length is Monte Carlo.
    """
    n = min(n, mask.shape[1])  # no row has more steps
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)  # sampled tokens first, in their order
    sampled = mask.gather(1, order)
    ends = torch.zeros_like(values[:, :1]) if final_values is None else final_values[:, None]
    closing = ends.expand(-1, n)
    step_rewards = torch.cat([rewards.gather(1, order).masked_fill(~sampled, 0.0), torch.zeros_like(closing)], dim=1)
    step_values = torch.cat([torch.where(sampled, values.gather(1, order), ends), closing], dim=1)

    width = mask.shape[1]
    remaining = sampled.flip(1).long().cumsum(dim=1).flip(1)  # steps left from here on, this one included
    discount = gamma ** remaining.clamp_max(n).to(values.dtype)
    advantages = discount * step_values[:, n : n + width] - step_values[:, :width]
    for k in range(n):
        advantages = advantages + gamma**k * step_rewards[:, k : k + width]
    return torch.zeros_like(rewards).scatter(1, order, advantages.masked_fill(~sampled, 0.0))


def group_statistics(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B,) each: the size, the sum and the sum of squared deviations from the mean of the row's own group."""
    scores = widened(scores)
    same = (group_ids[:, None] == group_ids[None, :]).to(scores.dtype)  # (B, B)
    sizes, sums = same.sum(dim=1), same @ scores
    squares = same @ (scores - sums / sizes) ** 2
    return sizes, sums, squares


def group_advantages(
    scores: Tensor, group_ids: Tensor, *, scale_by_std: bool, unbiased: bool = True, epsilon: float = 1e-4
) -> Tensor:
    """(B,) s - mean of its group, divided by (the group's std + epsilon) if `scale_by_std` (Shao et al. 2024).

    `scores` and `group_ids` are (B,). A group of one has no baseline and raises a ValueError.
    """
    sizes, sums, squares = group_statistics(scores, group_ids)
    check_group_sizes(sizes)
    advantages = scores - sums / sizes
    if scale_by_std:
        advantages = advantages / ((squares / (sizes - 1 if unbiased else sizes)).sqrt() + epsilon)
    return advantages.to(scores.dtype)


def leave_one_out(scores: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) s minus the mean of the other scores of its group (Kool et al. 2019). A group of one raises a ValueError."""
    sizes, sums, _ = group_statistics(scores, group_ids)
    check_group_sizes(sizes)
    return (scores - (sums - scores) / (sizes - 1)).to(scores.dtype)


def check_group_sizes(sizes: Tensor) -> None:
    """Raise unless every group has at least two samples."""
    if bool((sizes < 2).any()):
        raise ValueError(
            "a group of one sample has no baseline: set rollout.samples_per_prompt to 2 or more, and leave out groups "
            "that lost all but one sample"
        )


# -- baselines without a critic -----------------------------------------------------------------------------------


def mean_return(returns: Tensor, mask: Tensor) -> Tensor:
    """Scalar: the mean over rows of R, the entry of `returns` (B, T) at the row's first sampled token.

    There the total return and the reward to go are the same number. A row without a sampled token is not counted.
    """
    width = mask.shape[1]
    first = (width - 1 - last_index(mask.flip(1))).clamp_max(width - 1)
    answered = mask.any(dim=1)
    found = widened(returns).gather(1, first[:, None])[:, 0].masked_fill(~answered, 0.0)
    return (found.sum() / answered.sum()).to(returns.dtype)


def less_baseline(returns: Tensor, mask: Tensor, baseline: Tensor | float) -> Tensor:
    """(B, T) returns - baseline on sampled tokens, 0 elsewhere (Williams 1992).

    A number that does not depend on the answer changes the variance of the gradient and not its mean. The mean of a
    batch of B answers contains the answer itself with weight 1 / B, which scales the gradient by (B - 1) / B.
    """
    return torch.where(mask, returns - baseline, 0.0)


@dataclass(frozen=True)
class MovingAverage:
    """The mean of earlier steps' numbers, the latest with the largest weight (reinforcement comparison, Sutton 1984).

        b_k = sum_(j<k) decay^(k-1-j) x_j / sum_(j<k) decay^(k-1-j);    b_1 = 0

    It is an exponential moving average without the bias of its start. A value: `after` returns the next one.
    """

    decay: float
    value: float = 0.0
    weight: float = 0.0  # the sum of the powers of decay so far

    def after(self, number: float) -> MovingAverage:
        """The average once a step's number is known."""
        weight = self.decay * self.weight + 1.0
        return replace(self, value=self.value + (number - self.value) / weight, weight=weight)


# -- groups of answers to one prompt ------------------------------------------------------------------------------


def has_spread(scores: Tensor, group_ids: Tensor) -> Tensor:
    """(B,) bool: whether two scores of the row's group differ. `scores` and `group_ids` are (B,).

    A group whose answers all have one score has advantages of 0 relative to it: it adds nothing to the gradient (DAPO,
    Yu et al. 2025).
    """
    same = group_ids[:, None] == group_ids[None, :]  # (B, B)
    highest = torch.where(same, scores[None, :], -torch.inf).amax(dim=1)
    lowest = torch.where(same, scores[None, :], torch.inf).amin(dim=1)
    return highest > lowest


def refilled(places: Sequence[bool], candidates: Sequence[bool]) -> list[int | None]:
    """For each place the candidate that takes it, None where it keeps its group; both say whether a group has spread.

    The first place without spread gets the first candidate with it, and so on. What is left of either changes nothing.
    """
    found = iter([index for index, spread in enumerate(candidates) if spread])
    return [None if spread else next(found, None) for spread in places]
