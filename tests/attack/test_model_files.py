"""Models that lead out of their folder, bring code or pickles, or are not what was fetched."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tether.errors import ConfigError, DataError
from tether.hub.catalog import DIGESTS, check_digests, note_digests
from tether.hub.folder_check import check_folder, check_hub_copy
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.load import load_causal_lm
from tether.models.lora import load_lora
from tether.models.scalar_models import load_reward_model
from tether.models.tokenizer import load_tokenizer, read_tokenizer
from tether.plan.workload import read_config

LOADERS: dict[str, Callable[[Path], object]] = {
    "model": lambda folder: load_causal_lm(str(folder), dtype="float32", device="cpu", seed=0),
    "tokenizer": lambda folder: read_tokenizer(str(folder)),
    "plan": lambda folder: read_config(str(folder)),
    "reward model": lambda folder: load_reward_model(folder, "float32", "cpu"),
    "reward tokenizer": load_tokenizer,
    "adapters": lambda folder: load_lora(torch.nn.Linear(1, 1), folder),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny_model(0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model's folder, and beside it a file of weights and a pickle that leaves a mark."""
    copy = tmp_path / "model"
    shutil.copytree(saved, copy)
    shutil.copy(saved / "model.safetensors", tmp_path / "outside.safetensors")
    write_pickle(tmp_path / "outside.bin", tmp_path / "was-run")
    return copy


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


def write_pickle(path: Path, mark: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:  # as torch.save writes it
        archive.writestr("archive/data.pkl", pickle.dumps(Touch(mark)))
        archive.writestr("archive/version", "3")


def change(file: Path, **values: object) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


SHARDS = [
    "../outside.bin",
    "../outside.safetensors",
    "/etc/passwd",
    "weights.bin",
    "..",
    ".",
    "",
    "inner/../../outside.bin",
]
SHARDS += [
    "inner/weights.safetensors",
    "..\\outside.safetensors",
    "http://example.org/x.safetensors",
    "a\0.safetensors",
]
SHARDS += ["/tmp/x.safetensors", "~/x.safetensors", "weights.pt", "model.safetensors.pkl", "file:///x.safetensors"]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("kind", ["model", "plan", "tokenizer"])
def test_a_shard_is_a_safetensors_file_of_the_folder(shard: str, kind: str, folder: Path, tmp_path: Path):
    (folder / "model.safetensors").unlink()
    write_pickle(folder / "weights.bin", tmp_path / "was-run")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"is not loaded: model\.safetensors\.index\.json names the shard"):
        LOADERS[kind](folder)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{", "[" * 100_000, "\xff"]
)
def test_an_index_that_makes_no_sense_is_refused(content: str, folder: Path):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="is not loaded"):
        LOADERS["model"](folder)


def test_shards_in_the_folder_are_read(folder: Path, tmp_path: Path):
    model = tiny_model(0)
    shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    LOADERS["model"](folder)


LINKED = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "x/y"]
TARGETS = ["../outside.safetensors", "/etc/passwd", "/dev/zero", "../nowhere", "SELF", "/"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LINKED)
def test_no_link_leaves_the_folder(name: str, target: str, folder: Path):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(file if target == "SELF" else target)
    with pytest.raises(ConfigError):
        LOADERS["model"](folder)
    with pytest.raises(ConfigError, match="is a link to a place outside of it"):
        check_folder(folder)


def test_links_within_the_folder_and_to_a_hubs_blobs_are_followed(folder: Path, tmp_path: Path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    LOADERS["model"](snapshot)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"transformers_weights": "../outside.safetensors"}),
        ("config.json", {"attn_implementation": "someone/kernel"}),
        ("config.json", {"_attn_implementation": "someone/kernel:function"}),
        ("config.json", {"text_config": {"attn_implementation": "someone/kernel"}}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.0/../../outside.json"]}),
        ("tokenizer_config.json", {"vocab_file": "../outside.bin"}),
        ("tokenizer_config.json", {"tokenizer_file": "/etc/passwd"}),
        ("tokenizer_config.json", {"merges_file": "inner/../../outside.bin"}),
    ],
)
def test_no_name_in_a_configuration_leaves_the_folder(kind: str, file: str, values: dict, folder: Path):
    change(folder / file, **values)
    if kind == "adapters":
        change(folder / "adapter_config.json", r=1)
    with pytest.raises(ConfigError, match="is not loaded"):
        LOADERS[kind](folder)


@pytest.mark.parametrize("kind", ["model", "tokenizer", "plan", "reward model", "reward tokenizer"])
@pytest.mark.parametrize("known", [True, False])
def test_code_that_comes_with_a_model_never_runs(kind: str, known: bool, folder: Path, tmp_path: Path, monkeypatch):
    mark = tmp_path / "was-run"
    hostile = f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"
    for name in ("configuration_x", "modeling_x", "tokenization_x"):
        (folder / f"{name}.py").write_text(hostile + "class X: ...\n")
    both = {"AutoConfig": "configuration_x.X", "AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}
    both |= dict.fromkeys(("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModel"), "modeling_x.X")
    change(folder / "config.json", auto_map=both, **({} if known else {"model_type": "never_heard_of"}))
    change(folder / "tokenizer_config.json", auto_map=both)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # who would say yes to transformers
    with contextlib.suppress(ConfigError):
        LOADERS[kind](folder)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.pt", "tf_model.h5", "model.ckpt"])
def test_pickles_beside_or_in_place_of_weights_are_not_read(name: str, folder: Path, tmp_path: Path):
    write_pickle(folder / name, tmp_path / "was-run")
    LOADERS["model"](folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError):
        LOADERS["model"](folder)
    assert not (tmp_path / "was-run").exists()


def test_adapters_are_safetensors_of_their_folder(tmp_path: Path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (folder / "adapter_model.safetensors").symlink_to("../outside.safetensors")
    with pytest.raises(ConfigError, match="outside of it"):
        LOADERS["adapters"](folder)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "tokenizer_config.json"])
def test_a_named_pipe_is_not_waited_for(name: str, folder: Path):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError):
        LOADERS["model"](folder)
    with pytest.raises(ConfigError):
        check_folder(folder)


def test_what_a_hub_gave_is_looked_through_too(folder: Path, tmp_path: Path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "1"
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    index = {"metadata": {}, "weight_map": {"a": "../../../outside.bin"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache("a/b", "config.json", cache_dir=tmp_path / "hub")
    assert isinstance(found, str)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: found)
    with pytest.raises(ConfigError, match="names the shard"):
        check_hub_copy("a/b")


# -- the cache ----------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda folder: flip(folder / "model.safetensors"),
    "a bit of the config": lambda folder: flip(folder / "config.json"),
    "a bit of the tokenizer": lambda folder: flip(folder / "tokenizer.json"),
    "weights cut short": lambda folder: os.truncate(folder / "model.safetensors", 100),
    "adapters added": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "an index added": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
    "code added": lambda folder: (folder / "modeling.py").write_text(""),
    "a file in a folder added": lambda folder: ((folder / "x").mkdir(), (folder / "x" / "y").touch()),
    "the tokenizer removed": lambda folder: (folder / "tokenizer.json").unlink(),
    "weights linked": lambda folder: (
        (folder / "model.safetensors").rename(folder.parent / "w"),
        (folder / "model.safetensors").symlink_to("../outside.safetensors"),
        flip(folder.parent / "outside.safetensors"),
    ),
    "the list cut short": lambda folder: os.truncate(folder / DIGESTS, 10),
    "the list emptied": lambda folder: (folder / DIGESTS).write_text("{}"),
    "the list of another shape": lambda folder: (folder / DIGESTS).write_text('{"config.json": 1}'),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_cached_model_that_was_changed_is_not_loaded(kind: str, folder: Path):
    note_digests(folder)
    check_digests(folder, "tiny")
    CHANGES[kind](folder)
    with pytest.raises(DataError, match="tether models pull tiny --force"):
        check_digests(folder, "tiny")


def test_a_file_that_was_only_touched_is_looked_at_once(folder: Path, monkeypatch):
    note_digests(folder)
    (folder / "model.safetensors").touch()
    check_digests(folder, "tiny")
    monkeypatch.setattr("tether.hub.catalog._sha256", lambda _: "never asked")
    check_digests(folder, "tiny")
