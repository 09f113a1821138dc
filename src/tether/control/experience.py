"""Rollouts as batches: by stretch for advantages, by step for updates.

A stretch is a run of steps of one copy that ends with its episode or with the rollout. As a row of a batch it is what
an answer is for a language model: a step is a token, and a stretch that ends before its episode is a truncated answer.
For updates each step is a row of its own, so that minibatches are made of single steps, in an order that is shuffled
once: the first epoch is read in it, and old log-probabilities are evaluated in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tether.control.environments import Trajectories
from tether.control.networks import NumpyPolicy
from tether.ops.masks import masks_from_lengths
from tether.types import EvaluatedBatch, Experience, TokenBatch, extend


@dataclass(frozen=True)
class Stretches:
    """Where each of S steps is in the layout by stretch, (B, L)."""

    mask: Tensor  # (B, L) bool; its True entries in row-major order are the steps by copy, then by time
    truncated: Tensor  # (B,) bool
    final_observations: Tensor  # (B, O)

    @classmethod
    def of(cls, rollout: Trajectories) -> Stretches:
        """Of a rollout."""
        ends = rollout.ends
        before = [-1, *(end.step for end in ends[:-1])]
        fresh = [True, *(end.copy != last.copy for end, last in zip(ends[1:], ends, strict=False))]
        lengths = [end.step - (-1 if new else last) for end, last, new in zip(ends, before, fresh, strict=True)]
        sizes = torch.tensor(lengths)
        mask, _ = masks_from_lengths(torch.zeros_like(sizes), sizes, max(lengths), "right")
        observations = torch.from_numpy(np.stack([end.observation for end in ends]))
        return cls(mask, torch.tensor([end.truncated for end in ends]), observations)

    def lay_out(self, column: Tensor) -> Tensor:
        """(B, L) of the steps' (S,), 0 elsewhere."""
        rows = torch.zeros(self.mask.shape, dtype=column.dtype)
        rows[self.mask] = column
        return rows


def by_step(rollout: Trajectories, policy: NumpyPolicy, order: Tensor) -> TokenBatch:
    """(S, 1) the steps in `order`, a permutation of them."""
    observations = rollout.observations.reshape(order.numel(), -1)
    actions = rollout.actions.reshape(order.numel(), *rollout.actions.shape[2:])
    behavior = torch.from_numpy(policy.logprobs(observations, actions))[order, None]
    everywhere, nothing = torch.ones(order.numel(), 1, dtype=torch.bool), torch.zeros(order.numel())
    return TokenBatch(
        tokens=torch.from_numpy(actions)[order, None],
        observations=torch.from_numpy(observations)[order, None],
        attention_mask=everywhere,
        response_mask=everywhere,
        behavior_logprobs=behavior,
        untruncated_logprobs=behavior,
        scores=nothing,
        group_ids=order,
        truncated=nothing.bool(),
    )


def by_stretch(evaluated: EvaluatedBatch, order: Tensor, stretches: Stretches, final_values: Tensor) -> EvaluatedBatch:
    """(B, L) what was evaluated by step, for the estimator of advantages, which needs no states or actions."""
    places = torch.argsort(order)

    def column(values: Tensor) -> Tensor:
        return stretches.lay_out(values[places, 0])

    assert evaluated.values is not None
    return EvaluatedBatch(
        tokens=stretches.lay_out(torch.arange(len(order))),
        attention_mask=stretches.mask,
        response_mask=stretches.mask,
        behavior_logprobs=column(evaluated.behavior_logprobs),
        untruncated_logprobs=column(evaluated.untruncated_logprobs),
        scores=torch.zeros(len(stretches.mask)),
        group_ids=torch.arange(len(stretches.mask)),
        truncated=stretches.truncated,
        old_logprobs=column(evaluated.old_logprobs),
        ref_logprobs=None,
        values=column(evaluated.values),
        final_values=final_values,
    )


def with_advantages(evaluated: EvaluatedBatch, order: Tensor, found: Experience) -> Experience:
    """(S, 1) the steps in `order`, with the advantages that were found by stretch."""

    def column(values: Tensor) -> Tensor:
        return values[found.response_mask][order, None]

    returns = None if found.returns is None else column(found.returns)
    return extend(
        evaluated, Experience, rewards=column(found.rewards), advantages=column(found.advantages), returns=returns
    )
