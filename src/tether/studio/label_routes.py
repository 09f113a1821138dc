"""The routes by which people judge: queues, what to ask next, votes, agreement, export and import, raters."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from tether.studio.agreement import Vote, agreement
from tether.studio.ballots import SKIPPED
from tether.studio.context import Studio, person_of, studio_of
from tether.studio.doubts import ask_doubtful_first, reward_model, scored_by
from tether.studio.exchange import as_lines, export_records, imported, read_lines
from tether.studio.label_fill import item_from_record, items_from_run, with_repeats
from tether.studio.label_queues import NewItem
from tether.studio.label_store import Ballot
from tether.studio.people import Role
from tether.studio.replies import BIGGEST, Body, Refused, Reply
from tether.studio.run_queries import run_with_id
from tether.studio.run_routes import as_download

router = APIRouter(prefix="/api", default_response_class=Reply)

Id = Annotated[int, Path(ge=0, le=BIGGEST)]
Place = Annotated[int, Field(ge=0, le=BIGGEST)]
Form = Literal["pairs", "rankings", "messages"]
MOST_RECORDS = 20_000


class NewQueue(Body):
    """A queue to be made."""

    name: str = Field(min_length=1, max_length=200)
    kind: Literal["pair", "ranking", "demonstration"] = "pair"
    guidelines: str = Field(default="", max_length=50_000)


class QueueChange(Body):
    """What may be changed of a queue."""

    name: str | None = Field(default=None, min_length=1, max_length=200)
    guidelines: str | None = Field(default=None, max_length=50_000)
    open: bool | None = None


class Fill(Body):
    """Where a queue's items come from."""

    origin: Literal["run", "file", "uncertain", "chat"] = Field(alias="from")
    run: Place | None = None
    reward_run: Place | None = None  # who is unsure; by default the newest reward model, or else the scores as recorded
    other_run: Place | None = None
    step: Place | None = None
    count: Annotated[int, Field(ge=1, le=5000)] = 50
    repeats: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    records: list[dict[str, Any]] = Field(default_factory=list, max_length=MOST_RECORDS)
    text: str = ""


class Rescore(Body):
    """The reward model whose doubt counts."""

    reward_run: Place | None = None


class NewVote(Body):
    """A vote. `client_uid` is new for each vote, and the same when it is sent again."""

    client_uid: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    item_id: Place
    order: list[Place] = Field(default_factory=list, max_length=20)
    choice: str | list[int] = ""
    skip: bool = False
    seconds: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] | None = None


class Undo(Body):
    """Which queue's last vote to take back; by default the last of all."""

    queue_id: Place | None = None


class Import(Body):
    """Records in the usual columns, as a list or as JSONL."""

    records: list[dict[str, Any]] = Field(default_factory=list, max_length=MOST_RECORDS)
    text: str = ""


class NewRater(Body):
    """Someone to be let in. An annotator with a `queue_id` sees that queue alone."""

    name: str = Field(min_length=1, max_length=80)
    role: Role = "annotator"
    queue_id: Place | None = None


# -- queues -------------------------------------------------------------------------------------------------------


@router.get("/label/queues")
def queues(request: Request) -> Any:
    """The queues, with how far the one who asks is in each."""
    return Reply({"queues": studio_of(request).labels.queues(person_of(request))})


@router.post("/label/queues")
def add_queue(request: Request, new: NewQueue) -> Any:
    """Make a queue."""
    made = studio_of(request).labels.add_queue(person_of(request), new.name, new.kind, new.guidelines)
    return Reply({"id": made})


@router.post("/label/queues/{queue}")
def change_queue(request: Request, queue: Id, change: QueueChange) -> Any:
    """Rename a queue, change its guidelines, open or close it."""
    values = change.model_dump(exclude_none=True)
    if not values:
        raise Refused(422, "the body: say what to change: name, guidelines or open")
    studio_of(request).labels.change_queue(person_of(request), queue, **values)
    return Reply({"id": queue})


@router.post("/label/queues/{queue}/fill")
def fill(request: Request, queue: Id, wanted: Fill) -> Any:
    """Put items into a queue, and hidden repeats of a fraction of them."""
    studio = studio_of(request)
    kind = studio.labels.queue(queue).kind
    new = with_repeats(_new_items(studio, kind, wanted), wanted.repeats)
    origin = {"from": wanted.origin, "run": wanted.run, "other_run": wanted.other_run, "step": wanted.step}
    studio.labels.add_items(person_of(request), queue, new, origin=origin)
    repeats = sum(item.repeats is not None for item in new)
    return Reply({"added": len(new) - repeats, "repeats": repeats})


def _new_items(studio: Studio, kind: str, wanted: Fill) -> list[NewItem]:
    if wanted.origin in ("file", "chat"):
        records = wanted.records or read_lines(wanted.text)
        if not records:
            raise Refused(422, "records: there are none")
        return [item_from_record(kind, record, f"record {place}") for place, record in enumerate(records, start=1)]
    if wanted.run is None:
        raise Refused(422, "run: say whose answers to take")
    ids = [wanted.run] if wanted.other_run is None else [wanted.run, wanted.other_run]
    runs = [run_with_id(studio.opened, run) for run in ids]
    if wanted.origin == "run":
        return items_from_run(studio.opened, kind, runs, count=wanted.count, step=wanted.step)
    model = reward_model(studio, wanted.reward_run)
    rescore = None if model is None else partial(scored_by, studio, model)
    limits = {"count": wanted.count, "step": wanted.step, "uncertain": True, "rescore": rescore}
    return items_from_run(studio.opened, kind, runs, **limits)


@router.post("/label/queues/{queue}/rescore")
def rescore(request: Request, queue: Id, wanted: Rescore | None = None) -> Any:
    """Ask the pairs that a reward model, by default the newest, is least sure of first."""
    studio = studio_of(request)
    studio.labels.queue(queue)
    model = reward_model(studio, wanted.reward_run if wanted is not None else None)
    if model is None:
        raise Refused(409, "there is no reward model yet: train one on the Train page")
    return Reply({"items": ask_doubtful_first(studio, person_of(request), queue, model), "by": model.name})


# -- voting -------------------------------------------------------------------------------------------------------


@router.get("/label/queues/{queue}/next")
async def next_item(request: Request, queue: Id) -> Any:
    """What to judge next; the answers are in the order to show them."""
    return Reply(await asyncio.wrap_future(studio_of(request).desk.ask(person_of(request), queue)))


@router.post("/label/votes")
async def vote(request: Request, new: NewVote) -> Any:
    """Keep a vote. It is on disk when this is answered; sent again it is the same vote."""
    choice = SKIPPED if new.skip else new.choice
    ballot = Ballot(new.client_uid, new.item_id, new.order, choice, new.seconds)
    kept = studio_of(request).desk.hand_in(person_of(request), ballot)
    return Reply({"id": await asyncio.wrap_future(kept)})


@router.post("/label/votes/undo")
def undo(request: Request, wanted: Undo | None = None) -> Any:
    """Take the last vote back; its item can be voted on again."""
    queue = wanted.queue_id if wanted is not None else None
    return Reply({"item_id": studio_of(request).labels.undo(person_of(request), queue)})


# -- what came of it ----------------------------------------------------------------------------------------------


@router.get("/label/queues/{queue}/agreement")
def queue_agreement(request: Request, queue: Id) -> Any:
    """How far raters agree with each other (Krippendorff's alpha) and with themselves (hidden repeats)."""
    labels = studio_of(request).labels
    labels.queue(queue)
    found = labels.standing_votes(queue)
    told = agreement(Vote(row.item_id, row.repeat_of, row.rater_id, row.kind, row.order, row.choice) for row in found)
    names = {rater["id"]: rater["name"] for rater in labels.raters()}
    for rater in told["raters"]:
        rater["name"] = names.get(rater["id"], "")
    return Reply(told)


@router.get("/label/queues/{queue}/export")
def export(request: Request, queue: Id, form: Annotated[Form, Query(alias="format")] = "pairs") -> Response:
    """The votes of a queue as JSONL."""
    labels = studio_of(request).labels
    name = labels.queue(queue).name
    lines = as_lines(export_records(labels.standing_votes(queue), form))
    return as_download(lines, f"{name}-{form}.jsonl", "text/plain")


@router.post("/label/queues/{queue}/import")
def import_records(request: Request, queue: Id, given: Import) -> Any:
    """Take records in with what they say, as votes of a rater called `import`."""
    labels = studio_of(request).labels
    found = imported(labels.queue(queue).kind, given.records or read_lines(given.text))
    if not found:
        raise Refused(422, "records: there are none")
    new, choices = [one.item for one in found], [one.choice for one in found]
    return Reply({"items": len(new), "votes": labels.take_in(person_of(request), queue, new, choices)})


# -- people -------------------------------------------------------------------------------------------------------


@router.get("/raters")
def raters(request: Request) -> Any:
    """Everyone who may enter, without their tokens: those are not kept."""
    return Reply({"raters": studio_of(request).labels.raters()})


@router.post("/raters")
def add_rater(request: Request, new: NewRater) -> Any:
    """Let someone in. Their token is told this once."""
    person, token = studio_of(request).labels.add_rater(person_of(request), new.name, new.role, new.queue_id)
    link = f"{request.url.scheme}://{request.headers.get('host', '')}/?token={token}"
    return Reply({"id": person.id, "name": person.name, "role": person.role, "token": token, "link": link})
