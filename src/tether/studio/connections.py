"""Connection limits and time-outs of the server, limits on its log, and its garbage collection.

uvicorn waits for a request as long as the client likes. Here a connection has `HEADER_SECONDS` to send the head of a
request and `BODY_SECONDS` for each MiB of its body, and it must read its response. At `most` connections, a new one
replaces the one that has been waited for longest, so half-open connections replace each other, not active clients.

A full garbage collection visits every object and blocks all requests meanwhile. Nearly all objects of a server belong
to its modules, which stay until it ends; visiting them takes 50 to 90 ms. `freeze_gc` excludes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections import OrderedDict
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tether.rate_limit import Rate, RateLimit


def freeze_gc() -> None:
    """Collect garbage, then freeze the surviving objects.

    Call it again after much was loaded or released: the frozen objects are then visited once more.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


# -- connections --------------------------------------------------------------------------------------------------

HEADER_SECONDS = 10.0
BODY_SECONDS = 60.0
BODY_BYTES = 1 << 20  # that must arrive in each BODY_SECONDS
TAKE_SECONDS = 60.0  # in which the client must read some of a response
MAX_CONNECTIONS = 1000
ACCEPTED_AT_ONCE = 16  # connections that may be accepted before any is counted
RESERVED_FILES = 256  # file descriptors for the database, logs and processes
WANTED_FILES = 4096
MAX_HEAD, MAX_HEADERS = 32 << 10, 200
LOG_RATE = Rate(0.1, 10)  # lines of the same kind

Waiting = OrderedDict[H11Protocol, None]


class LimitedProtocol(H11Protocol):
    """A connection with a time limit for every phase. It is in `waiting` until its next request is complete."""

    most = MAX_CONNECTIONS
    header_seconds, body_seconds, take_seconds = HEADER_SECONDS, BODY_SECONDS, TAKE_SECONDS
    body_bytes = BODY_BYTES
    waiting: Waiting

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._phase: object = None
        self._left = 0  # bytes of a response that the client has not read
        self._got = 0  # bytes since the timer of a body was started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection; if there are too many, close the one that has been waited for longest."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            oldest = next(iter(self.waiting), None)
            (oldest or self).transport.abort()
            if oldest is not None:
                self.waiting.pop(oldest, None)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        for timer in (self._deadline, self._taking):
            if timer is not None:
                timer.cancel()
        self._deadline = self._taking = None
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle new data. A head with thousands of headers is refused: parsing it would block all requests."""
        self._got += len(data)
        if self.conn.their_state is h11.IDLE and not has_modest_head(data):
            self._unset_keepalive_if_required()
            self.send_400_response("The head of this request is too long.")
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """A response is complete, and the next request may come. Pipelined requests are not read."""
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.transport.close()
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """The client reads nothing."""
        super().pause_writing()
        if self._taking is None:
            self._wait_for_taker()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def _wait_for_taker(self) -> None:
        self._left = self.transport.get_write_buffer_size()
        self._taking = self.loop.call_later(self.take_seconds, self._look_at_taker)

    def _look_at_taker(self) -> None:
        """Give more time to a client that reads some of a long response."""
        if self.transport.get_write_buffer_size() < self._left:
            self._wait_for_taker()
        else:
            self._end()

    def _look(self) -> None:
        """Start the timer of the connection's phase; a phase that continues gets no extra time."""
        theirs = self.conn.their_state
        phase = (theirs, id(self.cycle)) if theirs in (h11.IDLE, h11.SEND_BODY) else None
        if phase == self._phase:
            return
        self._phase = phase
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self.waiting.pop(self, None)
        if phase is None or self.transport.is_closing():
            return
        self.waiting[self] = None
        if theirs is h11.IDLE:
            self._deadline = self.loop.call_later(self.header_seconds, self._end)
        else:
            self._wait_for_body()

    def _wait_for_body(self) -> None:
        self._got = 0
        self._deadline = self.loop.call_later(self.body_seconds, self._look_at_body)

    def _look_at_body(self) -> None:
        """Give more time to a body that arrives slowly."""
        if self._got >= self.body_bytes:
            self._wait_for_body()
        else:
            self._end()

    def _end(self) -> None:
        self.transport.abort()


def has_modest_head(data: bytes) -> bool:
    """Whether the head of a request, as far as it has arrived, has a normal size."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    return end <= MAX_HEAD and data.count(b"\n", 0, end) <= MAX_HEADERS


def limited_protocol(most: int | None = None, **seconds: float) -> type[LimitedProtocol]:
    """The protocol class of one server, with its own list of connections. `seconds`: other time limits, by name."""
    made: dict[str, Any] = {"waiting": OrderedDict(), "most": most or connection_limit(), **seconds}
    return type("LimitedProtocol", (LimitedProtocol,), made)


def connection_limit() -> int:
    """The maximum number of connections: the limit of open files, minus those needed for other purposes.

    asyncio does not handle a lack of file descriptors: it logs thousands of tracebacks and accepts no connection.
    """
    try:
        import resource
    except ImportError:  # Windows
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    files = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return max(16, min(MAX_CONNECTIONS, files - 4 * ACCEPTED_AT_ONCE - min(RESERVED_FILES, files // 4)))


# -- the log ------------------------------------------------------------------------------------------------------


class SparingFilter(logging.Filter):
    """Passes a few lines of each kind; the next line that passes says how many were left out."""

    def __init__(self, rate: Rate = LOG_RATE) -> None:
        super().__init__()
        self._limit, self._left_out = RateLimit(rate), 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        if self._limit.take((record.name, str(record.msg).partition("\n")[0][:40])):
            self._left_out += 1
            return False
        if self._left_out:
            record.msg = f"{record.getMessage()} ({self._left_out} more lines like this and others were left out)"
            record.args, self._left_out = (), 0
        return True


def write_sparingly() -> None:
    """Limit the log, so that no client can fill the disk by causing errors."""
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, SparingFilter) for one in logger.filters):
            logger.addFilter(SparingFilter())


def http_options() -> dict[str, Any]:
    """The uvicorn options of both servers of Tether."""
    return {
        "http": limited_protocol(),
        "ws": "none",
        "backlog": ACCEPTED_AT_ONCE,
        "proxy_headers": False,  # the auth layer reads them, from trusted proxies only
        "log_level": "warning",
        "access_log": False,  # requests contain what people wrote
        "server_header": False,
        "timeout_graceful_shutdown": 2,  # seconds; live streams do not end by themselves
    }
