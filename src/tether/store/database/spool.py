"""Records that wait on disk while the database cannot be written: `spool/` in the run's folder, one file a record."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tether.store.database.records import StoreRecord

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FOLDER = "spool"
LOCK = ".recording"


class Spool:
    """An ordered queue of files. A file is whole or not there: written beside, flushed to disk, and renamed."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER
        self._next = max((int(path.stem) for path in self.files()), default=-1) + 1

    def files(self) -> list[Path]:
        """The records that wait, oldest first."""
        with suppress(OSError):
            return sorted(path for path in self.folder.glob("*.record") if path.stem.isdecimal())
        return []

    def add(self, record: StoreRecord) -> None:
        """Put a record at the end; it is on disk when this returns. Raises OSError where it cannot be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"{self._next:010d}.record"
        beside = target.with_suffix(".unfinished")
        try:
            with beside.open("wb") as file:
                file.write(record.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            beside.replace(target)
            _sync_folder(self.folder)
        except BaseException:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        self._next += 1

    def set_aside(self, path: Path) -> None:
        """Take a record that cannot be applied out of the way; it stays on disk to be looked at."""
        path.replace(path.with_suffix(".refused"))

    def clear(self) -> None:
        """Forget what waits: it belongs to a run that was here before."""
        for path in [*self.files(), *self.folder.glob("*.refused"), *self.folder.glob("*.unfinished")]:
            path.unlink(missing_ok=True)
        self.tidy()

    def tidy(self) -> None:
        """Remove the folder once nothing is in it."""
        with suppress(OSError):
            self.folder.rmdir()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def recording_lock(run_folder: Path) -> Iterator[bool]:
    """Hold the run for one writer; False where another process has it. It goes with the process, however that ends."""
    if fcntl is None:
        yield True
        return
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(run_folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError:  # nothing can be written here, nor by anyone else
        yield True
        return
    try:
        yield _locked(handle)
    finally:
        os.close(handle)


def _locked(handle: int, *, shared: bool = False) -> bool:
    assert fcntl is not None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_being_recorded(run_folder: Path) -> bool:
    """Whether a living process writes this run."""
    if fcntl is None:
        return False
    try:
        handle = os.open(run_folder / LOCK, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        return not _locked(handle, shared=True)
    finally:
        os.close(handle)
