"""Calling a reward safely: what it cannot score is marked invalid and counted, never read as zero."""

from __future__ import annotations

from collections.abc import Sequence

from tether.errors import DataError, TetherError
from tether.protocols import RewardFn
from tether.rewards.calling import CallError, read_values
from tether.rewards.combine import failure_errors, failure_reasons
from tether.rewards.explain import explain
from tether.rewards.function import as_score
from tether.rewards.plain import private_copies
from tether.types import Rollout, Score
from tether.user_code import apart, is_its_own


def score_rollouts(reward: RewardFn, rollouts: Sequence[Rollout], *, max_failure_rate: float) -> list[Score]:
    """One score for each rollout; more failures than `max_failure_rate` of them end the run.

    A score that is not finite fails alone; a reward that raises has scored nothing, and ends the run. The reward gets
    copies: what it does to them does not change the run.
    """
    try:
        with apart():
            given = read_values(reward(private_copies(rollouts)), len(rollouts))
    except CallError as error:
        raise DataError(f"the reward {error}") from error
    except TetherError:
        raise
    except BaseException as error:
        if not is_its_own(error):
            raise
        raise DataError(f"the reward raised {explain(error)}") from error
    scores = [as_score(value) for value in given]
    failed = sum(not score.usable for score in scores)
    if failed > max_failure_rate * len(rollouts):
        reasons, errors = failure_reasons(scores), failure_errors(scores)
        raise DataError(
            f"{failed} of {len(rollouts)} scores are missing or not finite{f' ({reasons})' if reasons else ''}, above "
            f"reward.max_failure_rate = {max_failure_rate}: mend the reward, or raise the limit"
            + (f". What went wrong: {'; '.join(errors)}" if errors else "")
        )
    return scores
