"""Read and write files safely: plain files only, bounded sizes, and digests that reveal damage.

Some files come from other people. A named pipe blocks until somebody writes to it and `/dev/zero` never ends, so
neither is opened for reading. Tether's own JSON files contain their digest, and a saved model has a list of the digests
of its files. Digests are unkeyed SHA-256: they detect accidents, not a person who changes a file and its digest.
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
    """A path that is not a plain file, or a file that is larger than the limit."""


def what_else(path: str | Path) -> str | None:
    """What a path is, if it is not a plain file: "a named pipe"; else None. Raises OSError if it is missing."""
    mode = Path(path).stat().st_mode
    return next((words for is_kind, words in KINDS if is_kind(mode)), None)


def require_plain(path: str | Path) -> None:
    """Raise NotPlainError if a path is not a plain file, and IsADirectoryError for a folder."""
    other = what_else(path)
    if other is not None:
        if other == "a folder":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise NotPlainError(errno.EINVAL, f"it is {other}, and a plain file is expected", str(path))


def read_plain(path: str | Path, limit: int | None = None) -> bytes:
    """Read a plain file of at most `limit` bytes; raises OSError for anything else, before reading it."""
    require_plain(path)
    # The path may have changed since the check. O_NONBLOCK opens a pipe without waiting for a writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotPlainError(errno.EINVAL, "it is not a plain file", str(path))
        content = file.read() if limit is None else file.read(limit + 1)
    if limit is not None and len(content) > limit:
        raise NotPlainError(errno.EFBIG, f"it is larger than the limit of {limit:,} bytes", str(path))
    return content


def read_plain_text(path: str | Path, limit: int | None = None) -> str:
    """Like `read_plain`, decoded as UTF-8; raises UnicodeDecodeError if it is not UTF-8."""
    return read_plain(path, limit).decode("utf-8")


def read_plain_json(path: str | Path, limit: int | None = None) -> Any:
    """Like `read_plain`, parsed as JSON; raises ValueError if it is not JSON or is nested too deeply."""
    try:
        return json.loads(read_plain(path, limit))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# -- JSON with its own digest -------------------------------------------------------------------------------------

KEY = "sha256"
FILES = "tether-files.json"  # beside a model saved by Tether: size and SHA-256 of each of its files
REPLACED = ".replaced-"


def canonical(values: Mapping[str, Any]) -> bytes:
    """Values as canonical JSON: sorted keys and no spaces, so equal values have equal bytes."""
    return (json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=True) + "\n").encode()


def digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of some values."""
    return hashlib.sha256(canonical(values)).hexdigest()


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with their digest added under `KEY`."""
    return {**values, KEY: digest_of(values)}


def unsealed(content: Any) -> dict[str, Any]:
    """The values without their digest. Raises ValueError if the digest is missing or does not match."""
    if not isinstance(content, dict) or not isinstance(content.get(KEY), str):
        raise ValueError("it has no digest")
    values = {name: value for name, value in content.items() if name != KEY}
    if digest_of(values) != content[KEY]:
        raise ValueError("its SHA-256 differs")
    return values


# -- folders of files ---------------------------------------------------------------------------------------------


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises OSError if the file cannot be read."""
    require_plain(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path) -> None:
    """Write `FILES`, the list of sizes and digests, into a folder."""
    found = sorted(path for path in folder.iterdir() if path.is_file() and path.name != FILES)
    about = {path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for path in found}
    (folder / FILES).write_text(json.dumps(sealed({"format": 1, "files": about}), indent=1) + "\n", encoding="utf-8")


def files_damage(folder: Path) -> str | None:
    """Describe the first damaged file of a folder that has a list; None if all match or if there is no list."""
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
    """Raise StorageError if a model saved by Tether has changed; folders of other tools have no list to check."""
    if damage := files_damage(folder):
        raise StorageError(
            f"{damage}: restore the folder from a copy, or save the model again (`tether export RUN --checkpoint -1 "
            f"--model FOLDER`); if you changed it on purpose, remove {folder / FILES}"
        )


def swap(made: Path, target: Path) -> None:
    """Rename `made` to `target`, replacing any folder there. After a kill in between, `recover` restores it."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    made.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(target: Path) -> None:
    """Restore the folder that a killed `swap` moved away, or delete it if the new folder is in place."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    if replaced.is_dir():
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(target)


def same_place(one: str, other: str) -> bool:
    """Whether two names of models are one name, or one folder."""
    paths = [Path(name).expanduser() for name in (one, other)]
    return one == other or (all(path.is_dir() for path in paths) and paths[0].resolve() == paths[1].resolve())
