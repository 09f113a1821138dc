"""Records for the store as values, and `records.jsonl`, the run's own log of them.

A record is applied to the store in one transaction, and can wait in a file until then. The store serves a whole
workspace and can be lost or replaced, so each run also keeps its own log of everything except tokens. It has one line
per record, in order: starts, steps with their metrics, events and rewinds, each with its SHA-256 at the end. The
recorder's thread writes the log before the store, and flushes it to disk before a checkpoint gets its name.
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
    source: str  # a path or a name, as in the recipe
    run: str | None = None  # its name, if it is a run of the same workspace
    sha256: str | None = None  # of a data file


@dataclass(frozen=True)
class StoreRecord:
    """One change to the store. `data` is JSON; `blobs` are the encoded rollouts of a step, in order."""

    kind: Kind
    data: Mapping[str, Any]
    blobs: Sequence[bytes] = field(default=())

    def to_bytes(self) -> bytes:
        """The record as bytes, with a checksum at the end."""
        header = {"kind": self.kind, "data": self.data, "blobs": [len(blob) for blob in self.blobs]}
        head = json.dumps(without_infinities(header), allow_nan=False, default=str).encode("ascii")
        body = b"".join([MAGIC, struct.pack("<I", len(head)), head, *self.blobs])
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, content: bytes) -> StoreRecord:
        """Parse a record. Raises ValueError if anything is missing or changed."""
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
        ) as error:  # although the checksum is right
            raise ValueError(f"not a whole record ({type(error).__name__})") from error


def plain(text: str) -> str:
    """Text that every database accepts: without NUL and lone surrogates."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")


# -- the log of a run ---------------------------------------------------------------------------------------------

FILE = "records.jsonl"
ATTEMPT_EVENTS = ("failed", "stopped", "resumed", "restarted", "forked")  # events of an attempt, not of a step
LINE = re.compile(rb'(\{.*),"sha256":"([0-9a-f]{64})"\}', re.DOTALL)


@dataclass
class Logged:
    """The content of a log, with rewinds applied."""

    start: dict[str, Any] | None = None  # of the first attempt
    steps: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])  # time, metrics, rollouts
    events: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # by uid
    damaged: list[int] = field(default_factory=list[int])  # line numbers, from 1
    last_start: dict[str, Any] | None = None

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """Apply the next record."""
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
        """The digest of a logged step, computed as the store does."""
        return step_digest(step, {plain(name): value for name, value in self.steps[step]["metrics"].items()})


def _happens_again(event: Mapping[str, Any], step: int) -> bool:
    return event["step"] is not None and event["step"] >= step and event["kind"] not in ATTEMPT_EVENTS


class RunLog:
    """Appends records to the log. Raises OSError if it cannot; existing lines stay valid."""

    def __init__(self, run_folder: Path) -> None:
        self.path = run_folder / FILE
        self._file: int | None = None

    def append(self, record: StoreRecord) -> None:
        """Append one line."""
        if record.kind == "state":
            return
        if self._file is not None and not self._is_current():
            self.close()  # the file was removed or replaced
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
        """Flush the log to disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def clear(self) -> None:
        """Delete the log of an earlier run in this folder."""
        self.path.unlink(missing_ok=True)

    def _is_current(self) -> bool:
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except OSError:
            return False

    def _drop_torn_line(self) -> None:
        """Remove a partial last line, which a kill can leave."""
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
    """A record as a line; of a step's rollouts, only their number."""
    kept = dict(data)
    if kind == "step":
        kept["rollouts"] = len(kept["rollouts"]) if not isinstance(kept["rollouts"], int) else kept["rollouts"]
    for name in ("most", "moved"):  # only for the store
        kept.pop(name, None)
    body = json.dumps(without_infinities({"kind": kind, "data": kept}), allow_nan=False, default=str)[:-1].encode(
        "ascii"
    )
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def steps_logged(run_folder: Path) -> int:
    """Number of steps that a run's log comes to."""
    log = read_log(run_folder)
    return max(log.steps, default=-1) + 1 if log is not None else 0


def read_log(run_folder: Path) -> Logged | None:
    """Read a run's log; None if there is none. Damaged lines are counted and left out."""
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
        elif number < len(lines):  # a partial last line comes from a kill and is no damage
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
    """Whether a line is a valid record of a known kind: the folder may come from somebody else."""
    fields, data = FIELDS.get(record.get("kind")), record.get("data")
    if fields is None or not isinstance(data, dict):
        return False
    if not all(name in data and isinstance(data[name], kind) for name, kind in fields.items()):
        return False
    return record["kind"] != "step" or all(isinstance(value, NUMBER) for value in data["metrics"].values())


def write_log(run_folder: Path, logged: Logged) -> None:
    """Write the whole log again, replacing the existing one."""
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
