"""Folders of models that name themselves, are no models, or would take all memory and time there is."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tether.hub.tiny_model import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(name: str, **values: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, **values}))

    return write


config = partial(change, "config.json")


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)  # type: ignore[func-returns-value]


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def link(name: str, target: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def header(size: int, content: bytes = b"") -> Callable[[Path], None]:
    return replaced("model.safetensors", struct.pack("<Q", size) + content)


def tensors(**entries: Any) -> Callable[[Path], None]:
    text = json.dumps(entries).encode()
    return header(len(text), text)


BAD: dict[str, Callable[[Path], None]] = {
    "10^7 layers": config(num_hidden_layers=10**7),
    "10^30 layers": config(num_hidden_layers=10**30),
    "0 layers": config(num_hidden_layers=0),
    "-1 layers": config(num_hidden_layers=-1),
    "layers as text": config(num_hidden_layers="2"),
    "layers as float": config(num_hidden_layers=2.5),
    "layers as bool": config(num_hidden_layers=True),
    "hidden as text": config(hidden_size="64"),
    "hidden 0": config(hidden_size=0),
    "hidden huge": config(hidden_size=1 << 40),
    "vocabulary negative": config(vocab_size=-5),
    "vocabulary huge": config(vocab_size=1 << 40),
    "heads 0": config(num_attention_heads=0),
    "heads as text": config(num_attention_heads="four"),
    "heads that do not divide": config(num_attention_heads=7, num_key_value_heads=3),
    "inner negative": config(intermediate_size=-1),
    "positions as text": config(max_position_embeddings="many"),
    "epsilon as text": config(rms_norm_eps="small"),
    "epsilon negative": config(rms_norm_eps=-1.0),
    "epsilon NaN": replaced("config.json", b'{"model_type": "llama", "rms_norm_eps": NaN}'),
    "model type a number": config(model_type=7),
    "model type unknown": config(model_type="no-such-model"),
    "model type a list": config(model_type=["llama"]),
    "activation unknown": config(hidden_act="no-such-activation"),
    "rope as text": config(rope_scaling="x", rope_parameters="x"),
    "config empty": replaced("config.json", b""),
    "config a list": replaced("config.json", b"[1]"),
    "config not JSON": replaced("config.json", b"{"),
    "config not UTF-8": replaced("config.json", b'{"a": "\xff"}'),
    "config deep": replaced("config.json", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "config huge": replaced("config.json", b'{"a": "' + b"x" * 5_000_000 + b'"}'),
    "config a pipe": pipe("config.json"),
    "config a device": link("config.json", "/dev/zero"),
    "config a loop": link("config.json", "config.json"),
    "no config": without("config.json"),
    "tokenizer empty": replaced("tokenizer.json", b""),
    "tokenizer not JSON": replaced("tokenizer.json", b"{]"),
    "tokenizer a list": replaced("tokenizer.json", b"[]"),
    "tokenizer deep": replaced("tokenizer.json", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "tokenizer a pipe": pipe("tokenizer.json"),
    "tokenizer config a pipe": pipe("tokenizer_config.json"),
    "tokenizer config a list": replaced("tokenizer_config.json", b"[1, 2]"),
    "tokenizer config wrong types": replaced("tokenizer_config.json", b'{"eos_token": 5, "tokenizer_class": 7}'),
    "weights empty": replaced("model.safetensors", b""),
    "weights short": replaced("model.safetensors", b"\x01\x02"),
    "weights a pipe": pipe("model.safetensors"),
    "weights a device": link("model.safetensors", "/dev/zero"),
    "weights header huge": header(1 << 60),
    "weights header past the end": header(10_000, b"{}"),
    "weights header not JSON": header(4, b"abcd"),
    "weights header deep": header(20_000, b"[" * 20_000),
    "weights no tensors": tensors(),
    "weights offsets backwards": tensors(a={"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}),
    "weights offsets outside": tensors(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 50]}),
    "weights shape negative": tensors(a={"dtype": "F32", "shape": [-2], "data_offsets": [0, 0]}),
    "weights shape huge": tensors(a={"dtype": "F32", "shape": [1 << 62, 8], "data_offsets": [0, 0]}),
    "weights dtype unknown": tensors(a={"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}),
    "weights of another model": tensors(a={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "no weights": without("model.safetensors"),
}
# What a plan reads is the config alone.
OF_CONFIG = [name for name in BAD if not name.startswith(("weights", "tokenizer", "no weights"))]
SIZES = ["--model.device=cpu", "--run.steps=1", "--run.name=x", "--rollout.max_new_tokens=4"]


@pytest.mark.parametrize("name", BAD)
def test_training_it(name: str, model: Path, command, refusal) -> None:
    BAD[name](model)
    refusal(command("train", "ppo", "--model.path=model", *SIZES), 2)


@pytest.mark.parametrize("name", OF_CONFIG)
def test_planning_for_it(name: str, model: Path, command, refusal, tmp_path: Path) -> None:
    BAD[name](model)
    (tmp_path / "recipe.yaml").write_text("method: ppo\nmodel: {path: model, device: cpu}\n")
    refusal(command("plan", "recipe.yaml"), 2)


@pytest.mark.parametrize("subcommand", ["sample", "chat", "eval", "serve"])
@pytest.mark.parametrize(
    "name", ["10^7 layers", "layers as text", "config a pipe", "tokenizer deep", "weights header huge"]
)
def test_using_it(name: str, subcommand: str, model: Path, command, refusal, tmp_path: Path) -> None:
    BAD[name](model)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    options = {
        "sample": ["prompts.jsonl"],
        "eval": ["--prompts", "prompts.jsonl"],
        "chat": ["--once", "hello"],
        "serve": ["--port", "0"],
    }
    refusal(command(subcommand, "model", *options.get(subcommand, []), "--device", "cpu"), 2, 5)


def adapters(folder: Path, base: object, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **changes}
    (folder / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": base}))
    return folder


ADAPTERS: dict[str, Callable[[Path], Path]] = {
    "of themselves": lambda root: adapters(root / "a", str(root / "a")),
    "of themselves by another name": lambda root: adapters(root / "a", str(root / "a" / ".." / "a")),
    "in a circle": lambda root: [adapters(root / "b", str(root / "a")), adapters(root / "a", str(root / "b"))][1],
    "of nothing": lambda root: adapters(root / "a", None),
    "of a number": lambda root: adapters(root / "a", 7),
    "of a folder that is not there": lambda root: adapters(root / "a", "/nowhere/model"),
    "without weights": lambda root: adapters(root / "a", "tiny-bytes"),
    "of rank 0": lambda root: adapters(root / "a", "tiny-bytes", r=0),
    "of rank text": lambda root: adapters(root / "a", "tiny-bytes", r="4"),
    "of a huge rank": lambda root: adapters(root / "a", "tiny-bytes", r=10**12),
    "of no layers": lambda root: adapters(root / "a", "tiny-bytes", target_modules=[]),
    "of numbers as layers": lambda root: adapters(root / "a", "tiny-bytes", target_modules=[1]),
    "of unknown layers": lambda root: adapters(root / "a", "tiny-bytes", target_modules=["no_such_layer"]),
    "not JSON": lambda root: _broken(root / "a", b"{"),
    "a list": lambda root: _broken(root / "a", b"[]"),
    "deep": lambda root: _broken(root / "a", b'{"a": ' + b"[" * 100_000),
}


def _broken(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(content)
    return folder


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, command, refusal, tmp_path: Path) -> None:
    ADAPTERS[name](tmp_path)
    refusal(command("train", "ppo", "--model.path=a", *SIZES), 2)


@pytest.mark.parametrize("name", ["of themselves", "in a circle", "of a number", "not JSON", "deep"])
@pytest.mark.parametrize("subcommand", ["plan", "sample"])
def test_adapters_elsewhere(name: str, subcommand: str, command, refusal, tmp_path: Path) -> None:
    ADAPTERS[name](tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "recipe.yaml").write_text("method: ppo\nmodel: {path: a, device: cpu}\n")
    words = ["plan", "recipe.yaml"] if subcommand == "plan" else ["sample", "a", "prompts.jsonl"]
    refusal(command(*words), 2)


TEMPLATES = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "many turns": "{% for i in range(10**9) %}x{% endfor %}",
    "long loop": "{% for i in range(1000000000) %}x{% endfor %}",
    "power": "{{ 2 ** 100000000 }}",
    "long text": "{{ 'a' * 100000000000 }}",
    "long text in steps": "{{ 'a' * 100000 * 100000 * 100000 }}",
    "padding": "{{ 'a'|center(100000000000) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "unclosed": "{% for message in messages %}",
    "not a template": "{{ }",
    "raises": "{{ raise_exception('no') }}",
    "unknown name": "{{ nothing.at.all }}",
    "division": "{{ 1 // 0 }}",
    "no such filter": "{{ messages|nosuchfilter }}",
    "escape": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "attribute": "{{ ''.__class__.__init__.__globals__ }}",
    "file": "{% include '/etc/passwd' %}",
    "empty answer": "{# nothing is written #}",
    "wrong type": "{{ messages + 1 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template(name: str, model: Path, command, refusal, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATES[name])
    said = refusal(command("train", "ppo", "--model.path=model", *SIZES), 2, 5, within=10)
    assert "root:" not in said


@pytest.mark.parametrize("subcommand", ["sample", "data"])
@pytest.mark.parametrize("name", ["nested loops", "long text", "recursion", "unclosed"])
def test_a_chat_template_elsewhere(name: str, subcommand: str, model: Path, command, refusal, tmp_path: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATES[name])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    words = ["sample", "model"] if subcommand == "sample" else ["data", "--model", "model"]
    refusal(command(*words, "prompts.jsonl"), 2, 5, within=10)
