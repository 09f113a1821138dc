"""A task that is solved looks like a collapse in every single number; the doctor tells them apart by the score."""

import pytest
from synthetic import found, silent, synthetic, wave

from tether.doctor.doctor import Doctor
from tether.doctor.drift import entropy_collapse, never_ends
from tether.doctor.findings import ceiling, solved
from tether.doctor.learning import clip, dominated_advantages, not_training
from tether.doctor.scores import flat_scores

TASK = {"task": {"name": "match-case"}, "optimizer": {"policy_lr": 1e-4}}
UNKNOWN = {"task": {"name": "mine:task"}, "optimizer": {"policy_lr": 1e-4}}
SOLVED_EARLY = [0.3, 0.6, 0.9, *[0.98] * 21]
FLAT = {"score_std": 0.0, "zero_std_groups": 1.0}


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_task_that_is_solved_from_the_start_is_left_alone(method: str):
    """Every answer scores 1: no spread, no advantage, no gradient, no entropy."""
    run = synthetic(
        method,
        TASK,
        **{f"grad_norm__{group}": 0.0 for group in ("policy", "critic")},
        score=1.0,
        **FLAT,
        entropy=wave(0.5, 0.02),
        steps=24,
        approx_kl=0.0,
        clip_fraction=0.0,
        response_length=4.0,
        truncated=0.0,
    )
    run.metrics[:] = [row | {"steps": 4.0} for row in run.metrics]
    assert solved(run)
    assert [(each.audit, each.saw) for each in Doctor().examine(run)] == []


def test_a_reward_that_is_always_the_same_is_no_solved_task():
    """The same numbers below the ceiling, or where nobody knows of one, are a reward that says nothing."""
    for config, score in ((TASK, 0.0), (TASK, 0.5), (UNKNOWN, 1.0)):
        run = synthetic("grpo", config, score=score, **FLAT, grad_norm__policy=0.0)
        assert not solved(run)
        assert found(flat_scores(run)).severity == "alarm"
        assert found(not_training(run)).severity == "alarm"


def test_entropy_that_is_gone_after_the_task_was_solved_is_no_collapse():
    spread = [0.45, 0.5, 0.3, *[0.14] * 21]  # 2 % of the answers still fail
    entropy = [*wave(2.0, 0.05, steps=12), *[0.05] * 12]
    assert silent(entropy_collapse(synthetic("ppo", TASK, score=SOLVED_EARLY, score_std=spread, entropy=entropy)))
    stuck = [value / 3.0 for value in SOLVED_EARLY]
    assert found(entropy_collapse(synthetic("ppo", TASK, score=stuck, score_std=spread, entropy=entropy)))


def test_few_answers_hold_the_advantage_where_few_are_left_to_solve():
    share = {"advantage_top_share": 0.8}
    assert silent(dominated_advantages(synthetic("grpo", TASK, score=SOLVED_EARLY, **share)))
    assert found(dominated_advantages(synthetic("grpo", TASK, score=0.2, **share)))


def test_an_idle_clip_and_short_answers_are_right_where_nothing_is_left_to_learn():
    idle = {"clip_fraction": 0.0, "approx_kl": 1e-9, "steps": 4.0}
    first = {name: value for name, value in idle.items() if name != "steps"}
    for score, expected in ((1.0, True), (0.1, False)):
        run = synthetic("ppo", TASK, score=score, **first)
        run.metrics[:] = [row | {"steps": 4.0} for row in run.metrics]
        assert silent(clip(run)) == expected
    fixed = TASK | {"rollout": {"max_new_tokens": 4}}
    assert silent(never_ends(synthetic("ppo", fixed, score=1.0, truncated=1.0)))
    assert found(never_ends(synthetic("ppo", fixed, score=0.1, truncated=1.0)))


@pytest.mark.parametrize(
    ("config", "top"),
    [
        ({"reward": {"parts": [{"kind": "math"}]}}, 1.0),
        ({"reward": {"parts": [{"kind": "math", "weight": 2.0}, {"kind": "ended", "weight": 0.5}]}}, 2.5),
        ({"reward": {"parts": [{"kind": "math"}, {"kind": "model", "weight": 0}]}}, 1.0),
        ({"reward": {"parts": [{"kind": "math"}, {"kind": "model"}]}}, None),
        ({"reward": {"parts": [{"kind": "math", "weight": 2.0}], "clip": 1.0}}, 1.0),
        ({"task": {"name": "reasoning-gym:chain_sum"}}, 1.0),
        ({"task": {"name": "match-case", "reward": "mine:reward"}}, None),
        ({"task": {"name": "mine:task"}}, None),
    ],
)
def test_the_most_that_a_reward_gives_is_read_off_the_recipe(config, top):
    assert ceiling(synthetic("ppo", config, score=0.0)) == top
