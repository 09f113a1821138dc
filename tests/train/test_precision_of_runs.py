"""The precision of a run is decided where it begins, and recorded; going on elsewhere keeps it or is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from in_process import attempt, whole
from same_runs import differences
from tiny_recipes import tiny

from tether.cli import main
from tether.commands.options import on_this_device
from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.store.folder import run_path
from tether.store.header import read_header
from tether.train import provenance
from tether.train.resume import fork_run, resume_run, start_or_resume, stored_recipe

STEPS = ("--run.steps", "2", "--checkpoint.every", "1")
LENGTH = "{kind: length, min: 1}"


def rewrite(folder, dtype: str) -> None:
    """Have the run be one that was started in another precision."""
    record = json.loads((folder / "recipe.json").read_text())
    record["model"]["dtype"] = dtype
    begun_with(folder, record)


def begun_with(folder, record) -> None:
    """Have the run be one that was begun with another recipe: `run.json` says so too."""
    header = read_header(folder)
    assert header is not None
    replace(header, recipe=record).write(folder)
    (folder / "recipe.json").write_text(json.dumps(record))


@pytest.mark.parametrize("method", ["sft", "ppo"])
def test_a_run_on_the_cpu_has_the_bits_of_one_in_float32_and_says_so(tmp_path, method):
    asked = tiny(method, tmp_path / "auto", *STEPS)
    assert asked.model.dtype == "auto"
    told: list[str] = []
    attempt(asked, notify=told.append)
    assert not [text for text in told if "dtype" in text]
    aloud = whole(tiny(method, tmp_path / "aloud", *STEPS, "--model.dtype", "float32"))
    assert differences(run_path(asked), aloud) == []
    assert stored_recipe(run_path(asked)).model.dtype == "float32"
    assert json.loads((run_path(asked) / "plan.json").read_text())["predicted"]["model"]["dtype"] == "float32"


def test_resume_auto_goes_on_in_the_precision_that_was_recorded(tmp_path, capsys):
    recipe = tiny("ppo", tmp_path / "runs", *STEPS, f"--reward.parts=[{LENGTH}]")
    attempt(recipe, stop_after=1)
    assert start_or_resume(recipe, json_output=True) == 0  # auto, and float32 on record
    assert json.loads(capsys.readouterr().out)["step"] == 1
    in_half = tiny("ppo", tmp_path / "runs", *STEPS, f"--reward.parts=[{LENGTH}]", "--model.dtype", "bfloat16")
    with pytest.raises(ConfigError, match=r"another recipe \(model.dtype differ\)"):
        start_or_resume(in_half, json_output=True)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ("[{kind: length, min: 2}]", "reward.parts.0.min"),
        ("[{kind: length, min: 1}, {kind: ended}]", "reward.parts.1.kind"),
        ("[]", "reward.parts.0.kind"),
    ],
)
def test_resume_auto_names_what_differs_in_a_list(tmp_path, parts, named):
    recipe = tiny("ppo", tmp_path / "runs", *STEPS, f"--reward.parts=[{LENGTH}]")
    attempt(recipe, stop_after=1)
    with pytest.raises(ConfigError, match=rf"another recipe \(.*{named}"):
        start_or_resume(tiny("ppo", tmp_path / "runs", *STEPS, f"--reward.parts={parts}"), json_output=True)


def test_a_run_that_was_begun_in_bfloat16_is_not_gone_on_with_on_a_cpu(tmp_path, capsys):
    recipe = tiny("sft", tmp_path / "runs", *STEPS)
    attempt(recipe, stop_after=1)
    folder = run_path(recipe)
    rewrite(folder, "bfloat16")
    for go_on in (
        lambda: resume_run(str(folder), "runs", json_output=True),
        lambda: start_or_resume(recipe, json_output=True),
        lambda: fork_run(str(folder), "runs", None, [], json_output=True),
    ):
        with pytest.raises(ConfigError, match=r"was started in bfloat16.* CUDA device, or start a new run"):
            go_on()
    assert main(["export", str(folder), "--checkpoint", "1", "--model", str(tmp_path / "model")]) == 2
    assert "was started in bfloat16" in capsys.readouterr().err
    rewrite(folder, "float32")
    assert resume_run(str(folder), "runs", json_output=True) == 0
    rewrite(folder, "bfloat16")
    assert resume_run(str(folder), "runs", json_output=True) == 0  # it is done: there is nothing to compute


def test_a_run_whose_reward_model_was_in_bfloat16_is_not_gone_on_with_on_a_cpu(tmp_path):
    recipe = tiny("ppo", tmp_path / "runs", *STEPS)
    attempt(recipe, stop_after=1)
    folder = run_path(recipe)
    record = json.loads((folder / "recipe.json").read_text())
    record["reward"]["parts"] = [{"kind": "ended"}, {"kind": "model", "path": "a", "dtype": "bfloat16"}]
    begun_with(folder, record)
    with pytest.raises(ConfigError, match=r"reward model \(reward\.parts\.1\) in bfloat16.* CUDA device"):
        resume_run(str(folder), "runs", json_output=True)


def test_a_fork_in_another_precision_is_refused(tmp_path):
    recipe = tiny("sft", tmp_path / "runs", *STEPS)
    attempt(recipe, stop_after=1)
    folder = run_path(recipe)
    with pytest.raises(ConfigError, match=r"--model\.dtype bfloat16: .* was started in float32"):
        fork_run(str(folder), "runs", None, ["--model.dtype", "bfloat16"], json_output=True)


def test_a_run_that_goes_on_on_another_device_says_in_which_precision(tmp_path, monkeypatch):
    recipe = tiny("sft", tmp_path / "runs", *STEPS)
    describe = provenance.describe_environment
    monkeypatch.setattr(provenance, "describe_environment", lambda **about: describe(**about) | {"device": "cuda:0"})
    attempt(recipe, stop_after=1)
    monkeypatch.undo()
    told: list[str] = []
    attempt(recipe, notify=told.append)
    assert any("device cuda:0 -> cpu" in text for text in told)
    assert "The run was started in float32 and continues in it." in told


def test_a_run_s_reward_model_in_bfloat16_is_measured_with_on_any_device():
    flag = "--reward.parts=[{kind: model, path: a, dtype: %s}, {kind: ended}]"
    in_half, ended = load_recipe("ppo", None, [flag % "bfloat16"]).reward.parts
    assert on_this_device(in_half).dtype == "auto"
    assert on_this_device(ended) is ended
    exact = load_recipe("ppo", None, [flag % "float32"]).reward.parts[0]
    assert on_this_device(exact) is exact


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["sft", "dpo", "ppo"])
def test_on_a_gpu_a_run_is_held_in_bfloat16_and_goes_on_in_it(tmp_path, method):
    recipe = tiny(method, tmp_path / "runs", *STEPS, "--model.device", "cuda")
    told: list[str] = []
    attempt(recipe, stop_after=1, notify=told.append)
    assert any("held in bfloat16 on this device" in text for text in told)
    assert stored_recipe(run_path(recipe)).model.dtype == "bfloat16"
    assert resume_run(str(run_path(recipe)), "runs", json_output=True) == 0
    assert json.loads((run_path(recipe) / "model" / "config.json").read_text())["dtype"] == "bfloat16"
