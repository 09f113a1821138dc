"""Branching off from a run, and crediting its stored answers again: unchanged, both give the bits that were."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from in_process import Broken, attempt, whole
from same_runs import differences, metrics_table
from tiny_recipes import tiny

from tether.cli import main
from tether.config.load import change_settings
from tether.errors import ConfigError, StorageError
from tether.ops.advantages import gae
from tether.store.folder import RunFolder
from tether.store.read import find_run, open_workspace, read_run
from tether.train.attempt import Attempt
from tether.train.replay import replay_step
from tether.train.resume import fork_run, stored_recipe

STEPS = ("--run.steps", "6", "--checkpoint.every", "2", "--checkpoint.keep", "5")


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A PPO run with checkpoints after 2, 4 and 6 steps. Nothing may be changed in it."""
    return whole(tiny("ppo", tmp_path_factory.mktemp("parent") / "runs", *STEPS, name="parent"))


def fork(parent, *flags: str, step: int | None = 2):
    """Fork in the parent's workspace; where the child is."""
    name = flags[flags.index("--run.name") + 1]
    assert fork_run(str(parent), "runs", step, flags, json_output=True) == 0
    return parent.parent / name


# -- fork ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 4])
def test_a_fork_with_nothing_changed_has_the_bits_of_its_parent_from_there_on(parent, capsys, step):
    child = fork(parent, "--run.name", f"same-{step}", step=step)
    assert differences(parent, child, since=step) == []
    printed = [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()]
    assert printed == list(range(step, 6))
    with open_workspace(parent.parent) as opened:
        assert read_run(opened, child.name).metrics[0]["step"] == step
        (origin,) = [source for source in find_run(opened, child.name).lineage if source.role == "fork"]
    assert origin.run == "parent"
    assert origin.source == f"{parent}, step {step}"


@pytest.mark.parametrize("method", ["sft", "reward"])
def test_a_fork_of_a_run_on_records_has_its_parents_bits_too(tmp_path, method):
    parent = whole(tiny(method, tmp_path / "runs", *STEPS, name="parent"))
    assert differences(parent, fork(parent, "--run.name", "child", step=4), since=4) == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--ppo.clip_range", "0.01"),
        ("--optimizer.policy_lr", "1e-4"),
        ("--kl.coef", "0.5", "--kl.controller", "fixed"),
    ],
)
def test_a_fork_with_a_changed_setting_goes_its_own_way_and_leaves_its_parent_alone(parent, flags):
    before = metrics_table(parent)
    child = fork(parent, "--run.name", f"changed-{flags[0].strip('-')}", *flags)
    assert metrics_table(parent) == before
    assert metrics_table(child) != metrics_table(parent, since=2)
    assert stored_recipe(child) != stored_recipe(parent)
    if "--kl.coef" in flags:
        with open_workspace(parent.parent) as opened:
            assert {row["kl_coef"] for row in read_run(opened, child.name).metrics} == {0.5}


def test_a_fork_can_go_further_than_its_parent(parent):
    child = fork(parent, "--run.name", "longer", "--run.steps", "7", step=None)
    assert [row[0] for row in metrics_table(child) if row[1] == "score"] == [6]


def test_a_fork_that_is_broken_off_keeps_its_bits_and_its_origin(parent, monkeypatch):
    heartbeat = Attempt.heartbeat

    def breaking(self, words):
        heartbeat(self, words)
        if words == "update, step 3":
            raise Broken

    with monkeypatch.context() as patched:
        patched.setattr(Attempt, "heartbeat", breaking)
        with pytest.raises(Broken):
            fork(parent, "--run.name", "broken")
    child = parent.parent / "broken"
    attempt(stored_recipe(child))
    assert differences(parent, child, since=2) == []
    with open_workspace(parent.parent) as opened:
        assert [source.run for source in find_run(opened, "broken").lineage if source.role == "fork"] == ["parent"]


def test_a_fork_that_has_no_checkpoint_of_its_own_does_not_start_at_step_0(parent, monkeypatch):
    def break_off(self, checkpoint, unusable=()):
        raise Broken

    with monkeypatch.context() as patched:
        patched.setattr(Attempt, "fork", break_off)
        with pytest.raises(Broken):
            fork(parent, "--run.name", "early")
    child = parent.parent / "early"
    with pytest.raises(StorageError, match=r"began after 2 steps of parent.*fork again"):
        attempt(stored_recipe(child))
    shutil.rmtree(child)
    fork(parent, "--run.name", "early")
    assert differences(parent, child, since=2) == []


def test_what_cannot_be_forked_is_told(parent, tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoints after 2, 4, 6 steps"):
        fork(parent, "--run.name", "nowhere", step=3)
    with pytest.raises(ConfigError, match=r"run.steps is 6.*set it higher"):
        fork(parent, "--run.name", "nothing-left", step=6)
    with pytest.raises(ConfigError, match="already holds a run"):
        fork(parent, "--run.name", "parent")
    with pytest.raises(ValueError, match="clip_rage"):
        fork(parent, "--run.name", "misspelt", "--ppo.clip_rage", "0.1")
    assert not (parent.parent / "misspelt").exists()
    copy = shutil.copytree(parent, tmp_path / "copy")
    shutil.rmtree(RunFolder(copy).checkpoints)
    with pytest.raises(ConfigError, match="no checkpoint to fork from"):
        fork_run(str(copy), "runs", None, [], json_output=True)


# -- replay -------------------------------------------------------------------------------------------------------

ONLY_STORED = ("--run.steps", "3", "--run.save", "false", "--run.doctor_every", "0", "--evaluation.every", "0")
MANY_LENGTHS = ("--rollout.max_new_tokens", "12", "--rollout.stop_token_ids", str([*range(40)]))
REPLAYED = {
    "ppo, whitened": ("ppo",),
    "ppo, cut-off answers bootstrapped": ("ppo", "--ppo.bootstrap_truncated", "true", "--ppo.gamma", "0.97"),
    "ppo, nothing whitened": ("ppo", "--ppo.whiten_advantages", "false", "--kl.estimator", "k3"),
    "ppo, rewards whitened and clipped": ("ppo", "--reward.whiten", "true", "--reward.clip", "0.3"),
    "ppo, answers without an end": ("ppo", "--reward.missing_eos_penalty", "-1", "--ppo.lam", "1"),
    "ppo, truncated sampling": ("ppo", "--rollout.top_p", "0.7", "--rollout.temperature", "0.8"),
    "ppo, answers of many lengths": ("ppo", *MANY_LENGTHS, "--ppo.bootstrap_truncated", "true"),
    "grpo": ("grpo", *MANY_LENGTHS),
    "rloo": ("rloo", "--kl.controller", "proportional"),
    "reinforce with a critic": ("reinforce", "--reinforce.weighting", "advantage"),
    "trpo": ("trpo",),
}


def replayed(run_folder, step: int, *flags: str):
    recipe = stored_recipe(run_folder)
    with open_workspace(run_folder.parent) as opened:
        run = read_run(opened, run_folder.name)
        return replay_step(run, recipe, change_settings(recipe, flags), step)


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_with_nothing_changed_gives_what_was_stored_to_the_bit(tmp_path, name):
    method, *flags = REPLAYED[name]
    run = whole(tiny(method, tmp_path / "runs", *ONLY_STORED, *flags))
    for step in range(3):
        result = replayed(run, step)
        assert result.same_advantages, f"step {step}: {result.largest_difference}"
        assert torch.equal(result.now.rewards, result.stored.rewards)
        assert (result.now.returns is None) == (result.stored.returns is None)
        assert result.now.returns is None or torch.equal(result.now.returns, result.stored.returns)
        assert result.numbers == result.stored_numbers
        assert bool(result.stored.response_mask.any(dim=1).all())


def test_a_replay_with_another_lambda_is_what_gae_says(parent):
    flags = ("--ppo.lam", "0.5", "--ppo.gamma", "0.9", "--ppo.whiten_advantages", "false")
    result = replayed(parent, 3, *flags)
    stored = result.stored
    advantages, returns = gae(stored.rewards, stored.values, stored.response_mask, gamma=0.9, lam=0.5)
    assert torch.equal(result.now.advantages, advantages)
    assert torch.equal(result.now.returns, returns)
    assert not result.same_advantages


def test_a_replay_without_kl_pays_the_score_alone(parent):
    result = replayed(parent, 2, "--kl.coef", "0", "--kl.controller", "fixed")
    mask = result.now.response_mask
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    paid = torch.zeros(mask.shape).scatter(1, last[:, None], result.stored.scores[:, None])
    assert torch.equal(result.now.rewards, paid)


def test_the_verb_prints_both_sides(parent, capsys):
    assert main(["replay", str(parent), "--step", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same_advantages"] is True and told["stored"] == told["replayed"]
    assert main(["replay", str(parent), "--ppo.lam", "0.2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 5 and told["same_advantages"] is False and told["largest_difference"] > 0
    assert main(["replay", str(parent), "--step", "1"]) == 0
    assert "equal to the bit" in capsys.readouterr().out
    assert main(["replay", str(parent), "--step", "77"]) == 2
    assert "were not kept" in capsys.readouterr().err


def test_records_cannot_be_replayed(tmp_path, capsys):
    run = whole(tiny("sft", tmp_path / "runs", "--run.steps", "1"))
    assert main(["replay", str(run)]) == 2
    assert "only rollouts can be replayed" in capsys.readouterr().err


def test_a_replay_with_a_moving_average_takes_the_returns_of_earlier_steps(tmp_path):
    """Its baseline is neither that of the step, which was the batch's mean, nor the one of another decay."""
    flags = ("--reinforce.weighting", "to_go", "--run.steps", "3", "--reward.parts", "[{kind: length, target: 3}]")
    batch = whole(tiny("reinforce", tmp_path / "runs", *flags, "--reinforce.baseline", "batch_mean", name="batch"))
    with open_workspace(batch.parent) as opened:
        returns = [row["mean_return"] for row in read_run(opened, "batch").metrics]
    assert len(set(returns)) == 3
    wanted = ("--reinforce.baseline", "moving_average", "--reinforce.baseline_decay", "0.5")
    for step, average in ((0, 0.0), (1, returns[0]), (2, (0.5 * returns[0] + returns[1]) / 1.5)):
        result = replayed(batch, step, *wanted)
        mask = result.stored.response_mask
        moved = (result.now.advantages - result.stored.advantages)[mask]
        torch.testing.assert_close(moved, torch.full_like(moved, returns[step] - average), atol=1e-6, rtol=0)

    none = whole(tiny("reinforce", tmp_path / "runs", *flags, name="none"))
    with pytest.raises(ConfigError, match="the run recorded none for step 0"):
        replayed(none, 1, *wanted)
