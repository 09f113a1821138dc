"""Runs of `tether control`: the same bits again, resuming, stopping, the saved policy, and errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tether.cli import main
from tether.config.control_recipe import ControlRecipe
from tether.config.load import load_settings
from tether.control.run import stored_control, train_control
from tether.control.saved import SavedPolicy
from tether.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium", reason="the extra `control` is not installed")

SMALL = ["--environment.count=2", "--rollout.steps=40", "--ppo.epochs=2", "--run.environment_steps=480"]


def recipe(folder: Path, name: str, *flags: str, environment: str = "Pendulum-v1") -> ControlRecipe:
    place = [f"--run.directory={folder}", f"--run.name={name}", f"--environment.id={environment}"]
    return load_settings(ControlRecipe, None, [*place, *SMALL, *flags])


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model/policy.safetensors").items()}


def metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    steps = {}
    for line in lines:
        text = json.dumps(line)
        if '"metrics"' in text:
            data = next(value for value in line.values() if isinstance(value, dict) and "metrics" in value)
            steps[data["step"]] = {k: v for k, v in data["metrics"].items() if "second" not in k}
    return [steps[step] for step in sorted(steps)]


@pytest.mark.parametrize("environment", ["Pendulum-v1", "CartPole-v1", "Hopper-v5"])
def test_a_run_resumes_to_the_same_bits(environment: str, tmp_path: Path):
    """It stops twice, in the middle of episodes."""
    if environment == "Hopper-v5":
        pytest.importorskip("mujoco", reason="the extra `control` is not installed")
    whole, _ = train_control(recipe(tmp_path, "whole", environment=environment))
    taken: list[int] = []
    for resume in (False, True, True):
        asked = iter([False, False, True] + [False] * 9)
        told: list[str] = []
        started = recipe(tmp_path, "cut", environment=environment) if not resume else stored_control(tmp_path / "cut")
        cut, done = train_control(started, stop=lambda asked=asked: next(asked), notify=told.append, resume=resume)
        taken.append(done)
        assert not told
    assert taken == [2, 4, 6] and cut.is_finished
    assert weights(whole.path) == weights(cut.path)
    assert metrics(whole.path) == metrics(cut.path) and len(metrics(cut.path)) == 6


def test_an_environment_that_cannot_be_replayed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = iter([False, True])
    train_control(recipe(tmp_path, "cut"), stop=lambda: next(asked))
    from gymnasium.envs.classic_control.pendulum import PendulumEnv

    right = PendulumEnv.step
    monkeypatch.setattr(PendulumEnv, "step", lambda self, action: right(self, action * 0.5))
    told: list[str] = []
    folder, _ = train_control(stored_control(tmp_path / "cut"), notify=told.append, resume=True)
    assert folder.is_finished
    assert len(told) == 2 and all("when the episode in progress was replayed" in text for text in told)


def test_the_saved_policy_acts(tmp_path: Path):
    folder, _ = train_control(recipe(tmp_path, "whole"))
    policy, environment = SavedPolicy(folder.path), gymnasium.make("Pendulum-v1")
    observation, _ = environment.reset(seed=0)
    action = policy(observation)
    assert environment.action_space.contains(action)
    environment.step(action)
    np.testing.assert_array_equal(action, policy(observation))


def test_the_command_and_what_reads_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "runs" / "one"
    flags = [*SMALL, f"--run.directory={tmp_path / 'runs'}", "--run.name=one"]
    assert main(["control", "CartPole-v1", *flags, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == list(range(6)) and rows[-1]["environment_steps"] == 480
    assert main(["resume", str(folder)]) == 0  # it is finished
    for words in (["runs", "--workspace", str(tmp_path / "runs")], ["show", str(folder)], ["doctor", str(folder)]):
        assert main(words) == 0
        assert "control" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0
    assert "tether chat" not in (folder / "report.md").read_text()
    assert main(["fork", str(folder)]) == 2
    assert "a run of `tether control`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["Hoper-v5"], "did you mean Hopper-v5"),
        (["CartPole-v9"], "did you mean CartPole-v1"),
        (["zzzz"], "lists all"),
        (["module:Env-v0"], "whose code would run"),
        (["Blackjack-v1"], "observations of type Tuple: supported are Box and Discrete spaces"),
        (["CartPole-v1", "--environment.kwargs", "{foo: 1}"], "environment.kwargs"),
        (["FrozenLake-v1", "--environment.kwargs", "{map_name: 5x5}"], "does not take them (KeyError: '5x5')"),
        (["FrozenLake-v1", "--environment.kwargs", "{desc: 3}"], "environment.kwargs: FrozenLake-v1"),
        (["Pendulum-v1", "--network.log_std", "1000"], "network.log_std"),
        (["--environment.id="], "environment.id"),
        (["CartPole-v1", "--ppo.clip_rnge", "3"], "did you mean --ppo.clip_range?"),
        ([], "needs an environment first"),
    ],
)
def test_errors_name_the_repair(words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["control", *words, *([f"--run.directory={tmp_path}"] if words else [])]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_suggestion_is_another_environment(capsys: pytest.CaptureFixture[str]):
    """It is registered, and needs a package that cannot be imported."""
    assert main(["control", "GymV26Environment-v0"]) == 2
    assert "GymV26Environment-v0 or" not in capsys.readouterr().err.partition("did you mean")[2]


@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_failing_environment_is_named(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from gymnasium.envs.classic_control.pendulum import PendulumEnv

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the motor is hot")

    monkeypatch.setattr(PendulumEnv, call, fail)
    assert main(["control", "Pendulum-v1", *SMALL, f"--run.directory={tmp_path}"]) == 5
    told = capsys.readouterr().err
    assert f"the environment Pendulum-v1 failed in its {call} (RuntimeError: the motor is hot)" in told
    assert "Traceback" not in told


def test_networks_without_hidden_layers_train(tmp_path: Path):
    folder, _ = train_control(recipe(tmp_path, "linear", "--network.hidden=[]", "--run.environment_steps=80"))
    assert folder.is_finished and SavedPolicy(folder.path).policy.layers[0][0].shape == (3, 1)


def test_commands_for_language_models_name_a_control_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, _ = train_control(recipe(tmp_path / "runs", "one", "--run.environment_steps=80"))
    for words in (["chat", str(folder.path)], ["chat", str(folder.model_path)], ["serve", str(folder.path)]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "is of `tether control`" in told and "tether export" not in told
    assert main(["replay", str(folder.path)]) == 2
    assert "a run of `tether control` has no language model" in capsys.readouterr().err


def test_export_describes_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, _ = train_control(recipe(tmp_path / "runs", "one", "--run.environment_steps=80"))
    assert main(["export", str(folder.path), "--model", str(tmp_path / "copy")]) == 0
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "pipeline_tag: reinforcement-learning" in card and "transformers" not in card
    assert "A policy for gymnasium's environment `Pendulum-v1`, trained with Proximal Policy Optimization" in card
    assert "| `network.activation` | tanh |" in card and "| `ppo.epochs` | 2 |" in card and "model.dtype" not in card
    assert SavedPolicy(tmp_path / "copy").environment.id == "Pendulum-v1"
    capsys.readouterr()
    assert main(["export", str(folder.path), "--rollouts", str(tmp_path / "r.jsonl")]) == 2
    assert "no answers of one were kept" in capsys.readouterr().err and not (tmp_path / "r.jsonl").exists()
    for words in (["--gguf", str(tmp_path / "x.gguf")], ["--merge", "--model", str(tmp_path / "merged")]):
        assert main(["export", str(folder.path), *words]) == 2
        assert "--model DIR exports its policy" in capsys.readouterr().err


def test_a_finished_run_whose_folder_was_renamed_is_found_after_resuming(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, _ = train_control(recipe(tmp_path / "runs", "one", "--run.environment_steps=80"))
    moved = folder.path.rename(tmp_path / "runs" / "two")
    assert main(["show", str(moved)]) == 2
    assert main(["resume", str(moved)]) == 0
    assert "was recorded as one and continues as two" in capsys.readouterr().err
    assert main(["show", str(moved)]) == 0


def test_unsupported_spaces_are_named():
    from tether.control.spaces import actions_of, observations_of

    spaces = gymnasium.spaces
    with pytest.raises(ConfigError, match="type MultiBinary"):
        actions_of(spaces.MultiBinary(3), "X-v0")
    with pytest.raises(ConfigError, match="type Dict"):
        observations_of(spaces.Dict(a=spaces.Discrete(2)), "X-v0")
    with pytest.raises(ConfigError, match="convolutional"):
        observations_of(spaces.Box(0, 255, (84, 84, 3), np.uint8), "X-v0")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    import sys

    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert main(["control", "CartPole-v1"]) == 2
    assert "pip install 'tether-rl[control]'" in capsys.readouterr().err
