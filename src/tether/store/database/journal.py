"""Write records to the database; if it cannot be written, to a spool on disk; if that fails too, keep them in memory.

The spool is `spool/` in the run's folder, with one file per record. Order is kept: once a record waits, all later ones
wait behind it, and the oldest is written first when the database is back. Nothing here raises: a problem is reported
once, through `notify`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from tether.errors import TetherError
from tether.files import read_plain
from tether.store.database.apply import apply_record
from tether.store.database.open import Workspace, open_engine
from tether.store.database.records import StoreRecord

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FOLDER = "spool"
LOCK = ".recording"


# -- the spool ----------------------------------------------------------------------------------------------------


class Spool:
    """An ordered queue of files. Each file is written under a temporary name, flushed to disk, and renamed."""

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER
        self._next = max((int(path.stem) for path in self.files()), default=-1) + 1

    def files(self) -> list[Path]:
        """The waiting records, oldest first."""
        with suppress(OSError):
            return sorted(path for path in self.folder.glob("*.record") if path.stem.isdecimal())
        return []

    def add(self, record: StoreRecord) -> None:
        """Append a record; it is on disk when this returns. Raises OSError on failure."""
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
        """Move away a record that cannot be applied; it stays on disk for inspection."""
        path.replace(path.with_suffix(".refused"))

    def clear(self) -> None:
        """Delete the waiting records: they belong to an earlier run in this folder."""
        for path in [*self.files(), *self.folder.glob("*.refused"), *self.folder.glob("*.unfinished")]:
            path.unlink(missing_ok=True)
        self.tidy()

    def tidy(self) -> None:
        """Remove the folder if it is empty."""
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
    """Take the run's lock; yields False if another process has it. It is released when the process ends."""
    if fcntl is None:
        yield True
        return
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(run_folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError:  # the folder is read-only, so no other process can write here either
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


# -- the journal --------------------------------------------------------------------------------------------------

FIRST_RETRY, LAST_RETRY = 1.0, 60.0  # seconds; doubled each time
MAX_IN_MEMORY = 256


class Unavailable(Exception):  # noqa: N818 (a state of the store, not a fault of the run)
    """The database cannot be written now."""


class Database:
    """A connection for one run's records, opened on first use and again after a failure."""

    def __init__(self, workspace: Workspace, name: str, start: StoreRecord | None, wait: float) -> None:
        self.workspace, self.name, self.start, self.wait = workspace, name, start, wait
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._file: tuple[int, int] | None = None

    def apply(self, record: StoreRecord) -> None:
        """Commit one record. Raises Unavailable, or ValueError if the record itself cannot be stored."""
        try:
            connection = self._connected()
            with connection.begin():
                apply_record(connection, self.workspace.key, self.name, record, self.start)
        except (IntegrityError, DataError, LookupError, TypeError, ValueError) as error:
            self.close()
            raise ValueError(_reason(error)) from error
        except (SQLAlchemyError, OSError, TetherError, MemoryError) as error:
            self.close()
            raise Unavailable(_reason(error)) from error

    def _connected(self) -> Connection:
        if self._connection is not None and self._identity() != self._file:
            self.close()  # the file was removed or replaced: this connection would write to a deleted file
        if self._connection is None:
            self._engine = open_engine(self.workspace, wait=self.wait)
            self._connection = self._engine.connect()
            self._file = self._identity()
        return self._connection

    def _identity(self) -> tuple[int, int] | None:
        if self.workspace.file is None:
            return None
        try:
            found = self.workspace.file.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def close(self) -> None:
        """Close the connection."""
        with suppress(Exception):
            if self._connection is not None:
                self._connection.close()
        with suppress(Exception):
            if self._engine is not None:
                self._engine.dispose()
        self._connection = self._engine = None


class Journal:
    """Writes records in order. `dropped` counts those that neither the database nor the disk accepted."""

    def __init__(
        self,
        workspace: Workspace,
        name: str,
        start: StoreRecord | None,
        notify: Callable[[str], None],
        *,
        wait: float = 5.0,
    ) -> None:
        self.database = Database(workspace, name, start, wait)
        self.spool = Spool(workspace.folder(name))
        self.dropped = 0
        self._memory: deque[StoreRecord] = deque()
        self._notify = notify
        self._delay = FIRST_RETRY
        self._retry_at: float | None = time.monotonic() if self.spool.files() else None
        self._told_disk = self._told_drop = False

    @property
    def durable(self) -> bool:
        """Whether everything written so far is on disk."""
        return not self._memory

    def seconds_to_retry(self) -> float | None:
        """Seconds until the next try of the database; None if nothing waits."""
        return None if self._retry_at is None else max(0.0, self._retry_at - time.monotonic())

    def write(self, record: StoreRecord) -> None:
        """Write one record to the database, or to the spool."""
        if self.seconds_to_retry() == 0.0:
            self.retry()
        if self._retry_at is None:
            try:
                self.database.apply(record)
                return
            except Unavailable as error:
                self._begin_waiting(str(error))
            except ValueError as error:
                self._refuse(f"a record of kind {record.kind} was left out ({error})")
                return
        self._set_down(record)

    def retry(self) -> None:
        """Write the waiting records, oldest first; doubles the delay if the database is still away."""
        written = 0
        try:
            for path in self.spool.files():
                written += self._write_file(path)
            while self._memory:
                self._write_from_memory()
                written += 1
        except (Unavailable, OSError):
            self._retry_at = time.monotonic() + self._delay
            self._delay = min(2 * self._delay, LAST_RETRY)
            self._move_to_disk()
            return
        self.spool.tidy()
        self._retry_at, self._delay = None, FIRST_RETRY
        self._told_disk = self._told_drop = False
        if written:
            self._notify(f"The run store {self.database.workspace.place} is up to date: {written} records caught up.")

    def close(self) -> None:
        """Try once more, whatever the delay, and close."""
        if self._retry_at is not None:
            self.retry()
        self.database.close()

    def _write_file(self, path: Path) -> int:
        try:
            record = StoreRecord.from_bytes(read_plain(path))
            self.database.apply(record)
        except ValueError as error:
            self.spool.set_aside(path)
            self._refuse(f"{path} was set aside ({error})")
            return 0
        path.unlink()
        return 1

    def _write_from_memory(self) -> None:
        try:
            self.database.apply(self._memory[0])
        except ValueError as error:
            self._refuse(f"a record of kind {self._memory[0].kind} was left out ({error})")
        self._memory.popleft()

    def _begin_waiting(self, reason: str) -> None:
        self._retry_at = time.monotonic() + self._delay
        self._notify(
            f"The run store {self.database.workspace.place} cannot be written ({reason}). Training continues; its "
            f"records are kept in {self.spool.folder} until the store is back."
        )

    def _set_down(self, record: StoreRecord) -> None:
        self._memory.append(record)
        self._move_to_disk()

    def _move_to_disk(self) -> None:
        """Write the records in memory to files; if that fails too, keep the newest in memory."""
        try:
            while self._memory:
                self.spool.add(self._memory[0])
                self._memory.popleft()
        except OSError as error:
            if not self._told_disk:
                self._told_disk = True
                self._notify(
                    f"{self.spool.folder} cannot be written either ({error.strerror}): the newest {MAX_IN_MEMORY} "
                    "records are kept in memory, and are lost if the run ends before the store or the disk is back."
                )
        while len(self._memory) > MAX_IN_MEMORY:
            self._memory.popleft()
            self.dropped += 1
            if not self._told_drop:
                self._told_drop = True
                self._notify("Records are being lost: neither the run store nor the disk can be written.")

    def _refuse(self, text: str) -> None:
        self.dropped += 1
        self._notify(f"Run store: {text}.")


def _reason(error: BaseException) -> str:
    """The cause in one line, without the SQL statement and its values."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return (str(cause).strip().partition("\n")[0] or type(cause).__name__)[:300]
