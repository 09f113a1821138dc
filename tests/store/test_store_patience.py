"""A database that does not answer is waited for a while, and then not by everyone at once."""

import socket
import threading
import time

import pytest
from sqlalchemy.exc import TimeoutError as StoreAway

pytest.importorskip("psycopg", reason="PostgreSQL is not tested: the package psycopg is not installed")

from psycopg import OperationalError

from tether.errors import StorageError
from tether.store.database import patience
from tether.store.database.open import open_engine, workspace_at
from tether.store.database.patience import WatchedPool
from tether.store.read import OpenWorkspace
from tether.studio.label_store import CastVote, Labels
from tether.studio.people import Person


class Database:
    """What connects, or fails to."""

    def __init__(self) -> None:
        self.away, self.asked = True, 0

    def connect(self):
        self.asked += 1
        if self.away:
            raise OperationalError("no answer")
        return socket.socket()


def test_a_database_that_is_away_is_asked_once_a_while(monkeypatch):
    monkeypatch.setattr(patience, "AWAY_SECONDS", 0.1)
    database = Database()
    pool = WatchedPool(database.connect, pool_size=2, reset_on_return=None)
    with pytest.raises(OperationalError):
        pool.connect()
    for _ in range(20):
        with pytest.raises(StoreAway, match="tried again"):
            pool.connect()
    assert database.asked == 1, "no one waits for it again so soon"
    time.sleep(0.12)
    database.away = False
    pool.connect().close()
    pool.connect().close()
    assert database.asked == 2, "and it is there again for all"


def test_one_looks_and_the_others_do_not_wait(monkeypatch):
    monkeypatch.setattr(patience, "AWAY_SECONDS", 0.05)
    database, looking, go = Database(), threading.Event(), threading.Event()
    pool = WatchedPool(database.connect, pool_size=2, reset_on_return=None)
    with pytest.raises(OperationalError):
        pool.connect()
    time.sleep(0.06)

    def slow(*_):
        looking.set()
        go.wait(60)
        raise OperationalError("no answer")

    def look():
        with pytest.raises(OperationalError):
            pool.connect()

    pool._creator = slow
    first = threading.Thread(target=look)
    first.start()
    assert looking.wait(5)
    with pytest.raises(StoreAway):
        pool.connect()
    assert first.is_alive(), "the first still looks"
    go.set()
    first.join()


def test_a_server_that_never_answers_is_given_up(tmp_path, postgres_server):
    """A statement of which nothing comes back ends by our clock, and the connection with it."""
    engine = open_engine(workspace_at(tmp_path, postgres_server), kept=1)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
        raw = connection.connection.dbapi_connection
        raw.patience = 0.3
        with pytest.raises(Exception, match="does not answer"):
            connection.exec_driver_sql("SELECT pg_sleep(30)")
        assert raw.closed
    time.sleep(patience.AWAY_SECONDS)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT 2").scalar() == 2, "the next one is a new one"
    engine.dispose()


def test_votes_that_wait_together_fail_together(tmp_path, monkeypatch):
    """Each is not tried again by itself while the store is away: sixty-four would wait sixty-four times as long."""
    workspace = workspace_at(tmp_path)
    labels = Labels(OpenWorkspace(workspace, open_engine(workspace, wait=0.1, kept=2)))
    other = open_engine(workspace)
    sent = [(Person(1, "a", "owner"), CastVote(f"u{n}", 1, [0, 1], "left")) for n in range(64)]
    monkeypatch.setattr(labels, "vote", lambda *_: pytest.fail("one was tried by itself"))
    with other.begin():
        results = labels.vote_together(sent)
    assert all(isinstance(one, StorageError) for one in results)
    monkeypatch.undo()
    monkeypatch.setattr("tether.studio.label_queues.TURN_SECONDS", 0.05)
    with labels._lock, pytest.raises(StorageError, match="busy"):
        labels.vote(*sent[0])
