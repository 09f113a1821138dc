"""How long a database is waited for.

A server that is stopped, or cut off, accepts connections and never answers. Every wait for PostgreSQL ends after some
seconds. A server that was let down does not send all its threads to wait again: while the database is known to be away,
connections are refused at once, and one at a time looks whether it is back.
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
PING_SECONDS = 3.0  # for a connection that was kept: SELECT 1, which takes well under a millisecond
GRACE_SECONDS = 5.0  # after the time that a statement may take by the server's own clock
AWAY_SECONDS = 1.0  # after a failure, until the next look
LOOK_SECONDS = CONNECT_SECONDS + PING_SECONDS + 1  # by then a look has ended


class PatientConnection(psycopg.Connection[Any]):
    """A connection that stops waiting after `patience` seconds, and is closed then."""

    patience = 60.0 + GRACE_SECONDS

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait for the server's answer."""
        return super().wait(self._limited(gen, time.monotonic() + self.patience), *args, **options)

    def _limited(self, gen: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
        """The same generator, which psycopg resumes ten times a second; past the deadline it raises."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()  # what comes later would be taken for the answer to something else
                    raise OperationalError("the database does not answer")
                wanted = gen.send(ready)
        except StopIteration as ended:
            return ended.value


class WatchedPool(QueuePool):
    """A pool that knows whether its database is away."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._state = Lock()
        self._away, self._next_look = False, 0.0

    def connect(self) -> Any:
        """A connection; at once an error where the database was away a moment ago."""
        self._may_look()
        try:
            found = super().connect()
        except StoreAway:  # all connections are in use: the database itself is not known to be away
            raise
        except Exception:
            self.failed()
            raise
        self._away = False
        return found

    def failed(self) -> None:
        """Take note that the database does not answer."""
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
    """PostgreSQL. `wait`: seconds for others' locks; `statement`: the longest that one statement may take."""
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
    """Tell a watched pool of connections that were lost in use."""

    @event.listens_for(engine, "handle_error")
    def lost(context: Any) -> None:
        if context.is_disconnect and isinstance(engine.pool, WatchedPool):
            engine.pool.failed()
