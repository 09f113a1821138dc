"""A fuzz of every parser: files of `corpus/`, changed by a fixed seed, are read or refused, and nothing else.

    corpus/PARSER/FILE   what is changed; the first case of each file is the file as it is

The changes are drawn from the file's name alone, so that a finding is found again. To keep one, put the changed file
into the corpus.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig

from tether.config.load import load_recipe
from tether.data.chat import prompt_token_ids
from tether.data.conversations import demonstration_of, preference_of, prompt_of
from tether.data.records import PLAIN, read_records
from tether.errors import ConfigError, DataError, TetherError
from tether.hub.folder_check import check_model_path
from tether.hub.gguf import open_gguf
from tether.hub.tiny_model import tiny_model, tiny_tokenizer
from tether.models.lora import inject_lora, load_lora
from tether.models.tokenizer import read_tokenizer
from tether.rewards.math_answer import math_correct
from tether.store.database.records import StoreRecord
from tether.studio.import_export import imported, read_lines
from tether.types import Prompt
from tether.user_code import TimeLimitError, time_limit

CORPUS = Path(__file__).parent / "corpus"
FILES = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.rglob("*") if path.is_file())
GROUPS = 4  # cases of a file
NASTY = [
    *(
        b"\x00",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\\ud800",
        b"\x1b[31m",
        b"\r",
        b"\n",
        b"\xef\xbb\xbf",
        b"NaN",
        b"-1",
        b"0",
    ),
    *(b"99999999999999999999", b"1e999", b"null", b"true", b'""', b"[]", b"{}", b"[" * 3000, b"{" * 3000, b"(" * 3000),
    *(b"^" * 500, b"\\frac{" * 300, b"*a", b"&a", b"!!python/object:os.system", b"<<: ", b"- " * 300, b"{{", b"{%"),
]


def read_recipe(path: Path) -> None:
    load_recipe("ppo", str(path))


def read_options(path: Path) -> None:
    load_recipe("ppo", None, path.read_bytes().decode("utf-8", "replace").split("\n")[:-1])


def read_data(path: Path) -> None:
    for index, record in enumerate(read_records(str(path))):
        for understood in (demonstration_of, preference_of):
            refused(lambda understood=understood, record=record: understood(record, PLAIN))
        refused(lambda record=record, index=index: prompt_of(record, PLAIN, index))


def refused(call: Callable[[], object]) -> None:
    """Let a record be of another shape."""
    with contextlib.suppress(DataError):
        call()


def read_gguf(path: Path) -> None:
    opened = open_gguf(path)
    for name in opened.tensors:
        opened.read(name)


def read_weights(path: Path) -> None:
    path.rename(path.with_name("adapter_model.safetensors"))
    tree = tiny_model(0)
    inject_lora(tree, LoraConfig(r=2, target_modules=["q_proj"]), 0)
    load_lora(tree, path.parent)


def read_folder(path: Path) -> None:
    content = path.read_bytes()
    for part in (tiny_model(0).config, tiny_tokenizer()):
        part.save_pretrained(path.parent)
    path.write_bytes(content)
    read_tokenizer(str(path.parent))


def read_adapters(path: Path) -> None:
    check_model_path(str(path.parent))


def read_template(path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = path.read_bytes().decode("utf-8", "replace")
    prompt_token_ids(tokenizer, Prompt.from_text("p", "a question"))


def read_maths(path: Path) -> None:
    text = path.read_bytes().decode("utf-8", "replace")
    for answer, reference in ((text, "1"), ("1", text), (f"so \\boxed{{{text}}}", text)):
        assert math_correct(answer, reference, 1e-8) in (True, False)


def read_import(path: Path) -> None:
    for kind in ("pair", "ranking", "demonstration"):
        refused(lambda kind=kind: imported(kind, read_lines(path.read_bytes().decode("utf-8", "replace"))))


def read_journal(path: Path) -> None:
    content = path.read_bytes()
    for whole in (content, content[:-32] + hashlib.sha256(content[:-32]).digest()):  # also one whose sum is right
        with contextlib.suppress(ValueError):
            StoreRecord.from_bytes(whole)


# (how it is read, what it may raise, changed files a case)
PARSERS: dict[str, tuple[Callable[[Path], None], tuple[type[Exception], ...], int]] = {
    "recipe": (read_recipe, (ConfigError,), 20),
    "options": (read_options, (ConfigError,), 20),
    **dict.fromkeys(("jsonl", "json", "csv", "parquet"), (read_data, (DataError,), 50)),
    "gguf": (read_gguf, (DataError,), 50),
    "safetensors": (read_weights, (ConfigError,), 4),
    **dict.fromkeys(("config", "tokenizer", "tokenizer_config"), (read_folder, (ConfigError,), 5)),
    "adapter": (read_adapters, (ConfigError,), 30),
    "template": (read_template, (DataError,), 20),
    "math": (read_maths, (), 30),
    "import": (read_import, (), 50),
    "journal": (read_journal, (), 50),
}


def changed(content: bytes, random: random.Random) -> bytes:
    """The file with one to four things done to it."""
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(content) + 1)
        end = min(len(content), place + random.choice((1, 2, 8, 64)))
        match random.randrange(7):
            case 0:
                content = content[:place]
            case 1:
                content = content[:place] + random.choice(NASTY) + content[place:]
            case 2:
                content = content[:place] + random.choice(NASTY) + content[end:]
            case 3 if place < len(content):
                content = content[:place] + bytes([content[place] ^ (1 << random.randrange(8))]) + content[place + 1 :]
            case 4:
                content = content[:place] + content[end:]
            case 5:
                content = content[:place] + content[place:end] * random.choice((2, 50)) + content[end:]
            case _:
                other = random.randrange(len(content) + 1)
                content = content[:place] + content[other : other + 16] + content[place:]
    return content


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("file", FILES)
def test_a_changed_file(file: str, group: int, tmp_path: Path) -> None:
    parser = file.partition("/")[0]
    read, allowed, count = PARSERS[parser]
    draw = random.Random(f"{file} {group}")
    original = (CORPUS / file).read_bytes()
    for number in range(count):
        content = original if number == group == 0 else changed(original, draw)
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / Path(file).name
        path.write_bytes(content)
        with time_limit(10.0, file):
            try:
                read(path)
            except allowed as error:
                assert isinstance(error, TetherError)
                assert 0 < len(str(error)) < 5_000 and "Traceback" not in str(error)
            except (Exception, TimeLimitError) as error:
                kept = tmp_path / f"finding-{number}"
                kept.write_bytes(content)
                raise AssertionError(f"{type(error).__name__}: {error} ({kept})") from error


def test_every_parser_has_a_corpus() -> None:
    assert {file.partition("/")[0] for file in FILES} == set(PARSERS)
    assert json.loads((CORPUS / "config" / "config.json").read_text())["model_type"]
