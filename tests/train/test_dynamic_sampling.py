"""Dynamic sampling: which groups give way, what is recorded, and the same bits after any break and on any ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import struct

import pytest
import torch
from in_process import Broken, attempt, step_by_step, whole
from same_runs import differences, metrics_table
from tiny_recipes import TOP, tiny

from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.store.folder import run_path
from tether.train.attempt import Attempt
from tether.train.build import build_rl, load_policy
from tether.train.rl import train_rl
from tether.types import Score

GROUPS = ("--rollout.prompts_per_step", "4", "--rollout.samples_per_prompt", "2", "--rollout.max_new_tokens", "3")
REFILL = ("--rollout.dynamic_sampling_rounds", "3")
COARSE = ("--task.reward", "coarse_reward:reward")


def built(*flags: str, method: str = "grpo"):
    recipe = load_recipe(method, None, ["--run.steps", "3", "--kl.apply_to", "none", *GROUPS, *flags])
    return build_rl(recipe, load_policy(recipe))


class Scripted:
    """A reward that says in each call which prompts' answers differ, and remembers what it was asked."""

    def __init__(self, *calls: str):
        self.calls, self.asked = list(calls), []

    def __call__(self, rollouts):
        self.asked.append([rollout.prompt.id for rollout in rollouts])
        spread = self.calls.pop(0)
        assert len(rollouts) == 2 * len(spread)
        return [
            Score({"s": float(row % 2), "1": 1.0, "0": 0.0, "n": float("nan")}[spread[row // 2]])
            for row in range(len(rollouts))
        ]


def one_step(*calls: str, rounds: int = 3, failures: float = 0.0):
    reward = Scripted(*calls)
    parts = dataclasses.replace(
        built(), reward=reward, dynamic_sampling_rounds=rounds, max_failure_rate=failures, steps=1
    )
    (result,) = train_rl(parts)
    assert not reward.calls
    return result, reward.asked


def test_groups_without_spread_give_way_to_the_next_candidates_with_it():
    result, asked = one_step("s10s", "1s", "s")
    metrics = result.metrics
    # Places 1 and 2 lack spread. The first round of two candidates fills place 1, the second round of one place 2.
    assert [len(prompts) for prompts in asked] == [8, 4, 2]
    prompts = [rollout.prompt.id for rollout in result.rollouts]
    assert prompts == [*asked[0][:2], *asked[1][2:], *asked[2], *asked[0][6:]]
    assert result.experience.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [score.value for score in result.scores] == [0.0, 1.0] * 4
    assert metrics["dynamic_sampling/rounds"] == 2 and metrics["dynamic_sampling/prompts"] == 7
    assert metrics["dynamic_sampling/flat_groups_first"] == 0.5 and metrics["dynamic_sampling/flat_groups"] == 0
    assert metrics["dynamic_sampling/score_first"] == 0.5 and metrics["score"] == 0.5


def test_what_is_flat_after_the_last_round_stays_and_the_batch_keeps_its_size():
    result, asked = one_step("1111", "0s00", "000", rounds=2)
    assert len(asked) == 3 and len(result.experience) == 8
    assert [rollout.prompt.id for rollout in result.rollouts] == [*asked[1][2:4], *asked[0][2:]]
    assert result.metrics["dynamic_sampling/flat_groups"] == 0.75
    assert result.metrics["dynamic_sampling/score_first"] == 1.0


def test_nothing_more_is_sampled_where_all_groups_have_spread():
    result, asked = one_step("ssss")
    assert len(asked) == 1 and result.metrics["dynamic_sampling/rounds"] == 0


def test_answers_without_a_score_are_no_spread():
    result, asked = one_step("sssn", "s", failures=0.3)
    assert len(asked) == 2 and result.metrics["dynamic_sampling/flat_groups_first"] == 0.25
    assert result.metrics["dropped/unscored"] == 0 and len(result.experience) == 8


def test_where_all_groups_have_spread_the_bits_are_those_without_the_setting():
    plain, allowed = (one_step("ssss", rounds=rounds)[0] for rounds in (0, 3))
    assert "dynamic_sampling/rounds" not in plain.metrics
    for name, column in vars(plain.experience).items():
        assert not isinstance(column, torch.Tensor) or torch.equal(column, getattr(allowed.experience, name)), name
    assert torch.equal(plain.ratios, allowed.ratios)


def test_one_answer_to_each_prompt_has_no_group_to_replace():
    with pytest.raises(ConfigError, match=r"rollout.samples_per_prompt is 1: set it to 2 or more"):
        load_recipe("ppo", None, [*REFILL])


def coarse(workspace, *flags: str, method: str = "grpo"):
    return tiny(method, workspace, "--run.steps", "4", *GROUPS, *REFILL, *COARSE, *flags)


def rounds_of(run) -> list[float]:
    found = [bits for _, name, bits in metrics_table(run) if name == "dynamic_sampling/rounds"]
    return [struct.unpack("<d", bits)[0] for bits in found]


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        ("grpo", ()),
        ("grpo", TOP),
        ("ppo", ("--roles.mode", "lora", "--roles.lora_rank", "2")),
    ],
    ids=["separate", "shared backbone", "lora with a critic"],
)
def test_a_run_that_stops_after_every_step_ends_with_the_same_bits(tmp_path, method, flags):
    calm = whole(coarse(tmp_path / "calm", *flags, method=method))
    stopped = step_by_step(coarse(tmp_path / "stopped", *flags, "--checkpoint.every", "0", method=method))
    assert differences(calm, stopped) == []
    assert len(rounds_of(calm)) == 4 and sum(rounds_of(calm)) > 1


def test_a_run_that_breaks_off_between_two_rounds_ends_with_the_same_bits(tmp_path, monkeypatch):
    calm = whole(coarse(tmp_path / "calm"))
    recipe = coarse(tmp_path / "broken", "--checkpoint.every", "1")
    heartbeat, said, broken = Attempt.heartbeat, [], set()

    def breaking(self, words):
        heartbeat(self, words)
        said.append(words)
        if words.startswith("rollout") and said.count(words) == 2 and words not in broken:
            broken.add(words)
            raise Broken(words)

    monkeypatch.setattr(Attempt, "heartbeat", breaking)
    for _ in range(5):
        said.clear()
        with contextlib.suppress(Broken):
            attempt(recipe)
    assert len(broken) == sum(number > 0 for number in rounds_of(calm)) >= 2
    assert differences(calm, run_path(recipe)) == []
