"""What happens on one rank is decided on all of them; a rank that is lost ends the run with a sentence."""

from __future__ import annotations

import json

import faulty_parts
import pytest
from in_process import attempt
from ranks_runner import on_ranks, trained
from same_runs import differences, metrics_table
from tiny_recipes import TOP, tiny

from tether.distributed.group_ranks import check_recipe
from tether.errors import ConfigError, DataError, RankLost
from tether.store.folder import run_path
from tether.train import rl


def test_out_of_memory_on_one_rank_halves_the_micro_batches_of_all(tmp_path, monkeypatch):
    few = ("--optimizer.micro_batch_tokens", "60", "--sft.batch_size", "6", "--run.steps", "3")
    faulty_parts.out_of_memory(monkeypatch)
    one = trained(tiny("sft", tmp_path / "one", *few), 1)
    for count in (2, 3):  # the second micro-batch is rank 1's
        several = trained(tiny("sft", tmp_path / f"{count}", *few), count)
        assert differences(one, several) == []
    assert {"out_of_memory", "micro_batch_tokens"} <= {name for _, name, _ in metrics_table(one)}


def test_an_update_that_is_not_finite_is_skipped_by_all(tmp_path, monkeypatch):
    few = ("--optimizer.micro_batch_tokens", "40", "--run.steps", "3")
    faulty_parts.not_finite(monkeypatch)
    one = trained(tiny("sft", tmp_path / "one", *few), 1)
    two = trained(tiny("sft", tmp_path / "two", *few), 2)
    assert differences(one, two) == []
    faults = [next((run / "faults").glob("step-*")) / "fault.json" for run in (one, two)]
    found = [json.loads(fault.read_text()) for fault in faults]
    assert found[0] == found[1]
    assert found[0]["findings"][0]["tensor"] == "loss"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_which_goes_on(tmp_path, monkeypatch, capfd, lost):
    few = ("--optimizer.micro_batch_tokens", "40", "--run.steps", "4", "--checkpoint.every", "1")
    calm = trained(tiny("sft", tmp_path / "calm", *few), 1)
    recipe = tiny("sft", tmp_path / "lost", *few)
    with monkeypatch.context() as patch:
        faulty_parts.dies(lost, 3, patch)
        codes = on_ranks(3, lambda: attempt(recipe).steps)
    assert codes[lost] == -9
    assert set(codes[:lost] + codes[lost + 1 :]) == {RankLost.exit_code}
    if lost:
        assert "another rank ended in the middle of a step" in capfd.readouterr().err
    trained(recipe, 3, steps=1)
    assert differences(calm, trained(recipe, 1)) == []


def test_an_error_on_another_rank_is_told_by_rank_0(tmp_path, monkeypatch, capfd):
    faulty_parts.raises(1, monkeypatch)
    recipe = tiny("sft", tmp_path / "runs", "--optimizer.micro_batch_tokens", "40")
    codes = on_ranks(2, lambda: attempt(recipe).steps)
    assert codes[0] == RankLost.exit_code
    assert codes[1] != 0
    assert "rank 1: the moon is full" in capfd.readouterr().err


def test_an_error_on_rank_0_alone_ends_the_others(tmp_path, monkeypatch, capfd):
    collate = rl.collate

    def broken(*given, **named):
        if faulty_parts.on_rank(0):
            raise DataError("rank 0 stumbles")
        return collate(*given, **named)

    monkeypatch.setattr(rl, "collate", broken)
    recipe = tiny("grpo", tmp_path / "runs")
    assert on_ranks(3, lambda: attempt(recipe).steps) == [DataError.exit_code, *[RankLost.exit_code] * 2]
    assert "rank 0 stumbles" in capfd.readouterr().err


def test_ranks_whose_weights_part_end(tmp_path, monkeypatch, capfd):
    faulty_parts.drifts(1, monkeypatch)
    recipe = tiny("sft", tmp_path / "runs", "--optimizer.micro_batch_tokens", "16")
    assert on_ranks(2, lambda: attempt(recipe).steps) == [RankLost.exit_code] * 2
    assert "rank 1: its weights are no longer those of rank 0" in capfd.readouterr().err


def test_a_reward_that_cannot_be_found_ends_every_rank(tmp_path):
    recipe = tiny("grpo", tmp_path / "runs", "--task.reward", "case_reward:missing")
    codes = on_ranks(2, lambda: attempt(recipe).steps)
    assert codes[0] == ConfigError.exit_code
    assert codes[1] == 0  # it was told the end before it began


def test_a_reward_that_fails_ends_every_rank(tmp_path, monkeypatch, capfd):
    def broken(*given, **named):
        raise DataError("the reward has no more to say")

    monkeypatch.setattr(rl, "score_rollouts", broken)
    recipe = tiny("grpo", tmp_path / "runs", "--evaluation.every", "0")
    assert on_ranks(3, lambda: attempt(recipe).steps) == [DataError.exit_code, *[RankLost.exit_code] * 2]
    assert capfd.readouterr().err.count("the reward has no more to say") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--distributed.shard", "full", *TOP), "distributed.shard"),
        ((*TOP, "--roles.backbone_cache", "states"), "roles.backbone_cache"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(tmp_path, capfd, flags, words):
    recipe = tiny("sft", tmp_path / "runs", *flags)
    codes = on_ranks(2, lambda: attempt(recipe).steps)
    assert codes == [ConfigError.exit_code, 0]
    assert words in capfd.readouterr().err
    assert not run_path(recipe).exists()


@pytest.mark.parametrize("key", ["rollout.engine", "model.loader"])
def test_code_that_only_rank_0_would_run_is_refused(tmp_path, key):
    recipe = tiny("ppo", tmp_path / "runs", f"--{key}", "mine.py:make")
    with pytest.raises(ConfigError, match=rf"^{key} names mine\.py:make, which several ranks cannot use yet"):
        check_recipe(recipe)
