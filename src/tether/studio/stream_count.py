"""How many live streams each person has open."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from threading import Lock
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tether.studio.replies import Refused


class Streams:
    """Counts from the moment a stream is asked for, so that no two requests are given the last place."""

    def __init__(self, most: int) -> None:
        self._most, self._open, self._lock = most, Counter[int](), Lock()

    def enter(self, person: int) -> StreamPlace:
        """Take a place, which has to be left."""
        with self._lock:
            if self._open[person] >= self._most:
                raise Refused(429, f"at most {self._most} live streams at a time: close a page")
            self._open[person] += 1
        return StreamPlace(self, person)

    def leave(self, person: int) -> None:
        """Let another have a place."""
        with self._lock:
            self._open[person] -= 1
            if self._open[person] <= 0:
                del self._open[person]


class StreamPlace:
    """One of a person's streams. It can be left more than once, and counts once."""

    def __init__(self, streams: Streams, person: int) -> None:
        self._streams, self._person, self._taken = streams, person, True

    def leave(self) -> None:
        """Leave it."""
        if self._taken:
            self._taken = False
            self._streams.leave(self._person)


class EventStream(StreamingResponse):
    """Server-sent events; its place is left when it is over, however it ends, also before its first event."""

    def __init__(self, body: AsyncIterator[str], place: StreamPlace) -> None:
        super().__init__(body, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._body, self._place = body, place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        body: Any = self._body
        try:
            async with aclosing(body):
                await super().__call__(scope, receive, send)
        finally:
            self._place.leave()
