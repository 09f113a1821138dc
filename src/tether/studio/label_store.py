"""Asking and voting. An acknowledged vote is stored, and a vote sent twice counts once.

Asking and voting. A vote that was acknowledged is a vote kept, and one that is sent twice is there once.

Where votes are handed in: those that arrive while one is being written are written together, by one commit.

A commit waits for the disk, and twenty raters who press a key at once would wait for each other's. Here the first is
written at once, and all that come meanwhile are the next transaction. Each is answered only when its own commit is on
disk.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.exc import TimeoutError as StoreAway

from tether.errors import StorageError
from tether.store.database.schema import assignments, items, queues, raters, votes
from tether.studio.label_queues import (
    DUE,
    INSERT_AUDITS,
    MINE,
    SHUFFLE_KEY,
    UNJUDGED,
    is_shared_out,
    may_see,
    votes_per_item,
)
from tether.studio.label_records import Ratings, check_choice, check_ratings, shown_order
from tether.studio.label_staging import GivenVote, Staging
from tether.studio.people import Person
from tether.studio.replies import Refused

REPEAT_GAP = 5  # votes between an item and its hidden repeat
LOOKED_AT = 50  # items from which the next one is chosen

# Built once: building a statement costs more than running it.
_INSERT_VOTES = insert(votes).returning(votes.c.id, sort_by_parameter_order=True)
_KNOWN = select(votes.c.id, votes.c.rater_id).where(votes.c.client_uid == bindparam("uid"))
_ITEM = select(items).where(items.c.id == bindparam("item"))
_ITEMS_ASKED = (
    select(items.c.id, items.c.kind, items.c.answers, items.c.queue_id, queues.c.open, queues.c.meta)
    .join(queues, queues.c.id == items.c.queue_id)
    .where(queues.c.workspace == bindparam("place"), items.c.id.in_(bindparam("items", expanding=True)))
)
_LEFT = (
    select(items.c.id, items.c.repeat_of)
    .where(items.c.queue_id == bindparam("queue"), UNJUDGED)
    .order_by(items.c.priority.desc(), items.c.id)
    .limit(LOOKED_AT)
)
_LEFT_DUE = _LEFT.where(DUE)
# By id, which grows with every vote that is kept; the clock may go back.
_LATELY = select(votes.c.item_id).where(MINE).order_by(votes.c.id.desc()).limit(REPEAT_GAP)
_ASSIGNED_TO = select(assignments.c.rater_id).where(assignments.c.item_id == bindparam("item"))


@dataclass(frozen=True)
class CastVote:
    """A vote as it is sent; `client_uid` is the sender's own, and the same when it is sent again."""

    client_uid: str
    item_id: int
    order: Sequence[int]
    choice: Any
    seconds: float | None = None
    comment: str | None = None
    ratings: Ratings | None = None  # of each answer as shown


class Labels(Staging):
    """All that is done with the queues of a workspace."""

    def next_item(self, person: Person, queue_id: int) -> dict[str, Any]:
        """What to ask a person next, their answers in the order to show them; `item` is null at the end."""
        with self._opened.reading() as connection:
            queue = self._queue(connection, queue_id, person)
            _, done, left = self._progress(connection, queue, person.id)
            item = self._ask(connection, queue, person.id) if queue.open else None
        about = {name: getattr(queue, name) for name in ("id", "name", "kind", "guidelines")}
        about["axes"] = queue.meta.get("axes", [])
        shown = None if item is None else _shown(queue, item, person)
        return {"item": shown, "remaining": left, "done": done, "queue": about}

    def _ask(self, connection: Connection, queue: Row[Any], rater: int) -> Row[Any] | None:
        """The item that this rater is due."""
        known = {"queue": queue.id, "rater": rater}
        if is_shared_out(queue):
            rows = connection.execute(_LEFT_DUE, known | {"most": votes_per_item(queue)}).all()
        else:
            rows = connection.execute(_LEFT, known).all()
        lately = set(connection.execute(_LATELY, {"rater": rater}).scalars())
        chosen = _choose(rows, lately)
        return None if chosen is None else connection.execute(_ITEM, {"item": chosen}).first()

    def vote(self, person: Person, vote: CastVote) -> int:
        """Keep a vote; its id. One that was kept before is found again, and nothing changes."""
        try:
            with self._writing() as connection:
                return self._keep(connection, person, vote)
        except (IntegrityError, Refused) as error:
            known = self._known(person, vote)
            if known is not None:
                return known
            if isinstance(error, Refused):
                raise
            raise Refused(409, "you have voted on this already: undo that first") from None

    def vote_together(self, sent: Sequence[tuple[Person, CastVote]]) -> list[int | Exception]:
        """Keep many votes by one commit; for each its id, or why it is refused: just as `vote` one by one has it."""
        results: list[int | Exception | None] = [None] * len(sent)
        try:
            with self._writing() as connection:
                for place, kept in self._keep_plain(connection, sent).items():
                    results[place] = kept
        except (IntegrityError, StorageError) as error:
            if _is_away(error):  # asking it for each of them would take as many times as long
                return [error] * len(sent)
            results = [None] * len(sent)  # one of them cannot be kept, and took the others' commit with it
        return [self._vote_or_why(*sent[place]) if kept is None else kept for place, kept in enumerate(results)]

    def _vote_or_why(self, person: Person, vote: CastVote) -> int | Exception:
        try:
            return self.vote(person, vote)
        except (Refused, StorageError) as error:
            return error

    def _keep_plain(self, connection: Connection, sent: Sequence[tuple[Person, CastVote]]) -> dict[int, int]:
        """Insert the votes that nothing speaks against: place in `sent` -> id. The others are left for `vote`."""
        asked = {"items": [vote.item_id for _, vote in sent], "place": self._key}
        found = {row.id: row for row in connection.execute(_ITEMS_ASKED, asked)}
        rows: dict[int, dict[str, Any]] = {}
        for place, (person, vote) in enumerate(sent):
            item = found.get(vote.item_id)
            if item is None or not item.open or not may_see(person, item.queue_id, is_open=item.open):
                continue
            if item.meta.get("assigned"):  # left for `vote`, which looks for whom it is
                continue
            try:
                own = _in_own_places(_key(item.meta), item.id, person, vote, len(item.answers))
                rows[place] = _vote_row(person.id, own, item.kind, len(item.answers))
            except Refused:
                continue
        if not rows:
            return {}
        ids = list(connection.execute(_INSERT_VOTES, list(rows.values())).scalars())
        kept = dict(zip(rows, ids, strict=True))
        self._audit_votes(connection, [(rows[at]["rater_id"], vote, rows[at]["item_id"]) for at, vote in kept.items()])
        return kept

    def _known(self, person: Person, vote: CastVote) -> int | None:
        with self._opened.reading() as connection:
            found = connection.execute(_KNOWN, {"uid": vote.client_uid}).first()
        if found is not None and found.rater_id != person.id:
            raise Refused(409, "client_uid was used by someone else: make a new one for each vote")
        return None if found is None else found.id

    def _keep(self, connection: Connection, person: Person, vote: CastVote) -> int:
        item = connection.execute(_ITEM, {"item": vote.item_id}).first()
        if item is None:
            raise Refused(404, f"there is no item {vote.item_id}")
        try:
            queue = self._queue(connection, item.queue_id, person)
        except Refused:  # which queue it is in, or that it is there, is not for everyone to know
            raise Refused(404, f"there is no item {vote.item_id}") from None
        if not queue.open:
            raise Refused(409, "this queue is closed")
        assigned = set(connection.execute(_ASSIGNED_TO, {"item": item.id}).scalars())
        if assigned and person.id not in assigned:
            raise Refused(409, "this item was given to someone else to judge")
        own = _in_own_places(_key(queue.meta), item.id, person, vote, len(item.answers))
        return self._insert_vote(connection, person.id, own, item.kind, len(item.answers))

    def _insert_vote(self, connection: Connection, rater: int, vote: CastVote, kind: str, count: int) -> int:
        vote_id = connection.execute(_INSERT_VOTES, [_vote_row(rater, vote, kind, count)]).scalar_one()
        self._audit_votes(connection, [(rater, vote_id, vote.item_id)])
        return vote_id

    def _audit_votes(self, connection: Connection, kept: Sequence[tuple[int, int, int]]) -> None:
        """The audits of votes: (rater, vote, item) of each."""
        rows = [self._audit_row(rater, "vote", vote, item=item) for rater, vote, item in kept]
        connection.execute(INSERT_AUDITS, rows)

    def undo(self, person: Person, queue_id: int | None = None) -> int | None:
        """Take a person's last standing vote back; the item that can be voted on again, or None.

        The last is the one that was kept last, whatever the clock said then. What was said in a closed queue stands.
        """
        chosen = select(votes.c.id, votes.c.item_id, queues.c.open).join(items, items.c.id == votes.c.item_id)
        chosen = chosen.join(queues, queues.c.id == items.c.queue_id)
        chosen = chosen.where(votes.c.rater_id == person.id, ~votes.c.undone)
        if queue_id is not None:
            chosen = chosen.where(items.c.queue_id == queue_id)
        mine = select(raters.c.id).where(raters.c.id == person.id).with_for_update()
        with self._writing() as connection:
            connection.execute(mine)  # two that are sent at once take two votes back, on PostgreSQL too
            last = connection.execute(chosen.order_by(votes.c.id.desc()).limit(1)).first()
            if last is None:
                return None
            if not last.open:
                raise Refused(409, "this queue is closed: its votes stand unless its owner opens it again")
            connection.execute(update(votes).where(votes.c.id == last.id).values(undone=True))
            self._audit(connection, person.id, "undo", last.id, item=last.item_id)
        return last.item_id

    def standing_votes(self, queue_id: int) -> list[Row[Any]]:
        """Every vote of a queue that was not undone, with its item and who gave it; the oldest first."""
        of_item = (items.c.kind, items.c.prompt, items.c.answers, items.c.meta, items.c.repeat_of, items.c.gold)
        columns = (votes, *of_item, raters.c.name.label("rater"), raters.c.excluded)
        joined = votes.join(items, items.c.id == votes.c.item_id).join(raters, raters.c.id == votes.c.rater_id)
        chosen = select(*columns).select_from(joined)
        chosen = chosen.where(items.c.queue_id == queue_id, ~votes.c.undone).order_by(votes.c.id)
        with self._opened.reading() as connection:
            return list(connection.execute(chosen).all())

    def usable_votes(self, queue_id: int) -> list[Row[Any]]:
        """The votes that are exported and learned from: none of excluded annotators, none on gold items."""
        return [vote for vote in self.standing_votes(queue_id) if not vote.excluded and vote.gold is None]

    def _given_row(self, rater: int, item: int, vote: GivenVote, kind: str, answers: int) -> dict[str, Any]:
        uid = f"import-{item}-{secrets.token_hex(8)}"
        said = (vote.choice, vote.seconds, vote.comment, vote.ratings)
        return _vote_row(rater, CastVote(uid, item, list(range(answers)), *said), kind, answers)

    def vote_as(self, by: Person, queue_id: int, name: str, choices: Mapping[int, Any]) -> int:
        """The votes of a judge who is no person, on items that it has not voted on; how many are new."""
        with self._writing() as connection:
            queue = self._queue(connection, queue_id)
            rater = self._without_token(connection, queue_id, name)
            mine = select(votes.c.item_id).where(votes.c.rater_id == rater, ~votes.c.undone)
            voted = set(connection.execute(mine).scalars())
            new = {item: choice for item, choice in choices.items() if item not in voted}
            for item, choice in new.items():
                vote = CastVote(f"judge-{item}-{secrets.token_hex(8)}", item, [0, 1], choice)
                self._insert_vote(connection, rater, vote, queue.kind, 2)
            self._audit(connection, by.id, "judge", queue_id, judge=name, votes=len(new))
        return len(new)

    def _without_token(self, connection: Connection, queue_id: int, name: str) -> int:
        """A rater of a queue who is a file or a model: no one can enter as them."""
        mine = (raters.c.queue_id == queue_id) & (raters.c.name == name) & raters.c.token_hash.is_(None)
        found = connection.execute(select(raters.c.id).where(mine)).scalar()
        if found is not None:
            return found
        values = {"workspace": self._key, "name": name, "role": "annotator", "queue_id": queue_id}
        made = connection.execute(insert(raters).values(**values, created=time.time())).inserted_primary_key
        assert made is not None
        return made[0]


def _is_away(error: Exception) -> bool:
    """Whether it is the store that failed, and none of what was to be written."""
    if not isinstance(error, StorageError):
        return False
    return error.__cause__ is None or isinstance(error.__cause__, OperationalError | StoreAway)


def _vote_row(rater: int, vote: CastVote, kind: str, count: int) -> dict[str, Any]:
    """The row of a vote that makes sense; a 422 for one that does not."""
    choice = check_choice(kind, count, vote.order, vote.choice)
    values = {"client_uid": vote.client_uid, "item_id": vote.item_id, "rater_id": rater}
    values |= {"order": list(vote.order), "choice": choice, "seconds": vote.seconds}
    ratings = check_ratings(count, vote.ratings)
    values |= {"comment": (vote.comment or "").strip() or None, "ratings": ratings}
    return values | {"created": time.time(), "undone": False}


def _choose(rows: Sequence[Any], lately: set[int]) -> int | None:
    """The first item that does not ask again what was just asked, or has not been asked yet; else the first."""
    waiting = {row.id for row in rows}
    ready = [row for row in rows if row.repeat_of is None or row.repeat_of not in (lately | waiting)]
    return next((row.id for row in ready or rows), None)


def _shown(queue: Row[Any], item: Row[Any], person: Person) -> dict[str, Any]:
    """An item without anything that tells where an answer came from; its answers are named by the places shown."""
    count = len(item.answers)
    shown = [item.answers[place] for place in shown_order(_key(queue.meta), item.id, person.id, count)]
    answers = [{"text": answer["text"], "ended": answer.get("ended", True)} for answer in shown]
    return {"id": item.id, "kind": item.kind, "prompt": item.prompt, "answers": answers, "order": list(range(count))}


def _in_own_places(key: str, item_id: int, person: Person, vote: CastVote, count: int) -> CastVote:
    """A vote on what `_shown` gave this person, with the answers' own places in its `order`."""
    if sorted(vote.order) != list(range(count)):
        return vote  # it is refused later
    given = shown_order(key, item_id, person.id, count)
    return replace(vote, order=[given[place] for place in vote.order])


def _key(meta: Mapping[str, Any]) -> str:
    """The shuffle key of the queue whose `meta` this is."""
    return meta.get(SHUFFLE_KEY, "")


MAX_TOGETHER = 64
MAX_WAITING = 1000  # votes, and questions what to judge next
ANSWER_SECONDS = 25.0
BUSY = "the server is busy: try again in a moment"
READERS = 2  # more of them only get into each other's way: what they do is mostly Python


Found = TypeVar("Found")


async def _in_time(work: Future[Found]) -> Found:
    """What a thread comes to. A vote that is late may still be kept: sent again, with its uid, it is the same vote."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(work)), ANSWER_SECONDS)
    except TimeoutError:
        raise StorageError("the store does not answer: try again in a moment") from None


@dataclass(frozen=True)
class _Sent:
    person: Person
    vote: CastVote
    kept: Future[int] = field(default_factory=Future)


class VoteWriter:
    """One writer for all votes of a server, and a few readers for what comes next."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._waiting: deque[_Sent] = deque()
        self._asking, self._lock = 0, Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="votes")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="next-items")

    async def ask(self, person: Person, queue_id: int) -> dict[str, Any]:
        """What to judge next, as `Labels.next_item` has it."""
        if self._asking >= MAX_WAITING:
            raise StorageError(BUSY)
        with self._lock:
            self._asking += 1
        asked = self._readers.submit(self._labels.next_item, person, queue_id)
        asked.add_done_callback(self._was_asked)
        return await _in_time(asked)

    def _was_asked(self, _: Future[dict[str, Any]]) -> None:
        with self._lock:
            self._asking -= 1

    async def hand_in(self, person: Person, vote: CastVote) -> int:
        """The vote's id, once it is on disk; or why it was refused."""
        return await _in_time(self.put(person, vote))

    def put(self, person: Person, vote: CastVote) -> Future[int]:
        """Hand a vote in without waiting for it."""
        if len(self._waiting) >= MAX_WAITING:
            raise StorageError(BUSY)
        sent = _Sent(person, vote)
        self._waiting.append(sent)
        self._writer.submit(self._write_waiting)
        return sent.kept

    def close(self) -> None:
        """Write what was handed in, and end."""
        self._writer.shutdown()
        self._readers.shutdown()

    def _write_waiting(self) -> None:
        """Write all that wait; a later call, for a vote that this one took along, finds nothing to do."""
        together = [self._waiting.popleft() for _ in range(min(MAX_TOGETHER, len(self._waiting)))]
        if not together:
            return
        try:
            results = self._labels.vote_together([(sent.person, sent.vote) for sent in together])
        except Exception as error:  # whatever it is, it is the answer that those who wait get
            results = [error] * len(together)
        for sent, result in zip(together, results, strict=True):
            if isinstance(result, Exception):
                sent.kept.set_exception(result)
            else:
                sent.kept.set_result(result)
