"""Every key of a recipe that names code is asked about: no command runs a stranger's algorithm, engine or loader."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tether.config import allowed_code
from tether.config.load import load_recipe
from tether.config.recipes import RECIPES
from tether.config.schema import describe
from tether.errors import ConfigError
from tether.rewards import agree
from tether.store.folder import RunFolder

KEYS = {
    "algorithm": "evil.py:algorithm",
    "rollout.engine": "evil.py:engine",
    "store.trackers": "evil.py:Tracker",
    "run.doctor_rules": "evil.py:rule",
    "model.loader": "evil.py:load",
}
HARMLESS = """
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.rollout.native import NativeEngine

def algorithm(ppo):
    return ppo

def engine(policy):
    return NativeEngine(policy)

class Tracker:
    def __init__(self, run): ...
    def record(self, step, metrics): ...
    def close(self): ...

def rule(run):
    return None

def load(path):
    return tiny_model(0), tiny_tokenizer()
"""
SMALL = ["--rollout.prompts_per_step", "2", "--rollout.max_new_tokens", "2", "--ppo.minibatch_size", "2"]


def flags(*keys: str) -> list[str]:
    return [word for key in keys for word in (f"--{key}", KEYS[key])]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that hostile code leaves behind."""
    return tmp_path / "was-run"


@pytest.fixture
def here(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, in which a file has the name that a stranger's run names."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n{HARMLESS}")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TETHER_CONFIG", str(tmp_path / "user"))
    return folder


@pytest.fixture
def command(command, here: Path):
    """Commands are given in that folder."""
    return lambda *words: command(*words, before=lambda: os.chdir(here))


@pytest.mark.parametrize("method", RECIPES)
def test_no_key_that_takes_code_is_left_out_of_the_list(method: str):
    taking = [leaf.key for leaf in describe(RECIPES[method]) if "file.py:name" in leaf.type]
    assert taking and set(taking) <= KEYS.keys()
    given = [word for key in taking for word in (f"--{key}", KEYS[key])]
    given += ["--data.train", "x.jsonl"] if method in ("sft", "reward", "dpo") else []
    named = allowed_code.code_names(load_recipe(method, None, given))
    assert sorted(name.field.partition("[")[0] for name in named) == sorted(taking)


@pytest.mark.parametrize("key", KEYS)
def test_a_strangers_run_is_refused_and_ones_own_is_not(key: str, here: Path, mark: Path):
    recipe = load_recipe("ppo", None, ["--run.name", "given", *flags(key)])
    folder = RunFolder.begin(recipe).path
    agree.agree_to_run(recipe, folder)
    (folder / allowed_code.SEAL).unlink()
    with pytest.raises(ConfigError, match=rf"^{key}.*did not start on this account.*--allow-code evil\.py"):
        agree.agree_to_run(recipe, folder)
    assert not mark.exists()


@pytest.mark.parametrize("key", KEYS)
def test_a_seal_over_other_names_does_not_cover_the_key(key: str, here: Path):
    folder = RunFolder.begin(load_recipe("ppo", None, ["--run.name", "given"])).path
    with pytest.raises(ConfigError, match=r"--allow-code evil\.py"):
        agree.agree_to_run(load_recipe("ppo", None, ["--run.name", "given", *flags(key)]), folder)


@pytest.mark.parametrize("key", KEYS)
def test_a_recipe_from_elsewhere_is_refused(key: str, here: Path, tmp_path: Path, mark: Path, command):
    section, _, name = key.rpartition(".")
    value = [KEYS[key]] if key in ("store.trackers", "run.doctor_rules") else KEYS[key]
    given = {"method": "ppo"} | ({section: {name: value}} if section else {name: value})
    (tmp_path / "given.yaml").write_text(json.dumps(given))
    ended = command("train", "ppo", tmp_path / "given.yaml")
    assert ended.code == 2 and f"{key}" in ended.message and "--allow-code evil.py" in ended.message, ended.err
    assert not mark.exists()


@pytest.mark.parametrize("name", ["os:system", "tether.cli:main", "torch:load", "../outside.py:f", "evil.py:Path"])
@pytest.mark.parametrize("key", KEYS)
def test_a_name_that_is_not_the_users_own_is_refused(key: str, name: str, here: Path, command):
    (here.parent / "outside.py").write_text("def f(x): ...\n")
    (here / "evil.py").write_text("from pathlib import Path\n")
    ended = command("train", "ppo", f"--{key}={name}", "--run.steps", "1", *SMALL)
    assert ended.code == 2 and key in ended.message and not list(here.glob("runs/*")), ended.err


@pytest.mark.parametrize(
    "words", [["eval", "tiny-bytes", "--task", "match-case", "--metric"], ["doctor", "x", "--rule"]]
)
def test_a_word_of_the_command_line_is_held_to_the_same(words: list[str], here: Path, command):
    ended = command(*words, "os:system")
    assert ended.code == 2 and "standard library" in ended.message, ended.err


COMMANDS = {
    "resume": ["resume", "RUN"],
    "fork": ["fork", "RUN", "--run.steps", "9"],
    "eval": ["eval", "RUN", "--max-new-tokens", "1", "--limit", "1"],
    "export a checkpoint": ["export", "RUN", "--checkpoint", "-1", "--model", "out"],
    "export merged": ["export", "RUN", "--merge", "--to", "merged"],
    "show": ["show", "RUN"],
    "report": ["report", "RUN"],
    "doctor": ["doctor", "RUN"],
    "replay": ["replay", "RUN"],
    "plan": ["plan", "RUN/recipe.json"],
    "train its recipe": ["train", "ppo", "RUN/recipe.json", "--run.name", "again"],
    "chat": ["chat", "RUN", "--prompt", "a", "--max-new-tokens", "1"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workspace of a stranger's run that names code in every key."""
    from tether.cli import main

    theirs = tmp_path_factory.mktemp("theirs")
    (theirs / "evil.py").write_text(HARMLESS)
    words = ["train", "ppo", "--run.steps", "1", "--run.name", "given", *flags(*KEYS), *SMALL]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(theirs)
        patch.setenv("TETHER_CONFIG", str(theirs / "user"))
        assert main(words) == 0
    return theirs / "runs"


@pytest.mark.hang_limit(120)
@pytest.mark.parametrize("subcommand", COMMANDS)
def test_no_command_runs_what_a_strangers_run_names(subcommand: str, here: Path, trained: Path, mark: Path, command):
    shutil.copytree(trained, here / "runs")
    (here / "runs" / "given" / "finished.json").unlink()
    ended = command(*(word.replace("RUN", "runs/given") for word in COMMANDS[subcommand]))
    assert not mark.exists(), ended.err
    assert "a bug in Tether" not in ended.err and "there is no run" not in ended.err, ended.err
    if subcommand in ("resume", "fork", "train its recipe", "export a checkpoint"):  # which would have to run it
        assert ended.code == 2 and "--allow-code evil.py" in ended.message, ended.err
