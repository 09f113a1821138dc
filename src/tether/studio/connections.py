"""Connection limits and time-outs of the server, and its garbage collection.

What a server has loaded, kept out of the garbage collector's way.

A full collection looks at every object there is, and meanwhile no one is answered. Of a server's objects nearly all are
its modules, which stay as long as it runs; to look through those takes 50 to 90 ms, and that in the midst of votes.

How connections are held: so many, for so long, and with no more words in the log than anyone reads.

uvicorn waits for a request for as long as the other side likes. Here a connection has `HEADER_SECONDS` to send the head
of a request, `BODY_SECONDS` for each MiB of its body, and must take what it asked for. Where there are `most`
connections, a new one takes the place of the one that has been waited for longest, so that half-open connections push
each other out and not those who ask something.
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
    """Collect what is left over, and take all that remains as here to stay.

    Call it again after much was loaded or let go of: what was taken as here to stay is looked at afresh.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


HEADER_SECONDS = 10.0
BODY_SECONDS = 60.0
BODY_BYTES = 1 << 20  # in each BODY_SECONDS
TAKE_SECONDS = 60.0  # in which something of an answer must have been taken
MAX_CONNECTIONS = 1000
ACCEPTED_AT_ONCE = 16  # connections, before any of them is counted
RESERVED_FILES = 256  # for the database, logs and processes
WANTED_FILES = 4096
MAX_HEAD, MAX_HEADERS = 32 << 10, 200
LOG_RATE = Rate(0.1, 10)  # lines of the same kind

Waiting = OrderedDict[H11Protocol, None]


class LimitedProtocol(H11Protocol):
    """A connection with a time for everything. It stands in `waiting` while its next request has not come whole."""

    most = MAX_CONNECTIONS
    header_seconds, body_seconds, take_seconds = HEADER_SECONDS, BODY_SECONDS, TAKE_SECONDS
    body_bytes = BODY_BYTES
    waiting: Waiting

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._phase: object = None
        self._left = 0  # bytes of an answer that were not taken
        self._got = 0  # bytes since the time of a body was started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; where there are too many, the one waited for longest goes."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            oldest = next(iter(self.waiting), None)
            (oldest or self).transport.abort()
            if oldest is not None:
                self.waiting.pop(oldest, None)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        for timer in (self._deadline, self._taking):
            if timer is not None:
                timer.cancel()
        self._deadline = self._taking = None
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came. Taking thousands of headers apart would hold everyone up."""
        self._got += len(data)
        if self.conn.their_state is h11.IDLE and not has_modest_head(data):
            self._unset_keepalive_if_required()
            self.send_400_response("The head of this request is too long.")
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """An answer is sent; the next request may come. Those that did not wait for it are not looked at."""
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.transport.close()
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """The other side takes nothing."""
        super().pause_writing()
        if self._taking is None:
            self._wait_for_taker()

    def resume_writing(self) -> None:
        """The other side takes something again."""
        super().resume_writing()
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def _wait_for_taker(self) -> None:
        self._left = self.transport.get_write_buffer_size()
        self._taking = self.loop.call_later(self.take_seconds, self._look_at_taker)

    def _look_at_taker(self) -> None:
        """Whoever takes something of a long answer is given more time."""
        if self.transport.get_write_buffer_size() < self._left:
            self._wait_for_taker()
        else:
            self._end()

    def _look(self) -> None:
        """Start the time that the phase has which the connection is in; a phase that goes on gets no more."""
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
        """A body that comes, if slowly, is given more time."""
        if self._got >= self.body_bytes:
            self._wait_for_body()
        else:
            self._end()

    def _end(self) -> None:
        self.transport.abort()


def has_modest_head(data: bytes) -> bool:
    """Whether the head of a request, as far as it has come, has a usual size."""
    end = data.find(b"\r\n\r\n")
    end = len(data) if end < 0 else end
    return end <= MAX_HEAD and data.count(b"\n", 0, end) <= MAX_HEADERS


def limited_protocol(most: int | None = None, **seconds: float) -> type[LimitedProtocol]:
    """The protocol of one server, with a list of its own. `seconds`: other times, by their names."""
    made: dict[str, Any] = {"waiting": OrderedDict(), "most": most or connection_limit(), **seconds}
    return type("LimitedProtocol", (LimitedProtocol,), made)


def connection_limit() -> int:
    """As many connections as there can be files, less what else needs some.

    asyncio does not survive it when there are no files left: it logs thousands of tracebacks and accepts no one.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    files = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return max(16, min(MAX_CONNECTIONS, files - 4 * ACCEPTED_AT_ONCE - min(RESERVED_FILES, files // 4)))


class SparingFilter(logging.Filter):
    """Lets a few lines of each kind through; the next one that passes says how many did not."""

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
    """No one can fill the disk by making the server complain."""
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, SparingFilter) for one in logger.filters):
            logger.addFilter(SparingFilter())


def http_options() -> dict[str, Any]:
    """What both servers of Tether tell uvicorn."""
    return {
        "http": limited_protocol(),
        "ws": "none",
        "backlog": ACCEPTED_AT_ONCE,
        "proxy_headers": False,  # a gate reads them, from proxies that are trusted
        "log_level": "warning",
        "access_log": False,  # requests hold what people wrote
        "server_header": False,
        "timeout_graceful_shutdown": 2,  # live streams never end by themselves
    }
