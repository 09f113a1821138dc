"""Time limits for a database that does not answer.

A stopped or disconnected server may accept connections and never answer. Every wait for PostgreSQL ends after some
seconds. After a failure, new connections are refused at once, and one thread at a time checks whether the database is
back. So a web server does not block all its threads on a dead database.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from threading import Lock
from typing import Any

import psycopg
from psycopg import OperationalError
from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import TimeoutError as StoreAway
from sqlalchemy.pool import QueuePool

CONNECT_SECONDS = 5
PING_SECONDS = 3.0  # for SELECT 1 on a pooled connection, which takes well under a millisecond
GRACE_SECONDS = 5.0  # beyond the statement timeout of the server
AWAY_SECONDS = 1.0  # from a failure to the next check
LOOK_SECONDS = CONNECT_SECONDS + PING_SECONDS + 1  # a check has ended by then


class PatientConnection(psycopg.Connection[Any]):
    """A connection that stops waiting after `patience` seconds and closes itself."""

    patience = 60.0 + GRACE_SECONDS

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait for the server's answer."""
        return super().wait(self._limited(gen, time.monotonic() + self.patience), *args, **options)

    def _limited(self, gen: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
        """Wrap the generator, which psycopg resumes ten times a second; raises after the deadline."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()  # a late answer would be taken for the answer to another statement
                    raise OperationalError("the database does not answer")
                wanted = gen.send(ready)
        except StopIteration as ended:
            return ended.value


class WatchedPool(QueuePool):
    """A connection pool that remembers whether its database is away."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._state = Lock()
        self._away, self._next_look = False, 0.0

    def connect(self) -> Any:
        """A connection; raises at once if the database was away a moment ago."""
        self._may_look()
        try:
            found = super().connect()
        except StoreAway:  # all connections are in use: this does not mean that the database is away
            raise
        except Exception:
            self.failed()
            raise
        self._away = False
        return found

    def failed(self) -> None:
        """Record that the database does not answer."""
        with self._state:
            self._away, self._next_look = True, time.monotonic() + AWAY_SECONDS

    def _may_look(self) -> None:
        with self._state:
            if not self._away:
                return
            now = time.monotonic()
            if now < self._next_look:
                raise StoreAway("it does not answer, and is tried again every second")
            self._next_look = now + LOOK_SECONDS


def postgres_engine(url: URL, *, wait: float, statement: float, pool: dict[str, Any]) -> Engine:
    """A PostgreSQL engine. `wait`: seconds for others' locks; `statement`: time limit of one statement."""
    waits = f"-c lock_timeout={int(wait * 1000)} -c statement_timeout={int(statement * 1000)}"
    arguments = {"connect_timeout": max(2, int(wait)), "options": waits}

    def connect() -> PatientConnection:
        words, named = engine.dialect.create_connect_args(url)
        connection = PatientConnection.connect(*words, **{**named, **arguments})
        connection.patience = statement + GRACE_SECONDS
        return connection

    engine = create_engine(url, creator=connect, **pool)
    ping = engine.dialect.do_ping

    def quick_ping(dbapi_connection: Any) -> bool:
        dbapi_connection.patience = PING_SECONDS
        try:
            return ping(dbapi_connection)
        finally:
            dbapi_connection.patience = statement + GRACE_SECONDS

    engine.dialect.do_ping = quick_ping
    watch(engine)
    return engine


def watch(engine: Engine) -> None:
    """Report connections that were lost in use to a watched pool."""

    @event.listens_for(engine, "handle_error")
    def lost(context: Any) -> None:
        if context.is_disconnect and isinstance(engine.pool, WatchedPool):
            engine.pool.failed()
