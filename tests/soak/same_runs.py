"""Whether two runs are the same, bit for bit: models, checkpoints, the metrics table, and every stored token."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.store import checkpoints
from tether.store.folder import RunFolder

ABOUT_THE_PLACE = ("environment", "stands_on", "run")  # of a checkpoint's values: not what training made of them


def differences(one: Path, other: Path, *, since: int = 0) -> list[str]:
    """What differs between two finished runs; `since` the step at which one branched off from the other.

    A branch has a best model only if it is better than all that the other run had until then.
    """
    found = [*_files(one, other, "model")]
    found += _files(one, other, "best") if not since or (other / "best").exists() else []
    if _content(one / "report.json") != _content(other / "report.json"):
        found.append("report.json differs")
    found += _last_checkpoints(one, other)
    steps = int(_query(one, "SELECT steps_target FROM runs WHERE name = ?")[0][0])
    for run in (one, other):
        taken = [row[0] for row in _of_steps(run, "SELECT step FROM steps", since)]
        if taken != list(range(since, steps)):
            found.append(f"{run} recorded the steps {taken}")
    for table, read in (("metrics", metrics_table), ("rollouts", rollouts_table)):
        mine, its = read(one, since), read(other, since)
        if mine != its:
            changed = sorted({row[:2] for row in set(mine) ^ set(its)})
            found.append(f"the table of {table} differs at {changed[:8]}")
    return found


def metrics_table(run: Path, since: int = 0) -> list[tuple[Any, ...]]:
    """(step, name, the bits of the value), without how long anything took."""
    rows = _of_steps(run, "SELECT step, name, value FROM metrics", since)
    return sorted((step, name, _bits(value)) for step, name, value in rows if not name.startswith("seconds/"))


def rollouts_table(run: Path, since: int = 0) -> list[tuple[Any, ...]]:
    """(step, row, ..., the bytes of all token columns)."""
    columns = "step, place, group_id, sample_id, finish, tokens, score, content"
    rows = _of_steps(run, f"SELECT {columns} FROM rollouts", since)
    return sorted((*row[:6], _bits(row[6]), row[7]) for row in rows)


def _of_steps(run: Path, statement: str, since: int) -> list[tuple[Any, ...]]:
    mine = "run_id = (SELECT id FROM runs WHERE name = ?)"
    return sorted(_query(run, f"{statement} WHERE {mine} AND step >= {since}"))


def _query(run: Path, statement: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(run.parent / "tether.db")
    try:
        return database.execute(statement, (run.name,)).fetchall()
    finally:
        database.close()


def _bits(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("<d", value)


def _tensor_bits(tensor: Tensor) -> tuple[str, bytes]:
    return f"{tensor.dtype} {tuple(tensor.shape)}", tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _files(one: Path, other: Path, name: str) -> Iterator[str]:
    folders = one / name, other / name
    names = sorted({path.name for folder in folders if folder.is_dir() for path in folder.iterdir()})
    for file in names:
        if _content(folders[0] / file) != _content(folders[1] / file):
            yield f"{name}/{file} differs"


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _last_checkpoints(one: Path, other: Path) -> Iterator[str]:
    damaged: list[str] = []
    pair = [checkpoints.read_newest(RunFolder(run).checkpoints, damaged.append) for run in (one, other)]
    yield from damaged
    first, second = pair
    if first is None or second is None or first.step != second.step:
        yield "the last checkpoints are not of the same step"
        return
    for kind in first.tensors.keys() | second.tensors.keys():
        mine, its = first.tensors.get(kind, {}), second.tensors.get(kind, {})
        for name in mine.keys() | its.keys():
            if name not in mine or name not in its or _tensor_bits(mine[name]) != _tensor_bits(its[name]):
                yield f"the last checkpoint's {kind} differs in {name}"
    for name in first.values.keys() | second.values.keys():
        if name not in ABOUT_THE_PLACE and first.values.get(name) != second.values.get(name):
            yield f"the last checkpoint's {name} differs"
