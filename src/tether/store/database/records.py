"""Records for the store as values, and `records.jsonl`, the run's own copy of them.

What is written to the store, as values: each is applied in one transaction, and can wait in a file until then.

`records.jsonl` in a run's folder: the run's own copy of what it recorded, but for tokens.

The store serves a workspace and can be lost, replaced or changed behind a run's back; what a run measured belongs to
the run. One line a record, in order: starts, steps with their metrics, events, and rewinds, each with its SHA-256 at
the end. It is written by the recorder's thread before the store is, and is on the disk before a checkpoint has its
name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tether.files import read_plain
from tether.store.database.schema import step_digest, without_infinities

MAGIC = b"TETHER1\n"
Kind = Literal["start", "step", "event", "rewind", "state"]


@dataclass(frozen=True)
class RecordSource:
    """Something a run was made from: a model, a reward model, a critic's start, data, the run it was forked from."""

    role: str
    source: str  # a path or a name, as the recipe has it
    run: str | None = None  # its name, where it is a run of the same workspace
    sha256: str | None = None  # of a file of data


@dataclass(frozen=True)
class StoreRecord:
    """One change to the store. `data` is JSON; `blobs` are the encoded rollouts of a step, in order."""

    kind: Kind
    data: Mapping[str, Any]
    blobs: Sequence[bytes] = field(default=())

    def to_bytes(self) -> bytes:
        """Self-contained, with a checksum at the end."""
        header = {"kind": self.kind, "data": self.data, "blobs": [len(blob) for blob in self.blobs]}
        head = json.dumps(without_infinities(header), allow_nan=False, default=str).encode("ascii")
        body = b"".join([MAGIC, struct.pack("<I", len(head)), head, *self.blobs])
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, content: bytes) -> StoreRecord:
        """Raises ValueError where anything is missing or altered."""
        body, digest = content[:-32], content[-32:]
        if not body.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
            raise ValueError("not a whole record")
        start = len(MAGIC) + 4
        try:
            (size,) = struct.unpack_from("<I", body, len(MAGIC))
            header = json.loads(body[start : start + size])
            place, blobs = start + size, []
            for length in header["blobs"]:
                blobs.append(body[place : place + length])
                place += length
            return cls(header["kind"], header["data"], tuple(blobs))
        except (
            KeyError,
            TypeError,
            struct.error,
            RecursionError,
        ) as error:  # its sum is right
            raise ValueError(f"not a whole record ({type(error).__name__})") from error


def plain(text: str) -> str:
    """Text that every database takes: without NUL, and without halves of characters."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")


FILE = "records.jsonl"
SITTINGS = ("failed", "stopped", "resumed", "forked")  # events that tell of a attempt, not of a step
LINE = re.compile(rb'(\{.*),"sha256":"([0-9a-f]{64})"\}', re.DOTALL)


@dataclass
class Logged:
    """What a log holds, rewinds applied."""

    start: dict[str, Any] | None = None  # of the first attempt
    steps: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])  # time, metrics, rollouts
    events: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # by uid
    damaged: list[int] = field(default_factory=list[int])  # numbers of lines, from 1
    last_start: dict[str, Any] | None = None

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """The next record."""
        if kind == "start":
            self.start = self.start or data
            self.last_start = data
        elif kind == "step":
            self.steps[data["step"]] = data
        elif kind == "event":
            self.events[data["uid"]] = data
        elif kind == "rewind":
            step = data["step"]
            self.steps = {at: row for at, row in self.steps.items() if at < step}
            kept = {uid: row for uid, row in self.events.items() if not _happens_again(row, step)}
            self.events = kept

    def digest(self, step: int) -> str:
        """The digest of a step that is there, as the store has it."""
        return step_digest(step, {plain(name): value for name, value in self.steps[step]["metrics"].items()})


def _happens_again(event: Mapping[str, Any], step: int) -> bool:
    return event["step"] is not None and event["step"] >= step and event["kind"] not in SITTINGS


class RunLog:
    """Appends records. Raises OSError where that is not possible; what is there stays whole."""

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / FILE
        self._file: int | None = None

    def append(self, record: StoreRecord) -> None:
        """One more line."""
        if record.kind == "state":
            return
        if self._file is not None and not self._is_current():
            self.close()  # it was removed, or written anew
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o644)
            self._drop_torn_line()
        size = os.fstat(self._file).st_size
        line = line_of(record.kind, record.data)
        try:
            written = os.write(self._file, line)
        except OSError:
            self._cut(size)
            raise
        if written != len(line):
            self._cut(size)
            raise OSError(28, os.strerror(28), str(self.path))

    def sync(self) -> None:
        """Have it on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def clear(self) -> None:
        """Forget what a run that was here before recorded."""
        self.path.unlink(missing_ok=True)

    def _is_current(self) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except OSError:
            return False

    def _drop_torn_line(self) -> None:
        """A kill can leave half a line at the end."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            tail = os.pread(self._file, size, 0)
            self._cut(tail.rfind(b"\n") + 1)

    def _cut(self, size: int) -> None:
        assert self._file is not None
        with suppress(OSError):
            os.ftruncate(self._file, size)


def line_of(kind: str, data: Mapping[str, Any]) -> bytes:
    """A record as a line; of a step's rollouts only how many there are."""
    kept = dict(data)
    if kind == "step":
        kept["rollouts"] = len(kept["rollouts"]) if not isinstance(kept["rollouts"], int) else kept["rollouts"]
    for name in ("most", "moved"):  # of the store alone
        kept.pop(name, None)
    body = json.dumps(without_infinities({"kind": kind, "data": kept}), allow_nan=False, default=str)[:-1].encode(
        "ascii"
    )
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def read_log(run_folder: Path) -> Logged | None:
    """What a run's log holds; None where it has none. Lines that are not what was written are counted and left out."""
    try:
        content = read_plain(run_folder / FILE)
    except OSError:
        return None
    found = Logged()
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1] if lines[-1] == b"" else lines, start=1):
        record = _parsed(line)
        if record is not None and _is_record(record):
            found.take(record["kind"], record["data"])
        elif number < len(lines):  # the last one, without its end, was torn by a kill
            found.damaged.append(number)
    return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    match = LINE.fullmatch(line)
    if match is None or hashlib.sha256(match[1]).hexdigest().encode() != match[2]:
        return None
    try:
        return json.loads(match[1] + b"}")
    except (ValueError, RecursionError):
        return None


NUMBER = (int, float, type(None))
FIELDS: dict[str, dict[str, Any]] = {
    "start": {"name": str, "uid": str, "time": NUMBER, "method": str, "steps": int, "config": dict, "resumes": bool}
    | {"environment": dict, "sources": list},
    "step": {"step": int, "time": NUMBER, "metrics": dict, "rollouts": int},
    "event": {"uid": str, "time": NUMBER, "kind": str, "text": object, "step": (int, type(None)), "data": object},
    "rewind": {"step": int},
}


def _is_record(record: Any) -> bool:
    """Whether a line is a record of a kind that there is: a folder may come from anyone."""
    fields, data = FIELDS.get(record.get("kind")), record.get("data")
    if fields is None or not isinstance(data, dict):
        return False
    if not all(name in data and isinstance(data[name], kind) for name, kind in fields.items()):
        return False
    return record["kind"] != "step" or all(isinstance(value, NUMBER) for value in data["metrics"].values())


def write_log(run_folder: Path, logged: Logged) -> None:
    """Write a whole log anew, in place of the one that is there."""
    path = run_folder / FILE
    unfinished = path.with_name(f".{FILE}.unfinished")
    with unfinished.open("wb") as file:
        file.writelines(_lines(logged))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _lines(logged: Logged) -> Iterator[bytes]:
    starts: Iterable[dict[str, Any] | None] = (logged.start, logged.last_start)
    told: list[dict[str, Any]] = []
    for start in starts:
        if start is not None and start not in told:
            told.append(start)
            yield line_of("start", start)
    yield from (line_of("step", logged.steps[step]) for step in sorted(logged.steps))
    yield from (line_of("event", row) for row in sorted(logged.events.values(), key=lambda row: row["time"]))
