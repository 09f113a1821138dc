"""The tables: made by the migrations, the same as described, and safe to open from many processes at once."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from tether.errors import ConfigError, StorageError
from tether.store.database.open import MIGRATIONS, open_engine, workspace_at
from tether.store.database.schema import HEAD, tables

OPENING = """
import sys
from tether.store.database.open import open_engine, workspace_at
sys.stdin.readline()
open_engine(workspace_at(sys.argv[1], sys.argv[2] or None), wait=20.0).connect().close()
"""


def test_the_migrations_make_the_tables_as_described(tmp_path: Path, store_url):
    engine = open_engine(workspace_at(tmp_path, store_url))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables) == []


def test_the_last_migration_is_the_one_that_the_code_expects():
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


def test_processes_that_open_a_new_store_at_once_all_succeed(tmp_path: Path, store_url):
    command = [sys.executable, "-c", OPENING, str(tmp_path), store_url or ""]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    several = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for process in several:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in several:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors


def test_a_store_of_a_newer_tether_is_refused(tmp_path: Path, store_url):
    workspace = workspace_at(tmp_path, store_url)
    with open_engine(workspace).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StorageError, match="update Tether"):
        open_engine(workspace)


def test_a_damaged_mark_of_the_version_is_told_in_a_sentence(tmp_path: Path, store_url):
    workspace = workspace_at(tmp_path, store_url)
    with open_engine(workspace).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '000&'"))
    with pytest.raises(StorageError, match=r"damaged.*restore it from a copy"):
        open_engine(workspace)


def test_sqlite_keeps_a_write_ahead_log_and_holds_foreign_keys(tmp_path: Path):
    with open_engine(workspace_at(tmp_path)).connect() as connection:
        for pragma, value in {"journal_mode": "wal", "foreign_keys": 1, "synchronous": 2}.items():
            assert connection.execute(text(f"PRAGMA {pragma}")).scalar() == value


def test_the_store_is_in_the_workspace_unless_a_variable_says_otherwise(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("TETHER_STORE", raising=False)
    assert workspace_at(tmp_path).file == tmp_path / "tether.db" and workspace_at(tmp_path).key == ""
    monkeypatch.setenv("TETHER_STORE", "postgresql://me:secret@host/runs")
    other = workspace_at(tmp_path)
    assert other.url.drivername == "postgresql+psycopg" and "secret" not in other.place
    assert other.key.endswith(str(tmp_path)), "workspaces that share a server are told apart"


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/x", "sqlite://", "sqlite:///:memory:"])
def test_an_address_that_cannot_be_a_store_is_told_by_the_variable(tmp_path: Path, url):
    with pytest.raises(ConfigError, match="TETHER_STORE"):
        workspace_at(tmp_path, url)


def test_a_run_outside_its_workspace_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"run\.directory"):
        workspace_at(tmp_path / "runs").name_of(tmp_path / "elsewhere")
