"""Calling a reward safely: what it cannot score is marked invalid and counted, never read as zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tether.errors import DataError
from tether.protocols import RewardFn
from tether.rewards.combine import failure_reasons
from tether.types import Rollout, Score


def score_rollouts(reward: RewardFn, rollouts: Sequence[Rollout], *, max_failure_rate: float) -> list[Score]:
    """One score for each rollout; more failures than `max_failure_rate` of them end the run.

    A score that is not finite fails alone; a reward that raises has scored nothing, and ends the run.
    """
    try:
        scores = list(reward(rollouts))
    except Exception as error:
        raise DataError(f"the reward raised {type(error).__name__}: {error}") from error
    if len(scores) != len(rollouts):
        raise DataError(f"the reward gave {len(scores)} scores for {len(rollouts)} rollouts: it must give one for each")
    failed = sum(not score.usable for score in scores)
    if failed > max_failure_rate * len(rollouts):
        reasons = failure_reasons(scores)
        raise DataError(
            f"{failed} of {len(rollouts)} scores are missing or not finite{f' ({reasons})' if reasons else ''}, above "
            f"reward.max_failure_rate = {max_failure_rate}: mend the reward, or raise the limit"
        )
    return scores


def reward_from_function(function: Callable[[str, str, str | None], float]) -> RewardFn:
    """A reward from a plain function of (prompt text, completion, answer)."""

    def reward(rollouts: Sequence[Rollout]) -> list[Score]:
        return [
            Score(float(function(rollout.prompt.messages[-1]["content"], rollout.completion, rollout.prompt.answer)))
            for rollout in rollouts
        ]

    return reward
