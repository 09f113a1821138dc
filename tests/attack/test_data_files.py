"""Files of records that hang a reader, fill the memory or are no records: every method answers in a sentence."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

GOOD = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
DEEP = 100_000


def lines(*rows: object) -> bytes:
    return b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n"


def keys(count: int) -> bytes:
    names = ", ".join(f'"k{number}": 1' for number in range(count))
    return f'{{"prompt": "a", {names}, "k5": 2}}\n'.encode()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


FILES: dict[str, bytes | Callable[[Path], None]] = {
    "pipe.jsonl": fifo,
    "pipe.json": fifo,
    "pipe.csv": fifo,
    "pipe.parquet": fifo,
    "pipe.jsonl.gz": fifo,
    "zero.jsonl": link_to("/dev/zero"),
    "random.csv": link_to("/dev/random"),
    "tty.jsonl": link_to("/dev/tty"),
    "loop.jsonl": link_to_itself,
    "nowhere.jsonl": link_to("/nowhere/at/all.jsonl"),
    "folder.jsonl": Path.mkdir,
    "empty.jsonl": b"",
    "empty.json": b"",
    "empty.csv": b"",
    "empty.parquet": b"",
    "blank.jsonl": b"\n\n \n",
    "long-line.jsonl": b'{"prompt": "' + b"a" * 20_000_000 + b'"}\n',
    "long-cell.csv": b"prompt,completion\n" + b"a" * 20_000_000 + b",b\n",
    "keys.jsonl": keys(200_000),
    "keys.json": b"[" + keys(200_000).strip() + b"]",
    "header.csv": ",".join([*(f"k{number}" for number in range(50_000)), "k5"]).encode() + b"\n1\n",
    "deep.jsonl": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "deep.json": b"[" * DEEP + b"]" * DEEP,
    "deep-object.jsonl": b'{"a": ' * DEEP + b"1" + b"}" * DEEP + b"\n",
    "number.jsonl": b'{"prompt": ' + b"9" * 100_000 + b"}\n",
    "infinity.jsonl": lines(b'{"prompt": 1e999, "completion": "b"}'),
    "nan.jsonl": lines(b'{"prompt": NaN, "completion": "b"}'),
    "list.jsonl": lines([1, 2]),
    "text.jsonl": lines("text"),
    "unclosed.jsonl": b'{"prompt": "a"\n',
    "two-values.jsonl": b'{"prompt": "a"} {"prompt": "b"}\n',
    "nul.jsonl": b'{"prompt": "a\x00b"}\n',
    "not-utf8.jsonl": b'{"prompt": "\xff\xfe"}\n',
    "utf16.jsonl": json.dumps(GOOD).encode("utf-16"),
    "object.json": json.dumps(GOOD).encode(),
    "comma.json": b'[{"prompt": "a"},]',
    "quote.csv": b'prompt,completion\n"a,b\n',
    "twice.csv": b"prompt,prompt\na,b\n",
    "wide.csv": b"prompt\na,b,c\n",
    "not-gzip.jsonl.gz": b"plain",
    "cut.jsonl.gz": gzip.compress(lines(GOOD) * 1000)[:50],
    "bomb.jsonl.gz": gzip.compress(b" " * 200_000_000),
    "not-parquet.parquet": b"PAR1" + b"\x00" * 100 + b"PAR1",
    "huge-footer.parquet": b"PAR1" + b"\xff\xff\xff\x7fPAR1",
    "numbers.jsonl": lines({"prompt": 1, "completion": 2, "chosen": 3, "rejected": 4}),
    "nones.jsonl": lines(dict.fromkeys(GOOD)),
    "empty-messages.jsonl": lines({"messages": []}),
    "messages-of-text.jsonl": lines({"messages": "hello"}),
    "messages-of-numbers.jsonl": lines({"messages": [1, 2]}),
    "roles.jsonl": lines({"messages": [{"role": 5, "content": "x"}]}),
    "unknown.bin": b"\x00\x01",
    "escapes.jsonl": b'{"\\u001b[31mred\\u001b]0;title\\u0007": 1}\n',
}
METHODS = {"sft": "data.train", "reward": "data.train", "dpo": "data.train", "ppo": "task.prompts"}
SIZES = ["--model.path=tiny-bytes", "--model.device=cpu", "--run.steps=1", "--run.name=x", "--data.overlong=error"]


def make(folder: Path, name: str) -> Path:
    path, content = folder / name, FILES[name]
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FILES)
def test_training_on_it(name: str, method: str, command, refusal, tmp_path: Path) -> None:
    make(tmp_path, name)
    reward = ['--reward.parts=[{"kind": "length", "max": 9}]'] if method == "ppo" else []
    refusal(command("train", method, *SIZES, *reward, f"--{METHODS[method]}={name}"), 5)


@pytest.mark.parametrize("name", FILES)
def test_looking_at_it(name: str, command, refusal, tmp_path: Path) -> None:
    make(tmp_path, name)
    ended = command("data", name, "--model", "tiny-bytes")
    if ended.code:
        refusal(ended, 2, 5)


@pytest.mark.parametrize("subcommand", ["eval", "sample"])
@pytest.mark.parametrize(
    "name", ["pipe.jsonl", "zero.jsonl", "keys.jsonl", "deep.jsonl", "bomb.jsonl.gz", "loop.jsonl"]
)
def test_asking_from_it(name: str, subcommand: str, command, refusal, tmp_path: Path) -> None:
    make(tmp_path, name)
    options = [name] if subcommand == "sample" else ["--prompts", name]
    refusal(command(subcommand, "tiny-bytes", *options, "--device", "cpu"), 2, 5)


@pytest.mark.parametrize(
    "path",
    [
        "a" * 300 + ".jsonl",
        "/" + "x/" * 3000 + "y.jsonl",
        "file.txt/inside.jsonl",
        "~nobody-at-all/x.jsonl",
        "a\x00b.jsonl",
    ],
    ids=["long name", "long path", "not a folder", "no home", "zero byte"],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_path_that_cannot_be(path: str, method: str, command, refusal, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    ended = command("train", method, *SIZES, f"--{METHODS[method]}={path}")
    assert ended.code in (2, 5), ended.err
    assert "Traceback" not in ended.err and "a bug in Tether" not in ended.err
