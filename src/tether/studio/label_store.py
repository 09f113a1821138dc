"""Asking and voting. An acknowledged vote is stored, and a vote that is sent twice is stored once.

A commit waits for the disk. If twenty raters vote at once, separate commits would wait for each other. `VoteWriter`
writes the first vote at once, and all votes that arrive meanwhile in the next transaction. A vote is acknowledged only
when its commit is on disk.
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

REPEAT_GAP = 5  # minimum votes between an item and its hidden repeat
LOOKED_AT = 50  # candidates for the next item

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
# By id, which grows with every stored vote; the clock may go back.
_LATELY = select(votes.c.item_id).where(MINE).order_by(votes.c.id.desc()).limit(REPEAT_GAP)
_ASSIGNED_TO = select(assignments.c.rater_id).where(assignments.c.item_id == bindparam("item"))


@dataclass(frozen=True)
class CastVote:
    """A vote as it is sent; the client chooses `client_uid`, and uses it again if it sends the vote again."""

    client_uid: str
    item_id: int
    order: Sequence[int]
    choice: Any
    seconds: float | None = None
    comment: str | None = None
    ratings: Ratings | None = None  # of each answer as shown


class Labels(Staging):
    """All operations on the queues of a workspace."""

    def next_item(self, person: Person, queue_id: int) -> dict[str, Any]:
        """The next item for a person, with its answers in the order to show them; `item` is null at the end."""
        with self._opened.reading() as connection:
            queue = self._queue(connection, queue_id, person)
            _, done, left = self._progress(connection, queue, person.id)
            item = self._ask(connection, queue, person.id) if queue.open else None
        about = {name: getattr(queue, name) for name in ("id", "name", "kind", "guidelines")}
        about["axes"] = queue.meta.get("axes", [])
        shown = None if item is None else _shown(queue, item, person)
        return {"item": shown, "remaining": left, "done": done, "queue": about}

    def _ask(self, connection: Connection, queue: Row[Any], rater: int) -> Row[Any] | None:
        """The next item for this rater."""
        known = {"queue": queue.id, "rater": rater}
        if is_shared_out(queue):
            rows = connection.execute(_LEFT_DUE, known | {"most": votes_per_item(queue)}).all()
        else:
            rows = connection.execute(_LEFT, known).all()
        lately = set(connection.execute(_LATELY, {"rater": rater}).scalars())
        chosen = _choose(rows, lately)
        return None if chosen is None else connection.execute(_ITEM, {"item": chosen}).first()

    def vote(self, person: Person, vote: CastVote) -> int:
        """Store a vote; returns its id. A vote that is already stored is found, and nothing changes."""
        try:
            with self._writing() as connection:
                return self._keep(connection, person, vote)
        except (IntegrityError, Refused) as error:
            known = self._known(person, vote)
            if known is not None:
                return known
            if isinstance(error, Refused):
                raise
            raise Refused(409, "you have already voted on this item: undo that vote first") from None

    def vote_together(self, sent: Sequence[tuple[Person, CastVote]]) -> list[int | Exception]:
        """Store many votes with one commit; for each its id or its error, as `vote` would give."""
        results: list[int | Exception | None] = [None] * len(sent)
        try:
            with self._writing() as connection:
                for place, kept in self._keep_plain(connection, sent).items():
                    results[place] = kept
        except (IntegrityError, StorageError) as error:
            if _is_away(error):  # trying each vote would multiply the wait
                return [error] * len(sent)
            results = [None] * len(sent)  # one vote cannot be stored and made the whole commit fail
        return [self._vote_or_why(*sent[place]) if kept is None else kept for place, kept in enumerate(results)]

    def _vote_or_why(self, person: Person, vote: CastVote) -> int | Exception:
        try:
            return self.vote(person, vote)
        except (Refused, StorageError) as error:
            return error

    def _keep_plain(self, connection: Connection, sent: Sequence[tuple[Person, CastVote]]) -> dict[int, int]:
        """Insert the votes that need no further checks: index in `sent` -> id. `vote` handles the others."""
        asked = {"items": [vote.item_id for _, vote in sent], "place": self._key}
        found = {row.id: row for row in connection.execute(_ITEMS_ASKED, asked)}
        rows: dict[int, dict[str, Any]] = {}
        for place, (person, vote) in enumerate(sent):
            item = found.get(vote.item_id)
            if item is None or not item.open or not may_see(person, item.queue_id, is_open=item.open):
                continue
            if item.meta.get("assigned"):  # `vote` checks the assignment
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
            raise Refused(409, "client_uid was used by someone else: use a new one for each vote")
        return None if found is None else found.id

    def _keep(self, connection: Connection, person: Person, vote: CastVote) -> int:
        item = connection.execute(_ITEM, {"item": vote.item_id}).first()
        if item is None:
            raise Refused(404, f"there is no item {vote.item_id}")
        try:
            queue = self._queue(connection, item.queue_id, person)
        except Refused:  # the queue, and the existence of the item, are not shown to everyone
            raise Refused(404, f"there is no item {vote.item_id}") from None
        if not queue.open:
            raise Refused(409, "this queue is closed")
        assigned = set(connection.execute(_ASSIGNED_TO, {"item": item.id}).scalars())
        if assigned and person.id not in assigned:
            raise Refused(409, "this item is assigned to someone else")
        own = _in_own_places(_key(queue.meta), item.id, person, vote, len(item.answers))
        return self._insert_vote(connection, person.id, own, item.kind, len(item.answers))

    def _insert_vote(self, connection: Connection, rater: int, vote: CastVote, kind: str, count: int) -> int:
        vote_id = connection.execute(_INSERT_VOTES, [_vote_row(rater, vote, kind, count)]).scalar_one()
        self._audit_votes(connection, [(rater, vote_id, vote.item_id)])
        return vote_id

    def _audit_votes(self, connection: Connection, kept: Sequence[tuple[int, int, int]]) -> None:
        """Add the audit rows of votes: (rater, vote, item) of each."""
        rows = [self._audit_row(rater, "vote", vote, item=item) for rater, vote, item in kept]
        connection.execute(INSERT_AUDITS, rows)

    def undo(self, person: Person, queue_id: int | None = None) -> int | None:
        """Undo a person's last valid vote; returns the item that can be voted on again, or None.

        The last vote is the one stored last, whatever its time. Votes in a closed queue stay.
        """
        chosen = select(votes.c.id, votes.c.item_id, queues.c.open).join(items, items.c.id == votes.c.item_id)
        chosen = chosen.join(queues, queues.c.id == items.c.queue_id)
        chosen = chosen.where(votes.c.rater_id == person.id, ~votes.c.undone)
        if queue_id is not None:
            chosen = chosen.where(items.c.queue_id == queue_id)
        mine = select(raters.c.id).where(raters.c.id == person.id).with_for_update()
        with self._writing() as connection:
            connection.execute(mine)  # a lock, so that two requests at once undo two votes, also on PostgreSQL
            last = connection.execute(chosen.order_by(votes.c.id.desc()).limit(1)).first()
            if last is None:
                return None
            if not last.open:
                raise Refused(409, "this queue is closed: its votes stay unless its owner opens it again")
            connection.execute(update(votes).where(votes.c.id == last.id).values(undone=True))
            self._audit(connection, person.id, "undo", last.id, item=last.item_id)
        return last.item_id

    def standing_votes(self, queue_id: int) -> list[Row[Any]]:
        """Every vote of a queue that was not undone, with its item and rater; the oldest first."""
        of_item = (items.c.kind, items.c.prompt, items.c.answers, items.c.meta, items.c.repeat_of, items.c.gold)
        columns = (votes, *of_item, raters.c.name.label("rater"), raters.c.excluded)
        joined = votes.join(items, items.c.id == votes.c.item_id).join(raters, raters.c.id == votes.c.rater_id)
        chosen = select(*columns).select_from(joined)
        chosen = chosen.where(items.c.queue_id == queue_id, ~votes.c.undone).order_by(votes.c.id)
        with self._opened.reading() as connection:
            return list(connection.execute(chosen).all())

    def usable_votes(self, queue_id: int) -> list[Row[Any]]:
        """The votes for export and training: without excluded annotators and gold items."""
        return [vote for vote in self.standing_votes(queue_id) if not vote.excluded and vote.gold is None]

    def _given_row(self, rater: int, item: int, vote: GivenVote, kind: str, answers: int) -> dict[str, Any]:
        uid = f"import-{item}-{secrets.token_hex(8)}"
        said = (vote.choice, vote.seconds, vote.comment, vote.ratings)
        return _vote_row(rater, CastVote(uid, item, list(range(answers)), *said), kind, answers)

    def vote_as(self, by: Person, queue_id: int, name: str, choices: Mapping[int, Any]) -> int:
        """Add the votes of a judge that is not a person, on items it has not voted on; returns how many are new."""
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
        """The id of a rater that is a file or a model: no one can log in as it."""
        mine = (raters.c.queue_id == queue_id) & (raters.c.name == name) & raters.c.token_hash.is_(None)
        found = connection.execute(select(raters.c.id).where(mine)).scalar()
        if found is not None:
            return found
        values = {"workspace": self._key, "name": name, "role": "annotator", "queue_id": queue_id}
        made = connection.execute(insert(raters).values(**values, created=time.time())).inserted_primary_key
        assert made is not None
        return made[0]


def _is_away(error: Exception) -> bool:
    """Whether the store failed, as opposed to one of the values to write."""
    if not isinstance(error, StorageError):
        return False
    return error.__cause__ is None or isinstance(error.__cause__, OperationalError | StoreAway)


def _vote_row(rater: int, vote: CastVote, kind: str, count: int) -> dict[str, Any]:
    """The row of a valid vote; raises a 422 for an invalid one."""
    choice = check_choice(kind, count, vote.order, vote.choice)
    values = {"client_uid": vote.client_uid, "item_id": vote.item_id, "rater_id": rater}
    values |= {"order": list(vote.order), "choice": choice, "seconds": vote.seconds}
    ratings = check_ratings(count, vote.ratings)
    values |= {"comment": (vote.comment or "").strip() or None, "ratings": ratings}
    return values | {"created": time.time(), "undone": False}


def _choose(rows: Sequence[Any], lately: set[int]) -> int | None:
    """The first item that is not a repeat of a recent or unasked item; else the first."""
    waiting = {row.id for row in rows}
    ready = [row for row in rows if row.repeat_of is None or row.repeat_of not in (lately | waiting)]
    return next((row.id for row in ready or rows), None)


def _shown(queue: Row[Any], item: Row[Any], person: Person) -> dict[str, Any]:
    """An item without the sources of its answers; the answers are named by their shown positions."""
    count = len(item.answers)
    shown = [item.answers[place] for place in shown_order(_key(queue.meta), item.id, person.id, count)]
    answers = [{"text": answer["text"], "ended": answer.get("ended", True)} for answer in shown]
    return {"id": item.id, "kind": item.kind, "prompt": item.prompt, "answers": answers, "order": list(range(count))}


def _in_own_places(key: str, item_id: int, person: Person, vote: CastVote, count: int) -> CastVote:
    """A vote on an item from `_shown`, with the answers' own indices in its `order`."""
    if sorted(vote.order) != list(range(count)):
        return vote  # it is refused later
    given = shown_order(key, item_id, person.id, count)
    return replace(vote, order=[given[place] for place in vote.order])


def _key(meta: Mapping[str, Any]) -> str:
    """The shuffle key in a queue's `meta`."""
    return meta.get(SHUFFLE_KEY, "")


# -- the writer of votes ------------------------------------------------------------------------------------------

MAX_TOGETHER = 64
MAX_WAITING = 1000  # votes, and requests for the next item
ANSWER_SECONDS = 25.0
BUSY = "the server is busy: try again in a moment"
READERS = 2  # threads; the work is mostly Python, so more would only compete for the GIL


Found = TypeVar("Found")


async def _in_time(work: Future[Found]) -> Found:
    """Wait for a thread, with a time limit. A late vote may still be stored: sent again, it is the same vote."""
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
    """One writer for all votes of a server, and a few readers for the next items."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._waiting: deque[_Sent] = deque()
        self._asking, self._lock = 0, Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="votes")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="next-items")

    async def ask(self, person: Person, queue_id: int) -> dict[str, Any]:
        """The next item to judge, like `Labels.next_item`."""
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
        """Store a vote; returns its id once it is on disk, or raises why it was refused."""
        return await _in_time(self.put(person, vote))

    def put(self, person: Person, vote: CastVote) -> Future[int]:
        """Queue a vote without waiting for it."""
        if len(self._waiting) >= MAX_WAITING:
            raise StorageError(BUSY)
        sent = _Sent(person, vote)
        self._waiting.append(sent)
        self._writer.submit(self._write_waiting)
        return sent.kept

    def close(self) -> None:
        """Write all queued votes, and end."""
        self._writer.shutdown()
        self._readers.shutdown()

    def _write_waiting(self) -> None:
        """Write all queued votes; a later call for a vote that was already written does nothing."""
        together = [self._waiting.popleft() for _ in range(min(MAX_TOGETHER, len(self._waiting)))]
        if not together:
            return
        try:
            results = self._labels.vote_together([(sent.person, sent.vote) for sent in together])
        except Exception as error:  # every waiting request gets it
            results = [error] * len(together)
        for sent, result in zip(together, results, strict=True):
            if isinstance(result, Exception):
                sent.kept.set_exception(result)
            else:
                sent.kept.set_result(result)
