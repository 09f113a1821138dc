"""The command line: what is printed, what is imported, and how it ends."""

import errno
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tether import __version__, cli
from tether.commands.train import METHODS
from tether.config import RECIPES
from tether.config.recipes import PPORecipe
from tether.config.schema import describe
from tether.errors import ConfigError, DataError, Diverged, Stopped, StorageError, TetherError, UsageError


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for the training loop; set `.outcome` to what it returns or raises."""
    stand_in = types.SimpleNamespace()
    stand_in.calls = []
    stand_in.outcome = 0

    def run_recipe(recipe, *, json_output):
        stand_in.calls.append((recipe, json_output))
        if isinstance(stand_in.outcome, BaseException):
            raise stand_in.outcome
        return stand_in.outcome

    monkeypatch.setattr("tether.train.resume.run_recipe", run_recipe)
    return stand_in


@pytest.fixture
def conformance(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for the conformance runner."""
    stand_in = types.ModuleType("tether.conformance.runner")
    stand_in.calls = []
    stand_in.main = lambda target, json_output, families: stand_in.calls.append((target, json_output, families)) or 0
    monkeypatch.setitem(sys.modules, "tether.conformance.runner", stand_in)
    return stand_in


# -- help


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tether {__version__}\n"


def test_top_help_lists_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, subcommand in cli.COMMANDS.items():
        assert f"  {name}" in shown and subcommand.summary in shown


def test_no_verb_at_all_shows_the_help_and_is_wrong_usage(capsys):
    assert cli.main([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_train_help_lists_every_method(capsys):
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {method}" in shown for method in RECIPES)
    assert list(METHODS) == list(RECIPES), "METHODS repeats the names so that help need not import pydantic"


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.parametrize("columns", [None, "80"])
def test_method_help_lists_every_field(capsys, monkeypatch, method: str, columns: str | None):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["train", method, "--help"]) == 0
    words = capsys.readouterr().out.split()
    for leaf in describe(RECIPES[method]):
        assert f"--{leaf.key}" in words
        assert leaf.default_text.split()[0] in words


def test_conformance_help(capsys):
    assert cli.main(["conformance", "--help"]) == 0
    assert "--target" in capsys.readouterr().out


# -- what is imported


def imported_by(*words: str) -> set[str]:
    """Top-level packages that a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "tether", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "tether.cli" in names
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS), ["models", "pull", "--help"]],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(words: list[str]):
    heavy = {"torch", "transformers", "numpy", "pydantic", "yaml", "rich", "sqlalchemy", "fastapi"}
    assert not imported_by(*words) & heavy


def test_method_help_imports_no_torch():
    assert not imported_by("train", "ppo", "--help") & {"torch", "transformers", "numpy"}


def test_a_wrong_key_is_told_before_torch_is_imported():
    script = (
        "import sys; from tether.cli import main; main(['train', 'ppo', '--x', '1']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


# -- train and conformance


def test_train_hands_the_recipe_to_the_loop(loops, tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("ppo: {clip_range: 0.3}")
    assert cli.main(["train", "ppo", str(file), "--ppo.gamma", "0.5", "--json", "--reward.whiten"]) == 0
    [(recipe, json_output)] = loops.calls
    assert isinstance(recipe, PPORecipe) and json_output is True
    assert (recipe.ppo.clip_range, recipe.ppo.gamma, recipe.reward.whiten) == (0.3, 0.5, True)


def test_train_without_a_file_or_flags(loops):
    assert cli.main(["train", "ppo"]) == 0
    assert loops.calls == [(PPORecipe(), False)]


def test_the_exit_code_of_the_loop_is_kept(loops):
    loops.outcome = 3
    assert cli.main(["train", "ppo"]) == 3


def test_conformance_hands_on_its_options(conformance, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert (
        cli.main(["conformance", "--target", "mine:make", "--family", "gae", "kl", "--family", "clip", "--json"]) == 0
    )
    assert conformance.calls == [("mine:make", True, ["gae", "kl", "clip"])]
    assert str(tmp_path) not in sys.path, "a file of the working folder must not hide a module"
    assert cli.main(["conformance"]) == 0
    assert conformance.calls[1] == (None, False, None)


# -- how it ends


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "ppo"], "unknown command trian: did you mean train?"),
        (["--verison"], "unknown option --verison: did you mean --version?"),
        (["zzz"], "unknown command zzz: choose one of train, resume"),
        (["train", "pppo"], "unknown method pppo: did you mean ppo?"),
        (["train"], "train needs a method first"),
        (["train", "--ppo.gamma", "1"], "train needs a method first"),
        (["train", "ppo", "--ppo.clip-rnage", "0.1"], "unknown flag --ppo.clip_rnage: did you mean --ppo.clip_range?"),
        (["train", "ppo", "nowhere.yaml"], "recipe nowhere.yaml does not exist"),
        (["train", "ppo", "--run.seed", "1", "late.yaml"], "unexpected word late.yaml"),
        (["conformance", "--targt", "x"], "unrecognized arguments: --targt x"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(capsys, words: list[str], said: str):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"tether: {said}") and shown.err.count("\n") == 1


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


class PanicException(BaseException):
    """Named as libraries written in Rust name theirs."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (ConfigError("x"), 2),
        (ValueError("x"), 2),
        (Stopped("x"), 3),
        (KeyboardInterrupt(), 3),
        (Diverged("x"), 4),
        (DataError("x"), 5),
        (StorageError("x"), 6),
        (MemoryError(), 6),
        (OutOfMemoryError("CUDA out of memory.\nTried"), 6),
        (PanicException("no thread pool: Resource temporarily unavailable"), 6),
        (PanicException("an index is out of range"), 5),
        (OSError(errno.ENOSPC, "No space left on device"), 6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
@pytest.mark.parametrize("json_output", [False, True])
def test_exit_codes(capsys, monkeypatch, loops, error: BaseException, code: int, json_output: bool):
    monkeypatch.delenv("TETHER_DEBUG", raising=False)
    loops.outcome = error
    assert cli.main(["train", "ppo", *(["--json"] if json_output else [])]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("tether: ") and shown.err.count("\n") == 1
    if json_output:
        last = json.loads(shown.out.splitlines()[-1])
        assert last == {"error": shown.err.removeprefix("tether: ").strip(), "exit_code": code}
    else:
        assert shown.out == ""


def test_a_bug_shows_its_traceback(capsys, loops):
    loops.outcome = ZeroDivisionError("oh")
    assert cli.main(["train", "ppo", "--json"]) == 1
    shown = capsys.readouterr()
    assert "Traceback" in shown.err and "this is a bug" in shown.err
    assert json.loads(shown.out)["exit_code"] == 1


def test_debug_shows_where_an_expected_error_was_raised(capsys, monkeypatch, loops):
    monkeypatch.setenv("TETHER_DEBUG", "1")
    loops.outcome = Diverged("loss is not finite")
    assert cli.main(["train", "ppo"]) == 4
    assert "Traceback" in capsys.readouterr().err


def test_kinds_of_error():
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, UsageError)
    assert issubclass(DataError, ValueError)
    assert all(issubclass(kind, TetherError) for kind in (UsageError, Stopped, Diverged, DataError, StorageError))


def test_a_reader_that_leaves_early_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m tether train ppo --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == "" and done.returncode == 0
