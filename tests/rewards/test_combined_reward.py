"""Rewards that are sums of parts."""

import math

import pytest
from rollout_factory import rollout_of

from tether.config.rewards import EndedPart, FunctionPart, LengthPart, TaskPart
from tether.errors import ConfigError, DataError
from tether.rewards.parts import build_reward
from tether.rewards.scoring import CombinedReward, WeightedReward, failed, failure_reasons, part_metrics, score_rollouts
from tether.types import Score

FOUR = [rollout_of("a b", finish="stop"), rollout_of("a", finish="length"), rollout_of("a b c"), rollout_of("a b c d")]


def by_text(prompt: str, completion: str, answer: str | None) -> float:
    if completion == "a":
        raise ValueError("I do not like it")
    return {"a b": 1.0, "a b c": math.nan}.get(completion, "4")


def by_rollouts(rollouts) -> list:
    return [True, None, 0.5, Score(2.0, {"inner": 7.0})][: len(rollouts)]


def too_few(rollouts) -> list:
    return [1.0]


def broken(rollouts) -> list:
    raise RuntimeError("oh")


def test_the_weighted_sum_keeps_each_raw_value():
    parts = [
        EndedPart(kind="ended", weight=2.0),
        LengthPart(kind="length", name="short", weight=-0.5, max=2, falloff=2),
    ]
    scores = build_reward(parts, own=None, policy=None, seed=0)(FOUR)
    assert [score.value for score in scores] == [1.5, -0.5, 2.0 - 0.25, 2.0]
    assert scores[2].parts == {"ended": 1.0, "short": 0.5}
    assert part_metrics(scores) == {
        "reward/ended": 0.75,
        "reward/ended/failed": 0.0,
        "reward/short": 0.625,
        "reward/short/failed": 0.0,
    }


def test_a_part_that_fails_makes_the_score_invalid_and_never_zero():
    parts = [EndedPart(kind="ended"), FunctionPart(kind="function", function=f"{__name__}:by_text", takes="text")]
    scores = build_reward(parts, own=None, policy=None, seed=0)(FOUR)
    assert [score.valid for score in scores] == [True, False, False, False]
    assert all(math.isnan(score.value) for score in scores[1:])
    assert scores[1].parts == {"ended": 0.0, "function/failed/ValueError": 1.0}, "the other part keeps its value"
    metrics = part_metrics(scores)
    assert metrics["reward/function"] == 1.0 and metrics["reward/function/failed"] == 3
    assert metrics["reward/function/failed/not_finite"] == metrics["reward/function/failed/not_a_number"] == 1
    assert metrics["reward/ended"] == 0.75 and metrics["reward/ended/failed"] == 0
    reasons = "function: ValueError (1), function: not_finite (1), function: not_a_number (1)"
    assert failure_reasons(scores) == reasons
    with pytest.raises(DataError, match=r"3 of 4 scores are missing or not finite \(function: ValueError"):
        score_rollouts(lambda _: scores, FOUR, max_failure_rate=0.5)


def test_a_part_that_always_fails_is_still_counted():
    reward = CombinedReward((WeightedReward("x", 1.0, lambda rollouts: [failed("why")] * len(rollouts)),))
    assert part_metrics(reward(FOUR)) == {"reward/x/failed": 4.0, "reward/x/failed/why": 4.0}


def test_a_function_of_rollouts_may_give_numbers_or_scores():
    part = FunctionPart(kind="function", name="mine", function=f"{__name__}:by_rollouts", weight=2.0)
    scores = build_reward([part], own=None, policy=None, seed=0)(FOUR)
    assert [score.valid and score.value for score in scores] == [2.0, False, 1.0, 4.0]
    assert scores[3].parts == {"mine": 2.0, "mine/inner": 7.0}
    assert part_metrics(scores)["reward/mine/inner"] == 7.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("too_few", "part 'function': .*:too_few returned 1 scores for 4 rollouts"),
        ("broken", r"part 'function': .*:broken raised RuntimeError: oh \(.*, line \d+, in broken: raise RuntimeError"),
    ],
)
def test_a_function_that_is_broken_ends_the_run(name: str, said: str):
    part = FunctionPart(kind="function", function=f"{__name__}:{name}")
    with pytest.raises(DataError, match=said):
        score_rollouts(build_reward([part], own=None, policy=None, seed=0), FOUR, max_failure_rate=1.0)


def test_an_invalid_score_without_a_reason_is_counted():
    reward = CombinedReward((WeightedReward("x", 1.0, lambda rollouts: [Score(1.0, valid=False)] * len(rollouts)),))
    assert part_metrics(reward(FOUR[:1])) == {"reward/x/failed": 1.0, "reward/x/failed/invalid": 1.0}


def test_the_tasks_own_reward_alone_and_as_a_part():
    def own(rollouts):
        return [Score(3.0, {"right": 1.0})] * len(rollouts)

    assert list(build_reward([], own=own, policy=None, seed=0)(FOUR)) == own(FOUR)
    parts = [TaskPart(kind="task", weight=10.0), EndedPart(kind="ended")]
    [score] = build_reward(parts, own=own, policy=None, seed=0)(FOUR[:1])
    assert score.value == 31.0 and score.parts == {"task": 3.0, "task/right": 1.0, "ended": 1.0}
    with pytest.raises(ConfigError, match="kind task needs a task"):
        build_reward(parts, own=None, policy=None, seed=0)


def test_a_function_that_is_not_there_is_told():
    with pytest.raises(ConfigError, match=r"reward.parts: function: there is no module 'nowhere'"):
        build_reward([FunctionPart(kind="function", function="nowhere:f")], own=None, policy=None, seed=0)
