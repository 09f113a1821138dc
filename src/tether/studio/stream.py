"""What happens to runs, as it happens: server-sent events, read from the store a few times a second.

An event's id is a cursor, `step.event`: the last of each that was sent. A page that lost its connection sends it back,
and goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool

from tether.errors import StorageError
from tether.store.database.schema import without_infinities
from tether.studio.context import Studio, entry_of, person_of, studio_of
from tether.studio.people import Entry, EventStream
from tether.studio.replies import BIGGEST
from tether.studio.run_queries import Pulse, event_row, last_event, news, pulses, run_with_id

router = APIRouter(prefix="/api")


@dataclass(frozen=True)
class Cursor:
    """The last step and the last event that were sent."""

    step: int
    event: int

    def __str__(self) -> str:
        return f"{self.step}.{self.event}"


def read_cursor(text: str) -> Cursor | None:
    """What a page sends back; None where it makes no sense."""
    step, dot, event = text.partition(".")
    well_made = dot and step.lstrip("-").isdecimal() and event.isdecimal() and len(text) < 24
    return Cursor(max(-1, int(step)), int(event)) if well_made else None


@router.get("/stream", response_model=None)
async def stream(
    request: Request,
    run: Annotated[int | None, Query(ge=0, le=BIGGEST)] = None,
    last_event_id: Annotated[str, Header(max_length=64)] = "",
) -> EventStream:
    """`run` events of every run; with `run=ID`, that run's `run`, `step` and `event` events."""
    studio = studio_of(request)
    place = studio.streams.enter(person_of(request).id)
    try:
        start = None
        if run is not None:
            found = await run_in_threadpool(run_with_id, studio.opened, run)
            newest = await run_in_threadpool(last_event, studio.opened, run)
            start = read_cursor(last_event_id) or Cursor(found.steps_done - 1, newest)
    except BaseException:
        place.leave()
        raise
    return EventStream(_beating(studio, entry_of(request), _changes(studio, run, start)), place)


async def _beating(studio: Studio, entry: Entry, looks: AsyncIterator[list[str]]) -> AsyncIterator[str]:
    """The messages of each look, and a comment now and then, by which a dead connection is noticed.

    It ends when the one who listens was put out.
    """
    yield "retry: 1000\n\n"
    spoke = time.monotonic()
    async for messages in looks:
        if not studio.door.holds(entry):
            return
        if messages:
            yield "".join(messages)
            spoke = time.monotonic()
        elif time.monotonic() - spoke >= studio.settings.heartbeat_seconds:
            yield ": still here\n\n"
            spoke = time.monotonic()
        await asyncio.sleep(studio.settings.poll_seconds)


async def _changes(studio: Studio, run: int | None, cursor: Cursor | None) -> AsyncIterator[list[str]]:
    """One list a look, empty where nothing changed. A store that is away for a moment is waited for."""
    told: dict[int, Pulse] = {}
    while True:
        messages: list[str] = []
        try:
            now = await run_in_threadpool(pulses, studio.opened, run)
            if run is not None and cursor is not None:
                cursor, messages = await run_in_threadpool(_news_of, studio, run, cursor, now)
            for pulse in now:
                if told.get(pulse.id) != pulse:
                    told[pulse.id] = pulse
                    messages.append(message("run", asdict(pulse), cursor))
        except StorageError:
            pass
        yield messages


def _news_of(studio: Studio, run: int, cursor: Cursor, now: list[Pulse]) -> tuple[Cursor, list[str]]:
    """What is new of one run. A run that was resumed may have taken steps back, which it takes again."""
    done = now[0].step if now else 0
    cursor = Cursor(min(cursor.step, done - 1), cursor.event)
    steps, happened = news(studio.opened, run, cursor.step, cursor.event)
    messages: list[str] = []
    for step, metrics in steps:
        cursor = Cursor(step, cursor.event)
        messages.append(message("step", {"id": run, "step": step, "metrics": metrics}, cursor))
    for row in happened:
        cursor = Cursor(cursor.step, row.id)
        messages.append(message("event", {"id": run} | event_row(row), cursor))
    return cursor, messages


def message(kind: str, data: dict[str, Any], cursor: Cursor | None) -> str:
    """One server-sent event. The data is JSON in ASCII on one line, so that no text can end it early."""
    place = f"id: {cursor}\n" if cursor is not None else ""
    return f"{place}event: {kind}\ndata: {json.dumps(without_infinities(data), allow_nan=False)}\n\n"
