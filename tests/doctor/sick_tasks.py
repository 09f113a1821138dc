"""Tasks and rewards that make tiny runs ill, each in one known way. Recipes name them as `sick_tasks:NAME`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tether.protocols import RewardFn
from tether.rewards.tasks import MatchCase
from tether.types import Prompt, Rollout, Score


def constant(rollouts: Sequence[Rollout]) -> list[Score]:
    """The same score for every answer: there is nothing to learn from."""
    return [Score(0.5) for _ in rollouts]


def longest(rollouts: Sequence[Rollout]) -> list[Score]:
    """The longer, the better, whatever it says."""
    return [Score(rollout.response_length / 32.0) for rollout in rollouts]


def scolded(rollouts: Sequence[Rollout]) -> list[Score]:
    """About -1 for every answer."""
    return [Score(-1.0 - 0.1 * (hash_of(rollout) % 2)) for rollout in rollouts]


def one_letter(rollouts: Sequence[Rollout]) -> list[Score]:
    """The part of an answer that is the letter e: one answer is best for every prompt."""
    return [Score(rollout.completion.count("e") / max(1, len(rollout.completion))) for rollout in rollouts]


def rare_prize(rollouts: Sequence[Rollout]) -> list[Score]:
    """A prize for one answer in forty, which none can learn to win, and as good as nothing for the others."""
    return [Score(100.0 if hash_of(rollout) % 40 == 0 else 0.01 * (rollout.group_id % 2)) for rollout in rollouts]


def often_missing(rollouts: Sequence[Rollout]) -> list[Score]:
    """The task's own score, but none for about one answer in twelve."""
    return [
        Score(math.nan, valid=False) if hash_of(rollout) % 12 == 0 else Score(MatchCase().fraction(rollout))
        for rollout in rollouts
    ]


def other_than_asked(rollouts: Sequence[Rollout]) -> list[Score]:
    """A proxy: lower-case letters, even where digits were asked for. The task's own score cannot follow."""
    return [Score(sum(letter.islower() for letter in rollout.completion) / 8.0) for rollout in rollouts]


def spiky(rollouts: Sequence[Rollout]) -> list[Score]:
    """The task's own score, a thousand times as large in two of the iterations."""
    return [
        Score(MatchCase().fraction(rollout) * (1000.0 if rollout.policy_version in (15, 21) else 1.0))
        for rollout in rollouts
    ]


def ended_soon(rollouts: Sequence[Rollout]) -> list[Score]:
    """A reward that answers can learn to end for: 1 for an end after four to eight tokens."""
    return [Score(float(rollout.finish == "stop" and 4 <= rollout.response_length <= 8)) for rollout in rollouts]


def hash_of(rollout: Rollout) -> int:
    """A number that is the same in every process."""
    return int(rollout.token_ids.sum())


class TwoPrompts(MatchCase):
    """The task with two prompts in all."""

    def prompts(self) -> Sequence[Prompt]:
        """Two of them."""
        return list(super().prompts())[:2]


class NeverRight(MatchCase):
    """The task with a reward that never rises: no answer can be right."""

    def reward(self) -> RewardFn:
        """Random by token, so that it varies and cannot be learned."""
        return lambda rollouts: [Score((hash_of(rollout) % 7) / 7.0) for rollout in rollouts]
