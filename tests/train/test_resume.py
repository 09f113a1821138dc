"""A run that is stopped or broken off at any step and resumed ends with the bits of one that ran through."""

from __future__ import annotations

import json
import random

import pytest
import torch
from in_process import Broken, attempt, broken_in_every_step, step_by_step, whole
from same_runs import differences, metrics_table
from tiny_recipes import TOP, prompts, tiny

from tether import cli
from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.store import checkpoints
from tether.store.folder import RunFolder, is_run, run_path
from tether.store.read import find_run, open_workspace, read_run
from tether.train.attempt import Attempt
from tether.train.resume import resume_run, start_or_resume, stored_recipe
from tether.train.training import random_numbers, random_tensors, seed_everything, set_random_state

RECORDS = ("sft", "reward", "dpo")
ROLLOUTS = ("ppo", "grpo", "rloo", "reinforce", "trpo")
LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")
STOPPED_ONLY = ("--checkpoint.every", "0")
AT_EACH_STEP = ("--checkpoint.every", "1")


def three_epochs(method: str, workspace, *flags: str):
    """8 records in batches of 3, or 6 prompts in batches of 4: in both, epochs end in the middle of a batch."""
    if method in RECORDS:
        return tiny(method, workspace, "--run.steps", "8", *flags)
    workspace.mkdir(parents=True, exist_ok=True)
    file = str(prompts(workspace.parent))
    asked = ("--task.prompts", file, "--task.held_out", file)
    return tiny(method, workspace, "--run.steps", "5", *asked, "--task.reward", "case_reward:reward", *flags)


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        *((method, ()) for method in RECORDS + ROLLOUTS),
        *((method, TOP) for method in (*RECORDS, "ppo")),
        ("grpo", ("--task.reward", "drawing_reward:reward")),
        ("grpo", ("--grpo.objective", "gspo", "--grpo.epochs", "2", *TOP)),
        ("grpo", ("--grpo.objective", "cispo", "--grpo.epochs", "2", *LORA, "--reward.overlong_buffer", "2")),
        ("reinforce", ("--reinforce.baseline", "moving_average", *LORA)),
        ("reinforce", ("--reinforce.weighting", "n_step", "--reinforce.n_steps", "2", *TOP)),
        ("ppo", ("--ppo.critic_lam", "1.0", "--ppo.lam_alpha", "0.5", *TOP)),
        ("ppo", ("--ppo.n_steps", "2", *LORA)),
        ("ppo", (*LORA, "--roles.critic", "head", "--kl.controller", "proportional", "--ppo.objective", "kl_penalty")),
    ],
)
def test_a_run_that_is_stopped_after_every_step_ends_with_the_same_bits(tmp_path, method, flags):
    calm = whole(three_epochs(method, tmp_path / "calm", *flags))
    stopped = step_by_step(three_epochs(method, tmp_path / "stopped", *flags, *STOPPED_ONLY))
    assert differences(calm, stopped) == []


@pytest.mark.parametrize(
    ("method", "words", "flags"),
    [
        ("sft", "step", AT_EACH_STEP),
        ("ppo", "update", AT_EACH_STEP),
        ("grpo", "scores", (*AT_EACH_STEP, "--task.reward", "drawing_reward:reward")),
    ],
)
def test_a_run_that_is_broken_off_within_every_step_ends_with_the_same_bits(
    tmp_path, monkeypatch, method, words, flags
):
    calm = whole(three_epochs(method, tmp_path / "calm", *flags))
    broken = broken_in_every_step(three_epochs(method, tmp_path / "broken", *flags), monkeypatch, words)
    assert differences(calm, broken) == []


def test_steps_that_are_done_again_leave_one_trace_each(tmp_path):
    recipe = three_epochs("sft", tmp_path / "runs", "--checkpoint.every", "3")

    def break_off(step, metrics):
        if step == 4:
            raise Broken

    with pytest.raises(Broken):
        attempt(recipe, advance=break_off)
    assert attempt(recipe, stop_after=0).steps == 3
    with open_workspace(tmp_path / "runs") as opened:
        run, events = find_run(opened, "run"), read_run(opened, "run").events
    assert run.steps_done == 3  # what was recorded of steps 3 and 4 is forgotten until they are done again
    assert [event.kind for event in events] == ["failed", "resumed", "stopped"]


def test_a_run_whose_first_checkpoint_is_not_there_yet_starts_over(tmp_path):
    calm = whole(three_epochs("sft", tmp_path / "calm"))
    recipe = three_epochs("sft", tmp_path / "broken", *STOPPED_ONLY)

    def break_off(step, metrics):
        if step == 4:
            raise Broken

    with pytest.raises(Broken):
        attempt(recipe, advance=break_off)
    assert checkpoints.listed(RunFolder(run_path(recipe)).checkpoints) == []
    assert differences(calm, whole(recipe)) == []


def test_a_damaged_checkpoint_is_told_and_the_one_before_leads_to_the_same_bits(tmp_path):
    calm = whole(three_epochs("sft", tmp_path / "calm"))
    recipe = three_epochs("sft", tmp_path / "damaged", "--checkpoint.every", "2", "--checkpoint.keep", "3")
    attempt(recipe, stop_after=5)
    folder = RunFolder(run_path(recipe)).checkpoints
    assert [step for step, _ in checkpoints.listed(folder)] == [2, 4, 5]
    (folder / "step-00000005" / "state.json").write_bytes(b"")
    (folder / "step-00000004" / "manifest.json").unlink()
    told: list[str] = []
    taken: list[int] = []
    attempt(recipe, notify=told.append, advance=lambda step, metrics: taken.append(step))
    assert taken == [2, 3, 4, 5, 6, 7]
    assert [text for text in told if "skipping a damaged" in text] and "step-00000005/state.json" in told[0]
    assert differences(calm, run_path(recipe)) == []
    with open_workspace(tmp_path / "damaged") as opened:
        events = read_run(opened, "run").events
    assert sum("skipping a damaged" in event.text for event in events) == 2


def test_a_run_that_was_killed_at_its_very_end_still_gets_its_model_and_report(tmp_path, monkeypatch):
    calm = whole(three_epochs("reward", tmp_path / "calm"))
    recipe = three_epochs("reward", tmp_path / "broken")

    def break_off(self, steps):
        raise Broken

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "finish", break_off)
        with pytest.raises(Broken):
            attempt(recipe)
    assert not RunFolder(run_path(recipe)).is_finished
    assert differences(calm, whole(recipe)) == []


def test_a_finished_run_is_left_alone(tmp_path):
    recipe = three_epochs("sft", tmp_path / "runs")
    before = metrics_table(whole(recipe))
    taken: list[int] = []
    assert attempt(recipe, advance=lambda step, metrics: taken.append(step)).steps == 8
    assert taken == []
    assert metrics_table(run_path(recipe)) == before


def test_random_numbers_that_a_reward_draws_go_on_where_they_were(tmp_path):
    seed_everything(3)
    tensors, numbers = random_tensors(), json.loads(json.dumps(random_numbers()))
    import numpy

    def draw():
        return float(torch.rand(())), random.random(), random.gauss(0, 1), float(numpy.random.rand())

    first = [draw(), draw()]
    set_random_state(tensors, numbers)
    assert [draw(), draw()] == first


def test_resuming_with_other_weights_or_records_is_refused_by_name(tmp_path):
    whole(three_epochs("sft", tmp_path / "first"))
    model = tmp_path / "first" / "run" / "model"
    recipe = three_epochs("sft", tmp_path / "runs", "--model.path", str(model))
    attempt(recipe, stop_after=3)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ConfigError, match=r"model.* changed since the run .*runs/run began"):
        attempt(recipe)
    (model / "model.safetensors").write_bytes(weights)
    records = tmp_path / "demonstrations.jsonl"
    content = records.read_text()
    records.write_text(content.replace("red", "rot"))
    with pytest.raises(ConfigError, match=r"data.*changed since the run") as refused:
        attempt(recipe)
    command = str(refused.value).rpartition(": tether ")[2].split()
    assert command == ["fork", str(tmp_path / "runs" / "run")]
    assert cli.main([*command, "--json"]) == 0, "the command that is offered works"
    assert RunFolder(tmp_path / "runs" / "run-fork-3").is_finished
    records.write_text(content)
    assert attempt(recipe).steps == 8


def test_resume_auto_begins_goes_on_and_refuses_another_recipe(tmp_path, monkeypatch, capsys):
    recipe = three_epochs("sft", tmp_path / "runs")
    assert not is_run(run_path(recipe))
    monkeypatch.setattr(Attempt, "finish", lambda self: self.stop())
    assert start_or_resume(recipe, json_output=True) == 0
    monkeypatch.undo()
    changed = load_recipe("sft", None, _as_flags(recipe, "--sft.batch_size", "4", "--optimizer.policy_lr", "1e-3"))
    with pytest.raises(ConfigError, match=r"optimizer.policy_lr, sft.batch_size differ.*tether fork"):
        start_or_resume(changed, json_output=True)
    capsys.readouterr()
    assert start_or_resume(recipe, json_output=True) == 0
    assert capsys.readouterr().out == ""  # every step was taken before
    assert (run_path(recipe) / "model" / "config.json").is_file()
    with pytest.raises(ConfigError, match=r"needs run.name"):
        start_or_resume(
            recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": None})}), json_output=True
        )


def _as_flags(recipe, *more: str) -> list[str]:
    data, run = recipe.data, recipe.run
    own = ["--data.train", data.train, "--data.held_out", data.held_out, "--run.directory", run.directory]
    own += ["--run.name", run.name, "--run.steps", str(run.steps), "--model.device", "cpu"]
    own += ["--optimizer.critic_lr", "3e-3", "--optimizer.schedule", "cosine", "--optimizer.warmup", "0.2"]
    return [*own, *more]


def test_a_run_is_found_by_its_name_its_path_and_after_it_was_moved(tmp_path):
    calm = whole(three_epochs("sft", tmp_path / "calm"))
    recipe = three_epochs("sft", tmp_path / "runs")
    attempt(recipe, stop_after=3)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert stored_recipe(tmp_path / "elsewhere" / "run").run.directory == str(tmp_path / "elsewhere")
    assert resume_run("run", str(tmp_path / "elsewhere"), json_output=True) == 0
    assert differences(calm, tmp_path / "elsewhere" / "run") == []
    with pytest.raises(ConfigError, match="there is no run at nothing"):
        resume_run("nothing", str(tmp_path), json_output=True)
