"""Whether a model in the cache is still, byte for byte, what was fetched.

The digests of its files are kept beside it. A file whose size and time of change are those of the last check is taken
as unchanged; any other is read whole (540 MB take two seconds) and compared. A file that is not on the list is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tether.errors import DataError

DIGESTS = "tether-digests.json"


def note_digests(folder: Path) -> None:
    """Keep the digest of every file in the folder, as it is now."""
    found = {name: _entry(folder / name, _sha256(folder / name)) for name in _names(folder)}
    unfinished = folder / f".{DIGESTS}-{os.getpid()}"
    unfinished.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(folder / DIGESTS)


def check_digests(folder: Path, name: str) -> None:
    """Raise DataError where a file was changed, added or removed; a folder without a list gets one."""
    repair = f"fetch it anew with `tether models pull {name} --force`"
    try:
        noted = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        entries = {file: (each["sha256"], each["size"], each["changed"]) for file, each in noted.items()}
    except FileNotFoundError:
        with suppress(OSError):  # of a cache that cannot be written: it is looked through again next time
            note_digests(folder)
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / DIGESTS} cannot be read: {repair} ({error})") from error
    there = set(_names(folder))
    if apart := sorted(there ^ set(entries)):
        what = "was added to" if apart[0] in there else "is missing from"
        raise DataError(f"{apart[0]} {what} the cached model {name} in {folder}: {repair}")
    touched = False
    for file, (digest, size, changed) in entries.items():
        now = (folder / file).stat()
        if (now.st_size, now.st_mtime_ns) == (size, changed):
            continue
        if now.st_size != size or _sha256(folder / file) != digest:
            raise DataError(f"{file} of the cached model {name} is not what was fetched ({folder}): {repair}")
        touched = True
    if touched:
        with suppress(OSError):
            note_digests(folder)


def _names(folder: Path) -> list[str]:
    return sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if not file.is_dir() and not file.name.lstrip(".").startswith(DIGESTS)
    )


def _entry(file: Path, digest: str) -> dict[str, Any]:
    now = file.stat()
    return {"sha256": digest, "size": now.st_size, "changed": now.st_mtime_ns}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
