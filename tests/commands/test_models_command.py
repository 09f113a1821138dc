"""`tether models`: what is listed, what is pulled, and that neither listing nor help imports torch."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tether import cli
from tether.hub.catalog import EMBEDDED, CachedModel, model_card, models_folder

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    return tmp_path / "models"


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list:
    """A stand-in for the download, which puts a model of 2 MB into the cache."""
    calls: list = []

    def pull(name, *, progress, force):
        calls.append((name, force))
        for step in (0, 1):
            progress("downloading", step, 1)
        put_in_cache(name)
        return CachedModel(name, models_folder() / name, 2_000_000, "Apache-2.0")

    stand_in = types.ModuleType("tether.hub.catalog")
    stand_in.pull = pull
    monkeypatch.setitem(sys.modules, "tether.hub.catalog", stand_in)
    return calls


def put_in_cache(name: str) -> None:
    folder = models_folder() / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tether-model.json").write_text(json.dumps(model_card(name, EMBEDDED[name])))
    (folder / "model.safetensors").write_bytes(bytes(2_000_000))


def test_an_absent_model_is_shown_as_available(capsys):
    assert cli.main(["models"]) == 0
    shown = capsys.readouterr().out
    assert f"available: tether models pull {NAME}" in shown and "542 MB" in shown and "Apache-2.0" in shown


def test_a_pulled_model_is_shown_with_its_place(capsys, cache: Path):
    put_in_cache(NAME)
    assert cli.main(["models"]) == 0
    shown = capsys.readouterr().out
    assert str(cache / NAME) in shown and "2 MB" in shown and "available" not in shown


def test_listing_as_json(capsys, cache: Path):
    assert cli.main(["models", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["cached"], row["path"]) == (NAME, False, None)
    put_in_cache(NAME)
    assert cli.main(["models", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["cached"], row["path"]) == (True, str(cache / NAME)) and row["size"] > 2_000_000


@pytest.mark.parametrize("force", [False, True])
def test_pull(capsys, pulls: list, cache: Path, force: bool):
    assert cli.main(["models", "pull", NAME, *(["--force"] if force else [])]) == 0
    assert pulls == [(NAME, force)]
    assert capsys.readouterr().out == f"{NAME}  2 MB  {cache / NAME}\n"


def test_pull_as_json(capsys, pulls: list, cache: Path):
    assert cli.main(["models", "pull", NAME, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(cache / NAME)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pull"], "NAME"),
        (["pull", "smollm"], "did you mean smollm2-135m?"),
        (["pul", NAME], "unrecognized arguments: pul"),
        (["--force"], "unrecognized arguments: --force"),
    ],
)
def test_wrong_usage(capsys, words: list[str], message: str):
    assert cli.main(["models", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["models", "--help"], {"torch", "transformers", "numpy", "pydantic", "yaml", "rich"}),
        (["models", "pull", "--help"], {"torch", "transformers", "numpy", "pydantic", "yaml", "rich"}),
        (["models"], {"torch", "transformers", "numpy", "pydantic", "yaml", "rich"}),
    ],
)
def test_what_is_imported(words: list[str], heavy: set[str]):
    command = [sys.executable, "-X", "importtime", "-m", "tether", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "argparse" in names and not names & heavy
