"""The owner's routes to single items and people: what was said of them, who judges them, gold, tags, exclusion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Query, Request
from pydantic import Field

from tether.studio.context import person_of, studio_of
from tether.studio.label_items import ItemFilter, Status
from tether.studio.label_records import MAX_TAG, MAX_TAGS, tags_of
from tether.studio.replies import BIGGEST, Body, Reply, api_router
from tether.studio.votes import MAX_RANKED

router = api_router()

Id = Annotated[int, Path(ge=0, le=BIGGEST)]
Place = Annotated[int, Field(ge=0, le=BIGGEST)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKED)]
MAX_ITEMS = 20_000


class Assignment(Body):
    """Which items go to whom. No items: all of the queue. No raters: everyone may judge them again."""

    items: list[Place] = Field(default_factory=list, max_length=MAX_ITEMS)
    raters: list[Place] = Field(default_factory=list, max_length=200)
    each: Annotated[int, Field(ge=1, le=200)] | None = None  # so many raters an item, in turn; by default all


class Gold(Body):
    """The right ranks of an item's answers, in their own order, 0 for the best; null: it is no gold item."""

    ranks: (
        Annotated[list[Annotated[int, Field(ge=0, lt=MAX_RANKED)]], Field(min_length=2, max_length=MAX_RANKED)] | None
    )


class Tags(Body):
    """An item's tags."""

    tags: list[Annotated[str, Field(min_length=1, max_length=MAX_TAG)]] = Field(max_length=MAX_TAGS)


class RaterChange(Body):
    """Whether a person's votes are left out of training and export."""

    excluded: bool


@router.get("/label/queues/{queue}/items")
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
    """The items of a queue that fit a filter, with every vote on them."""
    wanted = ItemFilter(status, rater, disagreement, None if gold == "any" else gold == "yes", tag, text)
    return Reply(studio_of(request).labels.listed(queue, wanted, limit, offset))


@router.post("/label/queues/{queue}/assign")
def assign(request: Request, queue: Id, wanted: Assignment) -> Any:
    """Give items to named annotators; no one else is asked them."""
    people = list(dict.fromkeys(wanted.raters))
    labels = studio_of(request).labels
    return Reply({"items": labels.assign(person_of(request), queue, wanted.items, people, wanted.each)})


@router.post("/label/items/{item}/gold")
def gold(request: Request, item: Id, wanted: Gold) -> Any:
    """Mark an item with its known right answer. Annotators see an item like any other."""
    studio_of(request).labels.set_gold(person_of(request), item, wanted.ranks)
    return Reply({"id": item, "gold": wanted.ranks})


@router.post("/label/items/{item}/tags")
def tags(request: Request, item: Id, wanted: Tags) -> Any:
    """Give an item other tags."""
    found = tags_of(wanted.tags, "tags")
    studio_of(request).labels.set_tags(person_of(request), item, found)
    return Reply({"id": item, "tags": found})


@router.post("/raters/{rater}")
def change_rater(request: Request, rater: Id, change: RaterChange) -> Any:
    """Leave a person's votes out of training and export, or take them in again."""
    studio_of(request).labels.exclude(person_of(request), rater, change.excluded)
    return Reply({"id": rater, "excluded": change.excluded})
