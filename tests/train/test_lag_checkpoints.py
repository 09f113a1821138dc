"""A run with a lag that is stopped, broken off, resumed or forked: what was asked for is in its checkpoints."""

from __future__ import annotations

import json

import pytest
from in_process import Broken, attempt, broken_in_every_step, step_by_step, whole
from same_runs import differences, metrics_table, rollouts_table
from tiny_recipes import TOP, tiny

from tether.cli import main
from tether.errors import ConfigError
from tether.rollout.native import NativeEngine
from tether.store import checkpoints
from tether.store.folder import RunFolder, run_path
from tether.store.read import open_workspace, read_run
from tether.train.attempt import Attempt
from tether.train.replay import replay_step
from tether.train.resume import fork_run, start_or_resume, stored_recipe

STEPS = ("--run.steps", "5")
AT_EACH_STEP = ("--checkpoint.every", "1", "--checkpoint.keep", "9")
THREADED = ("--rollout.engine", "threaded_engine:ThreadedEngine")
CAPPED = ("--rollout.importance_sampling_cap", "2")
HEAD = ("--roles.critic", "head", "--ppo.critic_warmup", "2", "--distributed.rollout_chunk", "1")
STOPPED = [
    ("ppo", "1", ()),
    ("ppo", "2", THREADED),
    ("ppo", "4", (*CAPPED, *HEAD)),
    ("ppo", "2", TOP),
    ("grpo", "1", (*THREADED, *CAPPED)),
]


def lagging(method: str, workspace, lag: str, *flags: str):
    return tiny(method, workspace, *STEPS, "--rollout.lag", lag, *flags)


def versions(run, name: str | None = None) -> list[list[int]]:
    """For each recorded step, the policy versions of its answers."""
    with open_workspace(run.parent) as opened:
        recorded = read_run(opened, name or run.name)
        kept = [(step, recorded.rollouts(step)) for step in recorded.rollout_steps]
        return [sorted({step - rollout.staleness for rollout in rollouts}) for step, rollouts in kept]


@pytest.mark.parametrize(("method", "lag", "flags"), STOPPED)
def test_a_run_that_is_stopped_after_every_step_ends_with_the_same_bits(tmp_path, method, lag, flags):
    calm = whole(lagging(method, tmp_path / "calm", lag, *flags))
    stopped = step_by_step(lagging(method, tmp_path / "stopped", lag, *flags, "--checkpoint.every", "0"))
    assert differences(calm, stopped) == []
    assert versions(calm) == [[max(0, step - int(lag))] for step in range(5)]


@pytest.mark.parametrize(("lag", "words"), [("1", "update"), ("2", "rollout"), ("4", "scores")])
def test_a_run_that_is_broken_off_within_every_step_ends_with_the_same_bits(tmp_path, monkeypatch, lag, words):
    calm = whole(lagging("ppo", tmp_path / "calm", lag, *THREADED))
    recipe = lagging("ppo", tmp_path / "broken", lag, *THREADED, "--checkpoint.every", "1")
    assert differences(calm, broken_in_every_step(recipe, monkeypatch, words)) == []


def test_a_run_that_is_broken_off_far_from_its_checkpoint_samples_again_what_it_had_asked_for(tmp_path):
    calm = whole(lagging("ppo", tmp_path / "calm", "2"))
    recipe = lagging("ppo", tmp_path / "broken", "2", "--checkpoint.every", "2")

    def break_off(step, metrics):
        if step == 3:
            raise Broken

    with pytest.raises(Broken):
        attempt(recipe, advance=break_off)
    assert differences(calm, whole(recipe)) == []


def test_a_resumed_run_does_not_sample_what_its_checkpoint_holds(tmp_path, monkeypatch):
    recipe = lagging("ppo", tmp_path / "runs", "2", "--evaluation.every", "0")
    attempt(recipe, stop_after=1)
    (saved,) = checkpoints.listed(RunFolder(run_path(recipe)).checkpoints)
    held = checkpoints.read(saved[1])
    assert {step: asked["version"] for step, asked in held.values["rollouts"]["asked"].items()} == {"1": 0, "2": 0}
    assert {name.partition("/")[0] for name in held.tensors["rollouts"]} == {"1", "2"}
    sampled: list[int] = []
    generate = NativeEngine.generate

    def counted(self, *args, **words):
        sampled.append(self.policy_version)
        return generate(self, *args, **words)

    monkeypatch.setattr(NativeEngine, "generate", counted)
    attempt(recipe)
    assert sampled == [1, 2]  # steps 3 and 4; nothing beyond the last
    last = checkpoints.read_newest(RunFolder(run_path(recipe)).checkpoints, print)
    assert last is not None and "rollouts" not in last.values


def test_a_checkpoint_waits_for_what_is_still_being_sampled(tmp_path):
    """Ctrl-C between two steps: what a thread samples at that moment is in the checkpoint."""
    calm = whole(lagging("ppo", tmp_path / "calm", "4", *THREADED))
    recipe = lagging("ppo", tmp_path / "runs", "4", *THREADED)
    attempt(recipe, stop_after=1)
    newest = checkpoints.read_newest(RunFolder(run_path(recipe)).checkpoints, print)
    assert newest is not None and sorted(newest.values["rollouts"]["asked"]) == ["1", "2", "3", "4"]
    assert differences(calm, whole(recipe)) == []


# -- another lag ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run with lag 2 and a checkpoint after each step. Nothing may be changed in it."""
    return whole(lagging("ppo", tmp_path_factory.mktemp("parent") / "runs", "2", *AT_EACH_STEP))


def fork(parent, name: str, *flags: str):
    """A fork after 2 steps, and the warnings that it recorded."""
    assert fork_run(str(parent), "runs", 2, ("--run.name", name, *flags), json_output=True) == 0
    with open_workspace(parent.parent) as opened:
        events = read_run(opened, name).events
    return parent.parent / name, [event.text for event in events if event.kind == "warning"]


def test_a_fork_with_nothing_changed_has_the_bits_of_its_parent(parent):
    child, warned = fork(parent, "same")
    assert differences(parent, child, since=2) == []
    assert warned == []


def test_a_fork_with_another_objective_takes_what_was_asked_for(parent):
    child, warned = fork(parent, "clip", "--ppo.clip_range", "0.01")
    assert versions(child) == [[0], [1], [2]]  # steps 2 and 3 from the checkpoint
    assert warned == []


@pytest.mark.parametrize(
    ("flags", "expected", "why"),
    [
        (("--rollout.lag", "1"), [[2], [2], [3]], "rollout.lag was 2 and is 1"),
        (("--rollout.lag", "0"), [[2], [3], [4]], "rollout.lag was 2 and is 0"),
        (("--rollout.temperature", "0.9"), [[2], [2], [2]], "the prompts, the seed or the settings of rollout changed"),
        (("--run.seed", "9"), [[2], [2], [2]], "the prompts, the seed or the settings of rollout changed"),
    ],
)
def test_a_fork_that_samples_in_another_way_asks_anew_and_says_so(parent, flags, expected, why):
    child, warned = fork(parent, flags[0].strip("-") + flags[1], *flags)
    assert versions(child) == expected
    (text,) = warned
    assert text == (
        f"The checkpoint holds answers for steps 2 to 3, which are dropped: {why}. Instead step 2 asks for new ones "
        "with its own weights."
    )


def test_a_fork_of_a_run_without_a_lag_begins_one(tmp_path):
    parent = whole(lagging("ppo", tmp_path / "runs", "0", *AT_EACH_STEP))
    child, warned = fork(parent, "later", "--rollout.lag", "1")
    assert versions(child) == [[2], [2], [3]]
    assert warned == []


def test_a_run_is_not_resumed_with_another_lag(tmp_path, monkeypatch, capsys):
    recipe = lagging("ppo", tmp_path / "runs", "1")
    monkeypatch.setattr(Attempt, "finish", lambda self: self.stop())
    assert start_or_resume(recipe, json_output=True) == 0
    monkeypatch.undo()
    changed = lagging("ppo", tmp_path / "runs", "2")
    with pytest.raises(ConfigError, match=r"another recipe \(rollout.lag differ\).*tether fork"):
        start_or_resume(changed, json_output=True)


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_replay_and_stored_rows_say_which_policy_sampled(parent, capsys):
    with open_workspace(parent.parent) as opened:
        run = read_run(opened, parent.name)
        recipe = stored_recipe(parent)
        assert replay_step(run, recipe, recipe, 4).same_advantages
    workspace = ("--workspace", str(parent.parent))
    assert main(["replay", "run", "--step", "4", *workspace]) == 0
    assert "sampled by policy version 2, 2 steps before" in capsys.readouterr().out
    assert main(["replay", "run", "--step", "4", "--json", *workspace]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["policy_version"], shown["staleness"]) == (2, 2)
    assert main(["show", "run", "--step", "4", "--json", *workspace]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert {sample["policy_version"] for sample in samples} == {2}


def test_a_lag_of_nothing_records_what_a_run_without_the_key_records(tmp_path):
    one = whole(lagging("ppo", tmp_path / "one", "0"))
    other = whole(tiny("ppo", tmp_path / "other", *STEPS))
    assert metrics_table(one) == metrics_table(other)
    assert rollouts_table(one) == rollouts_table(other)
    assert not any(name == "staleness" for _, name, _ in metrics_table(one))
