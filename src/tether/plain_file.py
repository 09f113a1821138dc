"""Reading files that somebody else may have put there: plain ones only, and no larger than they can sensibly be.

A named pipe has no end until somebody writes to it, and `/dev/zero` has none at all: neither is opened for reading.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


class NotPlainError(OSError):
    """A path that is no plain file, or one that is too large to be what it should be."""


def what_else(path: str | Path) -> str | None:
    """What a path is, where that is no plain file: "a named pipe". Raises OSError where there is nothing."""
    mode = Path(path).stat().st_mode
    return next((words for is_kind, words in KINDS if is_kind(mode)), None)


def require_plain(path: str | Path) -> None:
    """Raise NotPlainError where a path is no plain file, and IsADirectoryError for a folder."""
    other = what_else(path)
    if other is not None:
        if other == "a folder":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise NotPlainError(errno.EINVAL, f"it is {other}, and a plain file is expected", str(path))


def read_plain(path: str | Path, limit: int | None = None) -> bytes:
    """The bytes of a plain file of at most `limit` bytes; raises OSError for anything else, before it is read."""
    require_plain(path)
    # What it is may have changed since: a pipe is then opened without waiting for its other end.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotPlainError(errno.EINVAL, "it is no plain file", str(path))
        content = file.read() if limit is None else file.read(limit + 1)
    if limit is not None and len(content) > limit:
        raise NotPlainError(errno.EFBIG, f"it is larger than {limit:,} bytes, the most that is read here", str(path))
    return content


def read_plain_text(path: str | Path, limit: int | None = None) -> str:
    """The same as UTF-8 text; raises UnicodeDecodeError where it is none."""
    return read_plain(path, limit).decode("utf-8")


def read_plain_json(path: str | Path, limit: int | None = None) -> Any:
    """The same as JSON; raises ValueError where it is none, or is nested more deeply than can be read."""
    try:
        return json.loads(read_plain(path, limit))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
