"""People, queues and items in the database.

Every change is one transaction and adds an audit row. When a method that writes returns, its changes are on disk:
SQLite commits with `synchronous = FULL`, PostgreSQL with its default.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from tether.errors import StorageError
from tether.store.database.schema import assignments, items, label_audits, queues, raters, votes
from tether.store.read import OpenWorkspace
from tether.studio.people import Person, Role, token_hash
from tether.studio.replies import Refused

OWNER_NAME = "owner"
REVOKED = "revoked:"  # prefix of a revoked token's hash, which no hash starts with
TURN_SECONDS = 10.0  # maximum wait for other writes of this server
GOLD_ACCURACY = 0.75  # annotators below it are flagged; a queue can override it

# Built once: building a statement costs more than running it.
INSERT_AUDITS = insert(label_audits)
_QUEUE = select(queues).where(queues.c.workspace == bindparam("place"), queues.c.id == bindparam("queue"))
_COUNT_ITEMS = select(func.count()).where(items.c.queue_id == bindparam("queue"))
_COUNT_VOTES = (
    select(func.count())
    .select_from(votes.join(items, votes.c.item_id == items.c.id))
    .where(items.c.queue_id == bindparam("queue"), ~votes.c.undone)
)
_COUNT_VOTES_OF = _COUNT_VOTES.where(votes.c.rater_id == bindparam("rater"))
_SET_PRIORITY = update(items).where(items.c.id == bindparam("item")).values(priority=bindparam("now"))
_PROGRESS = select(_COUNT_ITEMS.scalar_subquery(), _COUNT_VOTES_OF.scalar_subquery())


# -- which items a rater gets -------------------------------------------------------------------------------------

MINE = (votes.c.rater_id == bindparam("rater")) & ~votes.c.undone
UNJUDGED = ~select(votes.c.id).where(votes.c.item_id == items.c.id, MINE).exists()
"""The rater has no valid vote on the item."""

_to_someone = select(assignments.c.rater_id).where(assignments.c.item_id == items.c.id)
_to_me = _to_someone.where(assignments.c.rater_id == bindparam("rater"))
_first = func.coalesce(items.c.repeat_of, items.c.id)
_votes_on = select(func.count()).where(votes.c.item_id == _first, ~votes.c.undone).scalar_subquery()
_judged_first = select(votes.c.id).where(votes.c.item_id == items.c.repeat_of, MINE).exists()
DUE = (_to_me.exists() | ~_to_someone.exists()) & or_(
    items.c.gold.is_not(None),  # every rater gets gold items
    _to_me.exists(),
    _judged_first,  # a repeat is only for the rater who judged the original
    items.c.repeat_of.is_(None) & (_votes_on < bindparam("most")),
)
"""The item is for this rater: assigned to them, or unassigned and short of votes."""

_COUNT_DUE = select(func.count()).where(items.c.queue_id == bindparam("queue"), UNJUDGED, DUE)
NO_LIMIT = 1_000_000
SHUFFLE_KEY = "shuffle_key"  # in a queue's `meta`: the secret for shuffling its answers


def votes_per_item(queue: Row[Any]) -> int:
    """The number of votes after which an item is complete."""
    return queue.meta.get("votes_per_item") or NO_LIMIT


def is_shared_out(queue: Row[Any]) -> bool:
    """Whether raters get different items."""
    return bool(queue.meta.get("assigned") or queue.meta.get("votes_per_item"))


def queue_settings(queue: Row[Any]) -> dict[str, Any]:
    """The settings of a queue, besides its kind."""
    return {
        "axes": queue.meta.get("axes", []),
        "votes_per_item": queue.meta.get("votes_per_item"),
        "gold_accuracy": queue.meta.get("gold_accuracy", GOLD_ACCURACY),
    }


@dataclass(frozen=True)
class NewItem:
    """A new item. `repeats` is the index, in the same list, of the item that it repeats."""

    prompt: Sequence[dict[str, Any]]
    answers: Sequence[dict[str, Any]] = ()  # {text, ended, source, ids}
    meta: dict[str, Any] | None = None
    repeats: int | None = None
    priority: float = 0.0


class Queues:
    """The queues of a workspace and the people who see them."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened, self._key = opened, opened.workspace.key
        # SQLite has one writer at a time, and a writer that finds it busy sleeps before it retries. Waiting for this
        # lock instead is fair, and much faster under load.
        is_sqlite = opened.engine.dialect.name == "sqlite"
        self._lock = threading.Lock() if is_sqlite else None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._lock is not None and not self._lock.acquire(timeout=TURN_SECONDS):
            raise StorageError("the store is busy with other writes: try again in a moment")
        try:
            yield
        finally:
            if self._lock is not None:
                self._lock.release()

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        try:
            with self._turn(), self._opened.engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).partition("\n")[0]
            raise StorageError(f"the store {self._opened.workspace.place} cannot be written ({reason})") from error

    def _audit(self, connection: Connection, who: int | None, action: str, subject: int | None, **data: Any) -> None:
        connection.execute(INSERT_AUDITS, self._audit_row(who, action, subject, **data))

    def _audit_row(self, who: int | None, action: str, subject: int | None, **data: Any) -> dict[str, Any]:
        row = {"workspace": self._key, "time": time.time(), "rater_id": who, "action": action}
        return row | {"subject": subject, "data": data}

    # -- people -------------------------------------------------------------------------------------------------

    def owner(self) -> Person:
        """The owner's row, created on first use."""
        mine = (raters.c.workspace == self._key) & (raters.c.role == "owner") & raters.c.token_hash.is_(None)
        with self._writing() as connection:
            found = connection.execute(select(raters).where(mine).order_by(raters.c.id)).first()
            if found is None:
                values = {"workspace": self._key, "name": OWNER_NAME, "role": "owner", "created": time.time()}
                made = connection.execute(insert(raters).values(**values)).inserted_primary_key
                assert made is not None
                return Person(made[0], OWNER_NAME, "owner")
            return _person(found)

    def add_rater(self, by: Person, name: str, role: Role, queue_id: int | None) -> tuple[Person, str]:
        """Add a person; returns the person and their token, of which only the hash is stored."""
        token = secrets.token_urlsafe(32)
        values = {"name": name, "role": role, "queue_id": queue_id, "token_hash": token_hash(token)}
        with self._writing() as connection:
            if queue_id is not None:
                self._queue(connection, queue_id)
            row = insert(raters).values(workspace=self._key, created=time.time(), **values)
            made = connection.execute(row).inserted_primary_key
            assert made is not None
            self._audit(connection, by.id, "add-rater", made[0], name=name, role=role, queue_id=queue_id)
        return Person(made[0], name, role, queue_id), token

    def rater_by_hash(self, hashed: str) -> Person | None:
        """The person whose token has this hash."""
        chosen = select(raters).where(raters.c.workspace == self._key, raters.c.token_hash == hashed)
        with self._opened.reading() as connection:
            found = connection.execute(chosen).first()
        return None if found is None else _person(found)

    def raters(self) -> list[dict[str, Any]]:
        """All people, with their numbers of valid votes."""
        count = select(func.count()).where(votes.c.rater_id == raters.c.id, ~votes.c.undone).scalar_subquery()
        chosen = select(raters, count.label("votes")).where(raters.c.workspace == self._key).order_by(raters.c.id)
        names = ("id", "name", "role", "queue_id", "created", "votes", "excluded")
        with self._opened.reading() as connection:
            return [{name: getattr(row, name) for name in names} | _entering(row) for row in connection.execute(chosen)]

    def revoke(self, by: Person, rater_id: int) -> None:
        """Revoke a person's token. Their votes stay."""
        with self._writing() as connection:
            row = self._invited(connection, rater_id)
            if row.token_hash.startswith(REVOKED):
                return
            values = {"token_hash": f"{REVOKED}{secrets.token_hex(16)}"}
            connection.execute(update(raters).where(raters.c.id == rater_id).values(**values))
            self._audit(connection, by.id, "revoke", rater_id, name=row.name)

    def new_token(self, by: Person, rater_id: int) -> tuple[Person, str]:
        """Give a person a new token; the old one stops working."""
        token = secrets.token_urlsafe(32)
        with self._writing() as connection:
            row = self._invited(connection, rater_id)
            values = {"token_hash": token_hash(token)}
            connection.execute(update(raters).where(raters.c.id == rater_id).values(**values))
            self._audit(connection, by.id, "new-token", rater_id, name=row.name)
        return _person(row), token

    def _invited(self, connection: Connection, rater_id: int) -> Row[Any]:
        """A person who has, or had, a token of their own."""
        chosen = select(raters).where(raters.c.workspace == self._key, raters.c.id == rater_id)
        row = connection.execute(chosen).first()
        if row is None:
            raise Refused(404, f"there is no rater {rater_id}")
        if row.token_hash is None:
            owner = "the owner uses the server's own token: restart the server with another one"
            raise Refused(409, owner if row.role == "owner" else f"{row.name} has no token: no one can log in as them")
        return row

    # -- queues -------------------------------------------------------------------------------------------------

    def add_queue(
        self, by: Person, name: str, kind: str, guidelines: str = "", meta: dict[str, Any] | None = None
    ) -> int:
        """Create an empty queue."""
        own = (meta or {}) | {SHUFFLE_KEY: secrets.token_hex(16)}
        values = {"name": name, "kind": kind, "guidelines": guidelines, "meta": own, "open": True}
        with self._writing() as connection:
            row = insert(queues).values(workspace=self._key, created=time.time(), **values)
            made = connection.execute(row).inserted_primary_key
            assert made is not None
            self._audit(connection, by.id, "add-queue", made[0], name=name, kind=kind)
        return made[0]

    def change_queue(self, by: Person, queue_id: int, **values: Any) -> None:
        """Change a queue's name, guidelines, open state, or settings in `meta`."""
        with self._writing() as connection:
            queue = self._queue(connection, queue_id)
            if "meta" in values:
                values["meta"] = queue.meta | values["meta"]
            connection.execute(update(queues).where(queues.c.id == queue_id).values(**values))
            self._audit(connection, by.id, "change-queue", queue_id, **values)

    def queue(self, queue_id: int, person: Person | None = None) -> Row[Any]:
        """A queue's row, or a 404: an annotator does not learn which other queues exist."""
        with self._opened.reading() as connection:
            return self._queue(connection, queue_id, person)

    def _queue(self, connection: Connection, queue_id: int, person: Person | None = None) -> Row[Any]:
        found = connection.execute(_QUEUE, {"place": self._key, "queue": queue_id}).first()
        if found is None or (person is not None and not may_see(person, found.id, is_open=found.open)):
            raise Refused(404, f"there is no queue {queue_id}")
        return found

    def queues(self, person: Person) -> list[dict[str, Any]]:
        """The queues that a person may see, with their progress in each."""
        chosen = select(queues).where(queues.c.workspace == self._key).order_by(queues.c.id)
        with self._opened.reading() as connection:
            found = [row for row in connection.execute(chosen) if may_see(person, row.id, is_open=row.open)]
            return [self._queue_row(connection, row, person) for row in found]

    def _queue_row(self, connection: Connection, queue: Row[Any], person: Person) -> dict[str, Any]:
        there, done, left = self._progress(connection, queue, person.id)
        counts = {
            "items": there,
            "done": done,
            "remaining": left,
            "votes": connection.execute(_COUNT_VOTES, {"queue": queue.id}).scalar_one(),
        }
        names = ("id", "name", "kind", "guidelines", "open", "created")
        return {name: getattr(queue, name) for name in names} | counts | queue_settings(queue)

    def _progress(self, connection: Connection, queue: Row[Any], rater: int) -> tuple[int, int, int]:
        """(number of items, number that a rater has voted on, number that the rater will still get)"""
        known = {"queue": queue.id, "rater": rater}
        there, done = connection.execute(_PROGRESS, known).one()
        if not is_shared_out(queue):
            return there, done, there - done
        left = connection.execute(_COUNT_DUE, known | {"most": votes_per_item(queue)}).scalar_one()
        return there, done, left

    def add_items(self, by: Person, queue_id: int, new: Sequence[NewItem], *, origin: dict[str, Any]) -> list[int]:
        """Append items to a queue; returns their ids."""
        with self._writing() as connection:
            ids = self._insert_items(connection, self._queue(connection, queue_id), new)
            self._audit(connection, by.id, "fill", queue_id, items=len(ids), origin=origin)
        return ids

    def set_priorities(self, by: Person, queue_id: int, priorities: Mapping[int, float], **why: Any) -> None:
        """Change the order of a queue's items, the highest priority first."""
        with self._writing() as connection:
            self._queue(connection, queue_id)
            rows = [{"item": item, "now": priority} for item, priority in priorities.items()]
            if rows:
                connection.execute(_SET_PRIORITY, rows)
            self._audit(connection, by.id, "order", queue_id, items=len(rows), **why)

    def items(self, queue_id: int) -> list[Row[Any]]:
        """The items of a queue, in the order they were added."""
        with self._opened.reading() as connection:
            return list(
                connection.execute(select(items).where(items.c.queue_id == queue_id).order_by(items.c.id)).all()
            )

    def _insert_items(self, connection: Connection, queue: Row[Any], new: Sequence[NewItem]) -> list[int]:
        ids: list[int] = []
        for item in new:
            values = {"prompt": list(item.prompt), "answers": list(item.answers), "meta": item.meta or {}}
            repeat_of = None if item.repeats is None else ids[item.repeats]
            values |= {"queue_id": queue.id, "kind": queue.kind, "repeat_of": repeat_of, "priority": item.priority}
            made = connection.execute(insert(items).values(**values)).inserted_primary_key
            assert made is not None
            ids.append(made[0])
        return ids


def _entering(row: Row[Any]) -> dict[str, bool]:
    """Whether a person can log in, whether they have their own link, and whether it was revoked."""
    invited = row.token_hash is not None
    revoked = invited and row.token_hash.startswith(REVOKED)
    return {"enters": not revoked and (invited or row.role == "owner"), "invited": invited, "revoked": revoked}


def _person(row: Row[Any]) -> Person:
    return Person(row.id, row.name, row.role, row.queue_id)


def may_see(person: Person, queue_id: int, *, is_open: bool) -> bool:
    """Whether a person may see a queue."""
    return person.role == "owner" or (is_open and person.queue_id in (None, queue_id))
