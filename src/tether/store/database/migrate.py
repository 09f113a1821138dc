"""Bringing a database's tables up to date, also when several processes open it at once.

The whole upgrade is one transaction under a lock of its own: whoever comes second waits, and finds nothing to do.
"""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from tether.errors import StorageError
from tether.store.database.schema import HEAD

MIGRATIONS = Path(__file__).parent / "migrations"
POSTGRES_LOCK = 0x7E74_6872  # any number that no one else locks by


def migrate(engine: Engine) -> None:
    """Make the tables what this version of Tether expects."""
    with engine.connect() as connection:
        if _version(connection) == HEAD:  # the usual case, for which alembic need not be imported
            return
    with engine.begin() as connection:  # in SQLite this takes the write lock
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": POSTGRES_LOCK})
        version = _version(connection)
        if version == HEAD:
            return
        if version is not None and not re.fullmatch(r"\d{4}", version):
            raise StorageError(
                f"the run store is damaged: it says that its tables are of version {version!r}, which no Tether "
                "writes; put it back from a copy, or move it away and resume its runs, which keep their metrics"
            )
        if version is not None and version > HEAD:
            raise StorageError(
                f"the run store has tables of a newer Tether (version {version}, this one knows {HEAD}): update Tether"
            )
        _upgrade(connection)


def _version(connection: Connection) -> str | None:
    """The last change that was made; None where there is none."""
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
