"""Find, open and migrate the database of a workspace.

A workspace is a folder of runs. Its database is `tether.db` in that folder, unless the variable TETHER_STORE or a URL
from the caller names another: any SQLite file, or a PostgreSQL server. A migration is one transaction under a lock, so
several processes can open a database at once: the second one waits and then finds nothing to do.
"""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool, QueuePool

from tether.errors import ConfigError, StorageError
from tether.redact import redact_url, remember_url
from tether.store.database.schema import HEAD

# -- migrations ---------------------------------------------------------------------------------------------------

MIGRATIONS = Path(__file__).parent / "migrations"
POSTGRES_LOCK = 0x7E74_6872  # any number that nothing else uses as a lock


def migrate(engine: Engine) -> None:
    """Upgrade the tables to this version of Tether."""
    with engine.connect() as connection:
        if _version(connection) == HEAD:  # the usual case, which does not import alembic
            return
    with engine.begin() as connection:  # in SQLite this takes the write lock
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRES_LOCK})
        version = _version(connection)
        if version == HEAD:
            return
        if version is not None and not re.fullmatch(r"\d{4}", version):
            raise StorageError(
                f"the run store is damaged: its tables claim to be of version {version!r}, which no Tether "
                "writes; restore it from a copy, or move it away and resume its runs, which keep their metrics"
            )
        if version is not None and version > HEAD:
            raise StorageError(
                f"the run store has tables of a newer Tether (version {version}, this one knows {HEAD}): update Tether"
            )
        _upgrade(connection)


def _version(connection: Connection) -> str | None:
    """The last migration that was applied; None if there is none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


# -- workspaces and their databases -------------------------------------------------------------------------------

VARIABLE = "TETHER_STORE"
FILE = "tether.db"
RUN_STATEMENT = 60.0  # time limit of one PostgreSQL statement in seconds, for training
SERVER_STATEMENT = 15.0  # the same for a server, where users wait for the answer


@dataclass(frozen=True)
class Workspace:
    """A folder of runs and the database that describes them."""

    directory: Path
    url: URL

    @cached_property
    def key(self) -> str:
        """The workspace column of its runs: empty for `tether.db` in the folder, so that both can be moved together."""
        if self.file is not None and self.file.resolve() == (self.directory / FILE).resolve():
            return ""
        return f"{socket.gethostname()}:{self.directory.resolve()}"

    @property
    def file(self) -> Path | None:
        """The database's file; None for a server."""
        if self.url.get_backend_name() != "sqlite" or not self.url.database:
            return None
        return Path(self.url.database)

    @property
    def place(self) -> str:
        """The database's address for display, without a password."""
        return str(self.file) if self.file is not None else redact_url(self.url.render_as_string(hide_password=False))

    def anchored(self) -> Workspace:
        """The same with absolute paths, for threads: a reward may change the working folder."""
        file = self.file
        is_named = file is not None and not str(file).startswith((":", "file:"))
        url = self.url.set(database=str(file.absolute())) if file is not None and is_named else self.url
        return Workspace(self.directory.absolute(), url)

    def folder(self, name: str) -> Path:
        """The folder of a run. Names may come from other people's files, so one that leads out of here is refused."""
        if not is_inside(name):
            raise ConfigError(f"run.name: {name!r} is not the name of a folder in the workspace {self.directory}")
        return self.directory / name

    def name_of(self, folder: Path) -> str:
        """The name of a run: its folder relative to the workspace, also if a link in the workspace leads to it."""
        for place, root in (
            (folder.resolve(), self.directory.resolve()),
            (absolute(folder), absolute(self.directory)),
            (folder.parent.resolve() / folder.name, self.directory.resolve()),
        ):
            if place != root and place.is_relative_to(root) and ".." not in place.parts:
                return place.relative_to(root).as_posix()
        raise ConfigError(f"run.directory: {folder} does not lie in the workspace {self.directory}")


def absolute(path: Path) -> Path:
    """The absolute path; links are not resolved."""
    return Path(os.path.abspath(path))  # noqa: PTH100 (resolve() follows links)


def is_inside(name: str) -> bool:
    """Whether a run's name stays inside its workspace: parts separated by `/`, none empty or `..`."""
    return bool(name) and not any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in name.split("/"))


def workspace_at(directory: str | Path, url: str | None = None) -> Workspace:
    """The workspace of a folder, which need not exist yet."""
    directory = Path(directory).expanduser()
    given = url or os.environ.get(VARIABLE) or None
    if given:
        remember_url(given)
    return Workspace(directory, _parsed(given) if given else URL.create("sqlite", database=str(directory / FILE)))


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError(
            f"{VARIABLE}: not the address of a database; write sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None
    backend = parsed.drivername.partition("+")[0]
    if backend in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ConfigError(f"{VARIABLE}: {backend} is not supported; use sqlite or postgresql")
    if not parsed.database or parsed.database == ":memory:":
        raise ConfigError(f"{VARIABLE}: a run store must outlive the process; name a file: sqlite:///runs/tether.db")
    return parsed


def open_engine(workspace: Workspace, *, wait: float = 5.0, kept: int = 0) -> Engine:
    """Open the database, create it if needed, and migrate its tables.

    `wait`: seconds to wait for locks. `kept`: connections that stay open between uses, for a server.
    """
    pool: dict[str, Any] = {"poolclass": NullPool}
    if kept:
        pool = {"poolclass": QueuePool, "pool_size": kept, "max_overflow": 64, "pool_pre_ping": True, "pool_timeout": 5}
    if workspace.file is not None:
        workspace.file.parent.mkdir(parents=True, exist_ok=True)
        engine = _sqlite(workspace.url, wait, pool)
    else:
        engine = _postgres(workspace.url, wait, pool, SERVER_STATEMENT if kept else RUN_STATEMENT)
    try:
        migrate(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _sqlite(url: URL, wait: float, pool: dict[str, Any]) -> Engine:
    """SQLite with a write-ahead log. Every commit is on disk before it returns; writers queue for the write lock."""
    engine = create_engine(url, connect_args={"timeout": wait, "check_same_thread": False}, **pool)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # we begin transactions ourselves, also around changes of tables
        _write_ahead(connection, wait)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        # A transaction that reads first and writes later cannot wait for the lock; BEGIN IMMEDIATE can.
        read_only = connection.get_execution_options().get("reads_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _write_ahead(connection: Any, wait: float) -> None:
    """Enable the write-ahead log. SQLite's busy timeout does not apply here, so this loop waits."""
    import sqlite3

    deadline = time.monotonic() + wait
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return  # a file system without shared memory keeps the rollback journal, which is slower but as safe
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _postgres(url: URL, wait: float, pool: dict[str, Any], statement: float) -> Engine:
    try:
        from tether.store.database.patience import WatchedPool, postgres_engine
    except ImportError:
        raise StorageError(
            f"{VARIABLE}: PostgreSQL needs the package psycopg: pip install 'tether-rl[postgres]'"
        ) from None
    if pool["poolclass"] is QueuePool:
        pool = pool | {"poolclass": WatchedPool}
    return postgres_engine(url, wait=wait, statement=statement, pool=pool)
