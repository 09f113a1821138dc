"""The routes of labeling: queues, votes, agreement, export and import, single items, people and their sessions."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Path, Query, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from tether.errors import StorageError
from tether.studio.context import Studio, entry_of, link_for, person_of, studio_of
from tether.studio.import_export import BackgroundImport, as_lines, export_records, imported, read_lines
from tether.studio.label_items import ItemFilter, Status, Vote, agreement, gold_accuracy
from tether.studio.label_queues import NewItem, queue_settings
from tether.studio.label_records import (
    AXES,
    HIGHEST_RATING,
    LOWEST_RATING,
    MAX_COMMENT,
    MAX_RANKED,
    MAX_TAG,
    MAX_TAGS,
    MIN_RANKED,
    SKIPPED,
    item_from_record,
    tags_of,
)
from tether.studio.label_staging import ItemWithVotes
from tether.studio.label_store import CastVote
from tether.studio.model_host import in_model_thread
from tether.studio.people import Role
from tether.studio.queue_items import (
    RANKED,
    ask_uncertain_first,
    items_from_run,
    reward_model,
    scored_by,
    with_repeats,
    write_sampling_plan,
)
from tether.studio.replies import BIGGEST, Body, Refused, Reply, api_router
from tether.studio.run_queries import run_with_id
from tether.studio.run_routes import as_download

router = api_router()

Id = Annotated[int, Path(ge=0, le=BIGGEST)]
ImportId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$")]
Place = Annotated[int, Field(ge=0, le=BIGGEST)]
Form = Literal["pairs", "rankings", "messages", "votes"]
Axis = Literal["overall", "coverage", "accuracy", "coherence"]
Tied = Annotated[list[int], Field(max_length=MAX_RANKED)]
Order = Annotated[list[int | Tied], Field(max_length=MAX_RANKED)]
Rating = Annotated[int, Field(ge=LOWEST_RATING, le=HIGHEST_RATING)]
Ratings = Annotated[dict[Axis, Rating], Field(max_length=len(AXES), fail_fast=True)]
MAX_RECORDS = 20_000
assert set(Axis.__args__) == set(AXES)  # pyright: ignore[reportAttributeAccessIssue]


class NewQueue(Body):
    """A new queue."""

    name: str = Field(min_length=1, max_length=200)
    kind: Literal["pair", "ranking", "demonstration"] = "pair"
    guidelines: str = Field(default="", max_length=50_000)
    axes: list[Axis] = Field(default_factory=list, max_length=len(AXES))  # ratings of answers, from 1 to 7
    votes_per_item: Annotated[int, Field(ge=0, le=1000)] = 0  # an item is complete after these; 0: one of each rater


class QueueChange(Body):
    """Changes of a queue."""

    name: str | None = Field(default=None, min_length=1, max_length=200)
    guidelines: str | None = Field(default=None, max_length=50_000)
    open: bool | None = None
    axes: list[Axis] | None = Field(default=None, max_length=len(AXES))
    votes_per_item: Annotated[int, Field(ge=0, le=1000)] | None = None
    gold_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None  # annotators below it are flagged


class Fill(Body):
    """The source of a queue's new items."""

    origin: Literal["run", "file", "uncertain", "chat", "model"] = Field(alias="from")
    run: Place | None = None
    reward_run: Place | None = None  # scores the answers; default: the newest reward model, else the recorded scores
    other_run: Place | None = None
    step: Place | None = None
    count: Annotated[int, Field(ge=1, le=5000)] = 50
    repeats: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    answers: Annotated[int, Field(ge=MIN_RANKED, le=MAX_RANKED)] | None = None  # per ranking, or per prompt to sample
    records: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_RECORDS)
    text: str = ""
    model: str | None = Field(default=None, min_length=1, max_length=1000)  # the model to sample from
    prompts: str | None = Field(default=None, min_length=1, max_length=1000)  # a file that the server can read
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 128
    temperature: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Place = 0


class Rescore(Body):
    """The reward model that determines the order."""

    reward_run: Place | None = None


class NewVote(Body):
    """A vote. `client_uid` is new for each vote, and the same if it is sent again."""

    client_uid: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    item_id: Place
    order: list[Place] = Field(default_factory=list, max_length=20)
    choice: str | Order = ""  # of a ranking: shown positions, best first, ties in a list
    skip: bool = False
    seconds: Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)] | None = None
    comment: str | None = Field(default=None, max_length=MAX_COMMENT)
    ratings: list[Ratings] | None = Field(default=None, max_length=MAX_RANKED)  # of each shown answer


class Undo(Body):
    """The queue whose last vote is undone; by default the last vote in any queue."""

    queue_id: Place | None = None


class Import(Body):
    """Records in the usual columns, as a list or as JSONL."""

    records: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_RECORDS)
    text: str = ""


class NewRater(Body):
    """A new person. An annotator with a `queue_id` sees only that queue."""

    name: str = Field(min_length=1, max_length=80)
    role: Role = "annotator"
    queue_id: Place | None = None


# -- queues -------------------------------------------------------------------------------------------------------


@router.get("/label/queues")
def queues(request: Request) -> Any:
    """The queues, with the progress of the person in each."""
    return Reply({"queues": studio_of(request).labels.queues(person_of(request))})


@router.post("/label/queues")
def add_queue(request: Request, new: NewQueue) -> Any:
    """Create a queue."""
    meta = {"axes": new.axes, "votes_per_item": new.votes_per_item or None}
    made = studio_of(request).labels.add_queue(person_of(request), new.name, new.kind, new.guidelines, meta)
    return Reply({"id": made})


@router.post("/label/queues/{queue}")
def change_queue(request: Request, queue: Id, change: QueueChange) -> Any:
    """Change a queue's name, guidelines or settings, or open or close it."""
    values = change.model_dump(exclude_none=True)
    if not values:
        raise Refused(422, "the body: give at least one change, such as name, guidelines or open")
    meta = {name: values.pop(name) for name in ("axes", "votes_per_item", "gold_accuracy") if name in values}
    if meta:
        values["meta"] = meta
    studio_of(request).labels.change_queue(person_of(request), queue, **values)
    return Reply({"id": queue})


@router.post("/label/queues/{queue}/fill")
def fill(request: Request, queue: Id, wanted: Fill) -> Any:
    """Add items to a queue, and hidden repeats of a fraction of them."""
    studio = studio_of(request)
    kind = studio.labels.queue(queue).kind
    if wanted.origin == "model":
        return Reply({"added": 0, "repeats": 0} | _sample(studio, queue, kind, wanted))
    new = with_repeats(_new_items(studio, kind, wanted), wanted.repeats)
    origin = {"from": wanted.origin, "run": wanted.run, "other_run": wanted.other_run, "step": wanted.step}
    repeats = sum(item.repeats is not None for item in new)
    given = [ItemWithVotes(item) for item in new]
    begun = studio.imports.take_in(person_of(request), queue, given, action="fill", origin=origin)
    return _outcome(begun, {"added": len(new) - repeats, "repeats": repeats})


def _outcome(begun: BackgroundImport, reply: dict[str, Any]) -> Reply:
    """The result of a finished import; else its progress, with an id for later requests."""
    if begun.state == "failed":
        raise StorageError(begun.error or "the import failed")
    return Reply(reply, 200) if begun.state == "done" else Reply(begun.as_json(), 202)


def _sample(studio: Studio, queue: int, kind: str, wanted: Fill) -> dict[str, Any]:
    """Start a process that samples answers and adds them to the queue."""
    if kind == "demonstration":
        raise Refused(422, "from: a demonstration has no answers to sample; fill this queue from a file of prompts")
    if wanted.model is None:
        raise Refused(422, "model: give the model to sample from: a run's folder, a model's folder, or a model's name")
    records = wanted.records or read_lines(wanted.text)
    if not records and wanted.prompts is None:
        raise Refused(422, "prompts: name a file of prompts, or give them as records")
    uid = secrets.token_hex(6)
    names = ("model", "prompts", "count", "repeats", "max_new_tokens", "temperature", "top_p", "seed")
    plan = {name: getattr(wanted, name) for name in names} | {"queue": queue, "uid": uid}
    plan |= {"answers": wanted.answers or (2 if kind == "pair" else RANKED)}
    plan |= {"workspace": str(studio.opened.workspace.directory)}
    path = write_sampling_plan(studio.launcher.folder(), plan, records)
    job = studio.launcher.python(f"queue {queue}", "fill", ["-m", "tether.studio.queue_items", str(path)])
    return {"job": job.id}


def _new_items(studio: Studio, kind: str, wanted: Fill) -> list[NewItem]:
    if wanted.origin in ("file", "chat"):
        records = wanted.records or read_lines(wanted.text)
        if not records:
            raise Refused(422, "records: the list is empty")
        return [item_from_record(kind, record, f"record {place}") for place, record in enumerate(records, start=1)]
    if wanted.run is None:
        raise Refused(422, "run: give the run whose answers are taken")
    ids = [wanted.run] if wanted.other_run is None else [wanted.run, wanted.other_run]
    runs = [run_with_id(studio.opened, run) for run in ids]
    if wanted.origin == "run":
        limits = {"count": wanted.count, "step": wanted.step, "size": wanted.answers}
        return items_from_run(studio.opened, kind, runs, **limits)
    model = reward_model(studio, wanted.reward_run)
    rescore = None if model is None else partial(scored_by, studio, model)
    limits = {"count": wanted.count, "step": wanted.step, "uncertain": True, "rescore": rescore, "size": wanted.answers}
    return items_from_run(studio.opened, kind, runs, **limits)


@router.post("/label/queues/{queue}/rescore")
async def rescore(request: Request, queue: Id, wanted: Rescore | None = None) -> Any:
    """Order the pairs by the uncertainty of a reward model, by default the newest, the most uncertain first."""
    return await in_model_thread(_rescore, request, queue, wanted)


def _rescore(request: Request, queue: int, wanted: Rescore | None) -> Any:
    studio = studio_of(request)
    studio.labels.queue(queue)
    model = reward_model(studio, wanted.reward_run if wanted is not None else None)
    if model is None:
        raise Refused(409, "there is no reward model yet: train one on the Train page")
    return Reply({"items": ask_uncertain_first(studio, person_of(request), queue, model), "by": model.name})


# -- voting -------------------------------------------------------------------------------------------------------


@router.get("/label/queues/{queue}/next")
async def next_item(request: Request, queue: Id) -> Any:
    """The next item to judge; its answers are in the order to show them."""
    return Reply(await studio_of(request).vote_writer.ask(person_of(request), queue))


@router.post("/label/votes")
async def vote(request: Request, new: NewVote) -> Any:
    """Store a vote. It is on disk when the response is sent; a vote that is sent twice is stored once."""
    choice = SKIPPED if new.skip else new.choice
    ratings = [{str(axis): given for axis, given in one.items()} for one in new.ratings or ()]
    vote = CastVote(new.client_uid, new.item_id, new.order, choice, new.seconds, new.comment, ratings)
    return Reply({"id": await studio_of(request).vote_writer.hand_in(person_of(request), vote)})


@router.post("/label/votes/undo")
def undo(request: Request, wanted: Undo | None = None) -> Any:
    """Undo the last vote; its item can be voted on again."""
    queue = wanted.queue_id if wanted is not None else None
    return Reply({"item_id": studio_of(request).labels.undo(person_of(request), queue)})


# -- results ------------------------------------------------------------------------------------------------------


@router.get("/label/queues/{queue}/agreement")
def queue_agreement(request: Request, queue: Id) -> Any:
    """Agreement of raters with each other (Krippendorff's alpha), with themselves (hidden repeats), and with gold."""
    labels = studio_of(request).labels
    least = queue_settings(labels.queue(queue))["gold_accuracy"]
    found = labels.standing_votes(queue)
    reply = agreement(Vote(row.item_id, row.repeat_of, row.rater_id, row.kind, row.order, row.choice) for row in found)
    people = {rater["id"]: rater for rater in labels.raters()}
    gold = gold_accuracy(found, least)
    for rater in reply["raters"]:
        known = people.get(rater["id"], {})
        rater |= {
            "name": known.get("name", ""),
            "excluded": known.get("excluded", False),
            "gold": gold.get(rater["id"]),
        }
    reply["gold_accuracy"] = least
    return Reply(reply)


@router.get("/label/queues/{queue}/export")
def export(request: Request, queue: Id, form: Annotated[Form, Query(alias="format")] = "pairs") -> Response:
    """The votes of a queue as JSONL, without those of excluded annotators and those on gold items."""
    labels = studio_of(request).labels
    name = labels.queue(queue).name
    lines = as_lines(export_records(labels.usable_votes(queue), form))
    return as_download(lines, f"{name}-{form}.jsonl", "text/plain")


@router.post("/label/queues/{queue}/import")
def import_records(request: Request, queue: Id, given: Import) -> Any:
    """Import records with their votes, attributed to the rater that they name, or to one called `import`."""
    labels = studio_of(request).labels
    found = imported(labels.queue(queue).kind, given.records or read_lines(given.text))
    if not found:
        raise Refused(422, "records: the list is empty")
    begun = studio_of(request).imports.take_in(person_of(request), queue, found, action="import", origin=None)
    taken = begun.taken
    return _outcome(begun, {} if taken is None else {"items": taken.items, "votes": taken.votes})


@router.get("/label/imports")
def imports(request: Request) -> Any:
    """The imports since the server started, the newest first."""
    return Reply({"imports": [one.as_json() for one in studio_of(request).imports.all()]})


@router.get("/label/imports/{import_id}")
def import_progress(request: Request, import_id: ImportId) -> Any:
    """Progress of an import: `done` of its `records`, and at the end `items` and `votes`, or the `error`."""
    return Reply(studio_of(request).imports.get(import_id).as_json())


@router.post("/label/imports/{import_id}/cancel")
def cancel_import(request: Request, import_id: ImportId) -> Any:
    """Cancel an import: none of its records stays. A finished import is not changed."""
    return Reply(studio_of(request).imports.cancel(import_id).as_json())


# -- people -------------------------------------------------------------------------------------------------------


@router.get("/raters")
def raters(request: Request) -> Any:
    """All people who may log in, without their tokens, which are not stored."""
    return Reply({"raters": studio_of(request).labels.raters()})


@router.post("/raters")
def add_rater(request: Request, new: NewRater) -> Any:
    """Add a person. Their token is shown only in this response."""
    person, token = studio_of(request).labels.add_rater(person_of(request), new.name, new.role, new.queue_id)
    link = link_for(request, token)
    return Reply({"id": person.id, "name": person.name, "role": person.role, "token": token, "link": link})


item_router = api_router()

# -- single items and people --------------------------------------------------------------------------------------

MAX_ITEMS = 20_000


class Assignment(Body):
    """Which items go to whom. No items: all of the queue. No raters: everyone may judge them again."""

    items: list[Place] = Field(default_factory=list, max_length=MAX_ITEMS)
    raters: list[Place] = Field(default_factory=list, max_length=200)
    each: Annotated[int, Field(ge=1, le=200)] | None = None  # raters per item, in turn; by default all


class Gold(Body):
    """The correct ranks of an item's answers, in their own order, 0 for the best; null: not a gold item."""

    ranks: (
        Annotated[list[Annotated[int, Field(ge=0, lt=MAX_RANKED)]], Field(min_length=2, max_length=MAX_RANKED)] | None
    )


class Tags(Body):
    """An item's tags."""

    tags: list[Annotated[str, Field(min_length=1, max_length=MAX_TAG)]] = Field(max_length=MAX_TAGS)


class RaterChange(Body):
    """Whether a person's votes are excluded from training and export."""

    excluded: bool


@item_router.get("/label/queues/{queue}/items")
def items(
    request: Request,
    queue: Id,
    status: Status = "any",
    rater: Annotated[int | None, Query(ge=0, le=BIGGEST)] = None,
    disagreement: bool = False,
    gold: Literal["any", "yes", "no"] = "any",
    tag: Annotated[str, Query(max_length=MAX_TAG)] = "",
    text: Annotated[str, Query(max_length=500)] = "",
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    offset: Annotated[int, Query(ge=0, le=BIGGEST)] = 0,
) -> Any:
    """The items of a queue that match a filter, with every vote on them."""
    wanted = ItemFilter(status, rater, disagreement, None if gold == "any" else gold == "yes", tag, text)
    return Reply(studio_of(request).labels.listed(queue, wanted, limit, offset))


@item_router.post("/label/queues/{queue}/assign")
def assign(request: Request, queue: Id, wanted: Assignment) -> Any:
    """Assign items to named annotators; no one else gets them."""
    people = list(dict.fromkeys(wanted.raters))
    labels = studio_of(request).labels
    return Reply({"items": labels.assign(person_of(request), queue, wanted.items, people, wanted.each)})


@item_router.post("/label/items/{item}/gold")
def gold(request: Request, item: Id, wanted: Gold) -> Any:
    """Set the correct ranks of an item. Annotators cannot tell it from other items."""
    studio_of(request).labels.set_gold(person_of(request), item, wanted.ranks)
    return Reply({"id": item, "gold": wanted.ranks})


@item_router.post("/label/items/{item}/tags")
def tags(request: Request, item: Id, wanted: Tags) -> Any:
    """Replace the tags of an item."""
    found = tags_of(wanted.tags, "tags")
    studio_of(request).labels.set_tags(person_of(request), item, found)
    return Reply({"id": item, "tags": found})


@item_router.post("/raters/{rater}")
def change_rater(request: Request, rater: Id, change: RaterChange) -> Any:
    """Exclude a person's votes from training and export, or include them again."""
    studio_of(request).labels.exclude(person_of(request), rater, change.excluded)
    return Reply({"id": rater, "excluded": change.excluded})


# -- sessions and links -------------------------------------------------------------------------------------------

session_router = api_router()

SessionId = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]


@session_router.post("/logout")
async def log_out(request: Request) -> Any:
    """End the current session."""
    entry = entry_of(request)
    if entry.session is not None:
        studio_of(request).auth.sessions.end_key(entry.session)
    return Reply({"ended": entry.session is not None})


@session_router.get("/sessions")
async def sessions(request: Request) -> Any:
    """Every open session with its person, the most recently used first."""
    return Reply({"sessions": studio_of(request).auth.sessions.listed(entry_of(request).session)})


@session_router.post("/sessions/{session}/end")
async def end_session(request: Request, session: SessionId) -> Any:
    """End a session. The person can log in again with their link."""
    ended = studio_of(request).auth.sessions.end(session)
    if ended is None:
        raise Refused(404, "there is no such session: it may have expired")
    return Reply({"id": session, "person": ended.person.id})


@session_router.post("/raters/{rater}/revoke")
async def revoke(request: Request, rater: Id) -> Any:
    """Revoke a person's link and end their sessions. Their votes stay."""
    studio = studio_of(request)
    await run_in_threadpool(studio.labels.revoke, person_of(request), rater)
    return Reply({"id": rater, "sessions": studio.auth.forget(rater)})


@session_router.post("/raters/{rater}/link")
async def new_link(request: Request, rater: Id) -> Any:
    """Create a new link for a person, shown only in this response; the old link stops working and sessions end."""
    studio = studio_of(request)
    person, token = await run_in_threadpool(studio.labels.new_token, person_of(request), rater)
    studio.auth.forget(rater)
    return Reply({"id": person.id, "name": person.name, "token": token, "link": link_for(request, token)})
