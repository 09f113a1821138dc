"""The routes that read runs: the list, one run, its curves, findings, answers, tokens, and live events.

Live events are server-sent events, read from the store a few times a second. The id of an event is a cursor,
`step.event`: the last step and the last event that were sent. A page that lost its connection sends the cursor back and
continues from there.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from tether import __version__
from tether.config import RECIPES
from tether.config.base import MAX_GROUP, MAX_NOTE, MAX_TAGS
from tether.config.schema import REQUIRED, Leaf, describe, union_members
from tether.doctor.findings import Finding, Healthy
from tether.errors import StorageError
from tether.reports.export_data import write_table
from tether.store.database.schema import without_infinities
from tether.store.read import change_notes, config_diff, list_runs, read_rollouts
from tether.studio.context import Studio, entry_of, person_of, studio_of
from tether.studio.metric_cache import shown_series
from tether.studio.people import Entry, EventStream
from tether.studio.replies import BIGGEST, Body, Refused, Reply, api_router
from tether.studio.run_queries import (
    Pulse,
    answers_at,
    event_row,
    kept_steps,
    last_event,
    listed,
    news,
    pulses,
    run_page,
    run_with_id,
    seconds_left,
    sparks,
    summary_row,
    token_page,
)

router = api_router()

Id = Annotated[int, Path(ge=0, le=BIGGEST)]
Number = Annotated[int, Path(ge=0, le=BIGGEST)]
MAX_COMPARED = 12


class Notes(Body):
    """A run's note, tags and group."""

    note: str | None = Field(default=None, max_length=MAX_NOTE)
    tags: tuple[str, ...] | None = Field(default=None, max_length=MAX_TAGS)
    group: str | None = Field(default=None, max_length=MAX_GROUP)


@router.get("/me")
async def me(request: Request) -> Any:
    """The person who sent the request. The workspace's path is not shown to annotators."""
    studio, person = studio_of(request), person_of(request)
    place = str(studio.opened.workspace.directory) if person.role == "owner" else None
    return Reply({"role": person.role, "name": person.name, "workspace": place, "version": __version__})


@router.get("/runs")
def all_runs(request: Request) -> Any:
    """Every run, the most recently written first."""
    studio = studio_of(request)
    found = list_runs(studio.opened)
    drawn = sparks(studio.opened, found)
    return Reply({"runs": [summary_row(run, drawn[run.id], seconds_left(studio.opened, run)) for run in found]})


@router.get("/runs/{run}")
def one_run(request: Request, run: Id) -> Any:
    """A run with its settings and events."""
    studio = studio_of(request)
    return Reply(run_page(studio.opened, run_with_id(studio.opened, run), studio.metrics))


@router.post("/runs/{run}/notes")
def say_about(request: Request, run: Id, said: Notes) -> Any:
    """Change a run's note, tags or group; fields that are not given stay."""
    opened = studio_of(request).opened
    notes = change_notes(opened, run_with_id(opened, run), said.model_dump(exclude_none=True))
    return Reply({"note": notes.note, "tags": list(notes.tags), "group": notes.group})


@router.get("/diff")
def diff(request: Request, runs: Annotated[str, Query(max_length=1000)]) -> Any:
    """The settings in which two or more runs differ, by dotted key; `runs` lists their ids, separated by commas."""
    opened = studio_of(request).opened
    words = runs.split(",")
    if len(set(words)) < 2 or len(words) > MAX_COMPARED or not all(word.isdecimal() for word in words):
        raise Refused(422, f"runs: give the ids of 2 to {MAX_COMPARED} runs, separated by commas")
    compared = [run_with_id(opened, int(word)) for word in words]
    rows = config_diff([run.config for run in compared])
    return Reply(
        {
            "runs": [{"id": run.id, "name": run.name, "method": run.method} for run in compared],
            "settings": [{"key": key, "values": values} for key, values in rows.items()],
        }
    )


@router.get("/runs/{run}/metrics")
def curves(
    request: Request,
    run: Id,
    names: Annotated[str, Query(max_length=20_000)] = "",
    points: Annotated[int, Query(ge=2, le=100_000)] = 2000,
) -> Any:
    """The curves of a run: all, or those named, separated by commas."""
    studio = studio_of(request)
    run_with_id(studio.opened, run)
    series = studio.metrics.series(run, names.split(",") if names else None)
    return Reply({"series": {name: shown_series(series[name], points) for name in sorted(series)}})


@router.get("/runs/{run}/metrics.csv")
def curves_as_table(request: Request, run: Id) -> Response:
    """All metrics of a run as CSV, one row per step; values that are missing or not finite are empty."""
    studio = studio_of(request)
    name = run_with_id(studio.opened, run).name
    series = studio.metrics.series(run)
    rows: dict[int, dict[str, float]] = {}
    for metric, one in series.items():
        for step, value in zip(one.steps.tolist(), one.values.tolist(), strict=True):
            rows.setdefault(step, {"step": step}).update({metric: value} if value == value else {})
    text = io.StringIO()
    write_table(text, [rows[step] for step in sorted(rows)])
    return as_download(text.getvalue(), f"{name}-metrics.csv", "text/csv")


@router.get("/runs/{run}/findings")
def findings(request: Request, run: Id) -> Any:
    """The doctor's findings about a run."""
    studio = studio_of(request)
    verdicts = studio.doctor.of(run_with_id(studio.opened, run)).verdicts
    kinds: dict[str, list[Any]] = {"findings": [], "healthy": [], "too_little": []}
    for audit, verdict in verdicts.items():
        if isinstance(verdict, Finding):
            kinds["findings"].append(verdict.as_json())
        elif isinstance(verdict, Healthy):
            kinds["healthy"].append({"audit": audit, "saw": verdict.saw})
        else:
            kinds["too_little"].append({"audit": audit, "lacks": verdict.lacks})
    return Reply(kinds)


@router.get("/runs/{run}/rollouts")
def rollout_list(
    request: Request,
    run: Id,
    step: Annotated[int | None, Query(ge=0, le=BIGGEST)] = None,
    sort: Literal["row", "score", "kl", "advantage", "length"] = "row",
    q: Annotated[str, Query(max_length=1000)] = "",
    truncated: bool | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    offset: Annotated[int, Query(ge=0, le=BIGGEST)] = 0,
) -> Any:
    """The answers of one step, by default the newest kept one."""
    opened = studio_of(request).opened
    run_with_id(opened, run)
    kept = kept_steps(opened, run)
    if not kept:
        return Reply({"step": None, "total": 0, "rollouts": []})
    at = kept[-1] if step is None else step
    if at not in kept:
        raise Refused(404, f"the answers of step {at} were not kept")
    rows = listed(read_rollouts(opened, run, at), sort=sort, text=q, truncated=truncated)
    return Reply({"step": at, "total": len(rows), "rollouts": rows[offset : offset + limit]})


@router.get("/runs/{run}/rollouts/{step}/{row}")
def one_rollout(request: Request, run: Id, step: Number, row: Number) -> Any:
    """One answer, token by token."""
    opened = studio_of(request).opened
    run_with_id(opened, run)
    found = read_rollouts(opened, run, step, row)
    if not found:
        raise Refused(404, f"answer {row} of step {step} was not kept")
    return Reply(token_page(found[0]))


@router.get("/runs/{run}/rollouts/{step}/{row}/top_logprobs")
def top_logprobs_of_one(request: Request, run: Id, step: Number, row: Number) -> Any:
    """The most likely tokens at each position, as (text, log-prob); null if they were not recorded."""
    opened = studio_of(request).opened
    run_with_id(opened, run)
    found = read_rollouts(opened, run, step, row)
    others = found[0].top_logprobs if found else None
    return Reply({"top_logprobs": None if others is None else others.at_each()})


@router.get("/runs/{run}/prompts/{prompt_id:path}")
def prompt_over_steps(request: Request, run: Id, prompt_id: str) -> Any:
    """Every kept answer to one prompt, over the steps of training."""
    studio = studio_of(request)
    run_with_id(studio.opened, run)
    places = studio.prompts.rows_with(run, kept_steps(studio.opened, run), prompt_id)
    return Reply({"steps": answers_at(studio.opened, run, places)})


# -- settings -----------------------------------------------------------------------------------------------------


@router.get("/methods")
async def methods() -> Any:
    """The methods that can train a run."""
    sent = {name: (recipe.__doc__ or "").strip().partition("\n")[0] for name, recipe in RECIPES.items()}
    return Reply({"methods": [{"name": name, "summary": summary} for name, summary in sent.items()]})


@router.get("/schema/{method}")
def schema(method: str) -> Any:
    """Every setting of a method with its type, default and meaning."""
    if method not in RECIPES:
        raise Refused(404, f"unknown method: choose one of {', '.join(RECIPES)}")
    return Reply({"fields": [_field(leaf) for leaf in describe(RECIPES[method])]})


def _field(leaf: Leaf) -> dict[str, Any]:
    required = leaf.default is REQUIRED
    return {
        "key": leaf.key,
        "type": leaf.type,
        "default": None if required else leaf.default,
        "required": required,
        "description": leaf.description,
        "choices": _choices(leaf),
    }


def _choices(leaf: Leaf) -> list[Any] | None:
    """The allowed values of a setting, if they are a fixed set."""
    literals = [
        kind.__args__ for kind in union_members(leaf.annotation) if getattr(kind, "__origin__", None) is Literal
    ]
    return [word for words in literals for word in words] or None


def as_download(text: str, name: str, kind: str) -> Response:
    """A text as a download; the file name is reduced to safe characters."""
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "-" for letter in name)
    headers = {"content-disposition": f'attachment; filename="{safe}"'}
    return Response(text.encode("utf-8", "surrogatepass"), media_type=f"{kind}; charset=utf-8", headers=headers)


# -- live events --------------------------------------------------------------------------------------------------

stream_router = APIRouter(prefix="/api")


@dataclass(frozen=True)
class Cursor:
    """The last step and the last event that were sent."""

    step: int
    event: int

    def __str__(self) -> str:
        return f"{self.step}.{self.event}"


def read_cursor(text: str) -> Cursor | None:
    """Parse a cursor that a page sends back; None if it is invalid."""
    step, dot, event = text.partition(".")
    well_made = dot and step.lstrip("-").isdecimal() and event.isdecimal() and len(text) < 24
    return Cursor(max(-1, int(step)), int(event)) if well_made else None


@stream_router.get("/stream", response_model=None)
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
    """The messages of each poll, and a comment from time to time, which detects a dead connection.

    It ends when the person's session is ended.
    """
    yield "retry: 1000\n\n"
    spoke = time.monotonic()
    async for messages in looks:
        if not studio.auth.holds(entry):
            return
        if messages:
            yield "".join(messages)
            spoke = time.monotonic()
        elif time.monotonic() - spoke >= studio.settings.heartbeat_seconds:
            yield ": still here\n\n"
            spoke = time.monotonic()
        await asyncio.sleep(studio.settings.poll_seconds)


async def _changes(studio: Studio, run: int | None, cursor: Cursor | None) -> AsyncIterator[list[str]]:
    """One list per poll, empty if nothing changed. It waits while the store is away."""
    sent: dict[int, Pulse] = {}
    while True:
        messages: list[str] = []
        try:
            now = await run_in_threadpool(pulses, studio.opened, run)
            if run is not None and cursor is not None:
                cursor, messages = await run_in_threadpool(_news_of, studio, run, cursor, now)
            for pulse in now:
                if sent.get(pulse.id) != pulse:
                    sent[pulse.id] = pulse
                    messages.append(message("run", asdict(pulse), cursor))
        except StorageError:
            pass
        yield messages


def _news_of(studio: Studio, run: int, cursor: Cursor, now: list[Pulse]) -> tuple[Cursor, list[str]]:
    """New events of one run. A resumed run may have been rewound, and then repeats steps."""
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
