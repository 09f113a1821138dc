"""Names in recipes lead to the user's own code alone; `make attack` tries many more."""

import json
import os
import subprocess
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from tether import cli
from tether.config.allowed_code import SEAL
from tether.config.load import load_recipe
from tether.errors import ConfigError
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.load import load_causal_lm
from tether.rewards import agree, consent
from tether.rewards.resolve import resolve
from tether.store.folder import RunFolder
from tether.store.lineage import git_state


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What hostile code leaves behind; the working folder is the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TETHER_CONFIG", str(tmp_path / "user"))
    marked = tmp_path / "was-run"
    body = f"import pathlib, subprocess; pathlib.Path({str(marked)!r}).touch()\n"
    (tmp_path / "evil.py").write_text(body + "def score(prompt, completion, answer):\n    return 1.0\n")
    return marked


@pytest.mark.parametrize("name", ["subprocess:run", "os:system", "torch:load", "tether.cli:main", "../evil.py:score"])
def test_a_name_outside_the_users_folder_is_refused(name: str, mark: Path):
    with pytest.raises(ConfigError, match=r"task\.reward: "):
        resolve(name, "task.reward")
    assert not mark.exists()


def test_what_a_file_only_imports_is_not_its_own(mark: Path):
    with pytest.raises(ConfigError, match="leads through a module"):
        resolve("evil.py:subprocess.run", "task.reward")


def test_a_plan_runs_no_code(mark: Path, tmp_path: Path, capsys):
    options = json.dumps({"args": f"touch {mark}", "shell": True})
    (tmp_path / "x.yaml").write_text(f"method: ppo\ntask: {{name: 'subprocess:run', options: {options}}}\n")
    assert cli.main(["plan", "x.yaml", "--json"]) == 0
    assert "which is not run here" in capsys.readouterr().out
    (tmp_path / "x.yaml").write_text("method: ppo\ntask: {name: 'evil.py:score'}\n")
    assert cli.main(["plan", "x.yaml"]) == 0
    assert not mark.exists()


def test_a_run_is_its_users_own_by_its_seal(mark: Path, tmp_path: Path):
    recipe = load_recipe("ppo", None, ["--run.name", "x", "--task.reward", "evil.py:score"])
    folder = RunFolder.begin(recipe).path
    agree.agree_to_run(recipe, folder)
    (folder / SEAL).write_text(json.dumps({"folder": str(tmp_path), "seal": "0" * 64}))
    with pytest.raises(ConfigError, match=r"wants to run score of .*evil\.py \(SHA-256 .*--allow-code evil\.py"):
        agree.agree_to_run(recipe, folder)
    with consent.consenting(given=("evil.py",)):
        agree.agree_to_run(recipe, folder)
    assert not mark.exists()


def test_own_code_is_told_of_once_for_each_version(mark: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text("import beside\n\ndef score(prompt, completion):\n    return beside.ONE\n")
    (tmp_path / "beside.py").write_text("ONE = 1.0\n")
    told: list[str] = []
    for _ in range(2):
        with consent.consenting(tell=told.append, agreed=set()):
            assert resolve("mine.py:score", "task.reward")("", "") == 1.0
    assert len(told) == 1 and str(tmp_path / "mine.py") in told[0] and "SHA-256" in told[0]
    (tmp_path / "beside.py").write_text("ONE = 2.0\n")
    with consent.consenting(tell=told.append, agreed=set()):
        resolve("mine.py:score", "task.reward")
    assert len(told) == 2
    assert str(tmp_path) not in sys.path


def test_a_working_folder_hides_no_module(mark: Path, tmp_path: Path):
    for name in ("queue", "yaml", "pydantic", "rich", "org"):
        (tmp_path / f"{name}.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n")
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "tether", "train", "ppo", "--help"], capture_output=True, env=environment, check=False
    )
    assert done.returncode == 0 and not mark.exists(), done.stderr


def test_git_runs_no_program_of_the_folder(mark: Path, tmp_path: Path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    subprocess.run([*git, "config", "core.fsmonitor", f"touch {mark}; false"], check=True)
    assert len(git_state(folder)["git_commit"]) == 40
    assert not mark.exists()


def test_an_index_names_safetensors_of_its_folder(mark: Path, tmp_path: Path):
    folder = tmp_path / "model"
    tiny_model(0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "weights.bin")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "../weights.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names the shard '\.\./weights\.bin'"):
        load_causal_lm(str(folder), dtype="float32", device="cpu", seed=0)


@pytest.mark.parametrize("words", [["--allow-code"], ["--allow-code", "--json"]])
def test_allow_code_needs_a_name(words: list[str], capsys):
    assert cli.main(["models", *words]) == 2
    assert "--allow-code needs the name" in capsys.readouterr().err


def test_a_package_installed_in_editable_mode_is_found_by_its_own_finder(mark: Path, tmp_path: Path, monkeypatch):
    home = tmp_path / "elsewhere" / "my_editable"
    home.mkdir(parents=True)
    (home / "__init__.py").touch()
    (home / "rewards.py").write_text("def score(prompt, completion):\n    return 1.0\n")

    class Finder:  # as pip and setuptools put one into sys.meta_path
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None):
            if name != "my_editable":
                return None
            return spec_from_file_location(name, home / "__init__.py", submodule_search_locations=[str(home)])

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    for name in ("my_editable", "my_editable.rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    project = tmp_path / "project"
    project.mkdir()
    with consent.consenting(folder=project), pytest.raises(ConfigError, match="add --allow-code my_editable"):
        resolve("my_editable.rewards:score", "task.reward")
    with consent.consenting(folder=project, given=("my_editable",)):
        assert resolve("my_editable.rewards:score", "task.reward")("", "") == 1.0
    with consent.consenting(folder=home.parents[1]):
        assert resolve("my_editable.rewards:score", "task.reward")("", "") == 1.0


def test_a_run_gone_on_with_from_another_folder_says_where_it_was_begun(mark: Path, tmp_path: Path):
    recipe = load_recipe("ppo", None, ["--run.name", "x", "--task.reward", "evil.py:score"])
    folder = RunFolder.begin(recipe).path.absolute()
    other = tmp_path / "other"
    other.mkdir()
    told = rf"no file evil\.py in {other}; the run was started in {tmp_path}: run the command from there"
    with consent.consenting(folder=other), pytest.raises(ConfigError, match=told):
        agree.agree_to_run(recipe, folder)
