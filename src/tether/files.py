"""Reading and writing files safely: plain files only, bounded sizes, and digests that reveal damage.

Reading files that somebody else may have put there: plain ones only, and no larger than they can sensibly be.

A named pipe has no end until somebody writes to it, and `/dev/zero` has none at all: neither is opened for reading.

What is written so that damage is seen when it is read: JSON with its own digest, folders with a list of theirs.

Digests are unkeyed SHA-256: they find accidents, not somebody who changes a file and its digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.errors import StorageError

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


KEY = "sha256"
FILES = "tether-files.json"  # beside a model that Tether saved: size and SHA-256 of each of its files
REPLACED = ".replaced-"


def canonical(values: Mapping[str, Any]) -> bytes:
    """The one way in which these values are written as JSON."""
    return (json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=True) + "\n").encode()


def digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of values as JSON."""
    return hashlib.sha256(canonical(values)).hexdigest()


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their own digest among them."""
    return {**values, KEY: digest_of(values)}


def unsealed(content: Any) -> dict[str, Any]:
    """What was sealed. Raises ValueError where it is not what was written."""
    if not isinstance(content, dict) or not isinstance(content.get(KEY), str):
        raise ValueError("it has no digest")
    values = {name: value for name, value in content.items() if name != KEY}
    if digest_of(values) != content[KEY]:
        raise ValueError("its SHA-256 differs")
    return values


# -- folders of files ---------------------------------------------------------------------------------------------


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises OSError where it cannot be read."""
    require_plain(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path) -> None:
    """Write the list of what is in a folder into it."""
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.name != FILES)
    about = {path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for path in found}
    (folder / FILES).write_text(json.dumps(sealed({"format": 1, "files": about}), indent=1) + "\n", encoding="utf-8")


def files_damage(folder: Path) -> str | None:
    """What is wrong with a folder that has a list of its files; None where all is well, or where it has no list."""
    listing = folder / FILES
    try:
        about = unsealed(read_plain_json(listing))["files"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        return f"{listing} is damaged ({str(error).partition(chr(10))[0]})"
    for name, said in about.items():
        path = folder / name
        try:
            if path.stat().st_size != said["bytes"]:
                return f"{path} has {path.stat().st_size} bytes where {said['bytes']} were written"
            if file_digest(path) != said["sha256"]:
                return f"{path} is not what was written: its SHA-256 differs"
        except OSError as error:
            return f"{path} is missing or cannot be read ({error.strerror})"
    return None


def check_saved(folder: Path) -> None:
    """Raise where a model that Tether saved is not what was written; folders of other tools have no list to go by."""
    if damage := files_damage(folder):
        raise StorageError(
            f"{damage}: put the folder back from a copy, or save the model again (`tether export RUN --checkpoint -1 "
            f"--model FOLDER`); if you changed it on purpose, remove {folder / FILES}"
        )


def swap(made: Path, target: Path) -> None:
    """Give a folder its name, in place of one that has it. A kill in between loses neither: see `recover`."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    made.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(target: Path) -> None:
    """Put back what a killed `swap` had taken aside; remove it where its successor is there."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if replaced.is_dir():
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(target)
