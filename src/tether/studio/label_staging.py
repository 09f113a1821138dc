"""Import many items atomically without blocking votes.

Items are written in short transactions to a hidden queue, and moved to their own queue once all are written. Between
two transactions, waiting votes are stored. If a server dies during an import, the next one completes or removes it.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, insert, select, update

from tether.errors import StorageError
from tether.store.database.schema import items, queues, votes
from tether.studio.label_items import Items
from tether.studio.label_queues import INSERT_AUDITS, NewItem
from tether.studio.label_records import Ratings
from tether.studio.people import Person

TOGETHER = 200  # records in one transaction
BREATH = 0.5  # pause after a transaction, as a fraction of its duration
FINISH_SECONDS = 3600.0  # maximum wait for a store that is away
FIRST_PAUSE, MAX_PAUSE = 0.2, 5.0  # seconds between two tries
IMPORTER_NAME = "import"

_OPENED: set[str] = set()  # hidden queues of this process

_INSERT_ITEMS = insert(items).returning(items.c.id, sort_by_parameter_order=True)
_INSERT_VOTES = insert(votes).returning(votes.c.id, sort_by_parameter_order=True)
_SET_REPEAT = update(items).where(items.c.id == bindparam("item")).values(repeat_of=bindparam("first"))


@dataclass(frozen=True)
class GivenVote:
    """A vote from a record; its answers are in the record's own order."""

    choice: Any
    rater: str | None = None
    comment: str | None = None
    ratings: Ratings | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class ItemWithVotes:
    """An item from a record, with its votes."""

    item: NewItem
    votes: Sequence[GivenVote] = ()


@dataclass(frozen=True)
class StagedItems:
    """The result of an import."""

    items: int
    votes: int


class Cancelled(Exception):  # noqa: N818 (a request, not a fault)
    """The import was cancelled."""


class Staging(Items, ABC):
    """Imports of many items."""

    def take_in(
        self,
        by: Person,
        queue_id: int,
        given: Sequence[ItemWithVotes],
        *,
        action: str = "import",
        origin: dict[str, Any] | None = None,
        report: Callable[[int], None] = lambda done: None,  # noqa: ARG005
        cancelled: Callable[[], bool] = lambda: False,
    ) -> StagedItems:
        """Import items with the votes of their records, all or none. `tell` gets the number written so far."""
        queue = self.queue(queue_id)
        if len(given) <= TOGETHER:
            with self._writing() as connection:
                _, count = self._write_some(connection, queue, queue_id, given, [], {})
                self._audit_import(connection, by, action, queue_id, StagedItems(len(given), count), origin)
            return StagedItems(len(given), count)
        stage = self._open_stage(queue)
        try:
            taken = self._fill_stage(queue, stage, given, report, cancelled)
        except BaseException:
            self._drop(stage)
            raise

        def finish() -> None:
            self._move(stage, queue_id)
            with self._writing() as connection:
                self._audit_import(connection, by, action, queue_id, taken, origin)
                connection.execute(delete(queues).where(queues.c.id == stage))

        _until_it_works(finish, cancelled)
        return taken

    def _fill_stage(
        self,
        queue: Row[Any],
        stage: int,
        given: Sequence[ItemWithVotes],
        report: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> StagedItems:
        ids: list[int] = []
        raters: dict[str, int] = {}
        count = 0
        for start in range(0, len(given), TOGETHER):
            if cancelled():
                raise Cancelled
            began = time.monotonic()
            with self._writing() as connection:
                new, said = self._write_some(connection, queue, stage, given[start : start + TOGETHER], ids, raters)
            ids += new
            count += said
            report(len(ids))
            _let_others_in(began)
        if cancelled():
            raise Cancelled
        return StagedItems(len(ids), count)

    def _write_some(
        self,
        connection: Connection,
        queue: Row[Any],
        into: int,
        given: Sequence[ItemWithVotes],
        before: Sequence[int],
        raters: dict[str, int],
    ) -> tuple[list[int], int]:
        """Write items and their votes to the queue `into`; returns (ids, number of votes). `before`: earlier ids."""
        rows = [
            {
                "prompt": list(one.item.prompt),
                "answers": list(one.item.answers),
                "meta": one.item.meta or {},
                "queue_id": into,
                "kind": queue.kind,
                "priority": one.item.priority,
            }
            for one in given
        ]
        ids = list(connection.execute(_INSERT_ITEMS, rows).scalars()) if rows else []
        known = [*before, *ids]
        repeats = [
            {"item": item, "first": known[one.item.repeats]}
            for item, one in zip(ids, given, strict=True)
            if one.item.repeats is not None
        ]
        if repeats:
            connection.execute(_SET_REPEAT, repeats)
        for name in {vote.rater or IMPORTER_NAME for one in given for vote in one.votes} - set(raters):
            raters[name] = self._without_token(connection, queue.id, name)
        said = [
            self._given_row(raters[vote.rater or IMPORTER_NAME], item, vote, queue.kind, len(one.item.answers))
            for item, one in zip(ids, given, strict=True)
            for vote in one.votes
        ]
        if said:
            kept = connection.execute(_INSERT_VOTES, said).scalars()
            audits = [
                self._audit_row(row["rater_id"], "vote", vote, item=row["item_id"])
                for row, vote in zip(said, kept, strict=True)
            ]
            connection.execute(INSERT_AUDITS, audits)
        return ids, len(said)

    @abstractmethod
    def _given_row(self, rater: int, item: int, vote: GivenVote, kind: str, answers: int) -> dict[str, Any]:
        """The row of a vote from a record."""

    @abstractmethod
    def _without_token(self, connection: Connection, queue_id: int, name: str) -> int:
        """The id of a rater of this name who cannot log in; created if needed."""

    def _audit_import(
        self,
        connection: Connection,
        by: Person,
        action: str,
        queue_id: int,
        taken: StagedItems,
        origin: dict[str, Any] | None,
    ) -> None:
        more = {"votes": taken.votes} if origin is None else {"origin": origin}
        self._audit(connection, by.id, action, queue_id, items=taken.items, **more)

    # -- the hidden queue ---------------------------------------------------------------------------------------

    @property
    def _stages(self) -> str:
        """The workspace name of hidden queues, which no other query uses."""
        return f"importing:{self._key}"

    def _open_stage(self, queue: Row[Any]) -> int:
        uid = secrets.token_hex(4)
        _OPENED.add(uid)
        meta = {"queue": queue.id, "host": socket.gethostname(), "pid": os.getpid(), "uid": uid}
        values = {"name": f"import into {queue.id}", "kind": queue.kind, "guidelines": "", "meta": meta, "open": False}
        with self._writing() as connection:
            row = insert(queues).values(workspace=self._stages, created=time.time(), **values)
            made = connection.execute(row).inserted_primary_key
        assert made is not None
        return made[0]

    def _move(self, stage: int, queue_id: int) -> None:
        """Move the items to their queue. After the first move, the import can only be completed."""
        with self._writing() as connection:
            row = connection.execute(select(queues).where(queues.c.id == stage)).one()
            moving = update(queues).where(queues.c.id == stage).values(meta=row.meta | {"moving": True})
            connection.execute(moving)
        for some in self._in_parts(stage):
            began = time.monotonic()
            with self._writing() as connection:
                connection.execute(update(items).where(items.c.id.in_(some)).values(queue_id=queue_id))
            _let_others_in(began)

    def _drop(self, stage: int) -> None:
        """Delete a hidden queue and its items; one whose items are being moved is left for the next server."""
        with self._opened.reading() as connection:
            row = connection.execute(select(queues).where(queues.c.id == stage)).first()
        if row is None or row.meta.get("moving"):
            return
        for some in self._in_parts(stage):
            began = time.monotonic()
            with self._writing() as connection:
                connection.execute(delete(items).where(items.c.id.in_(some)))
            _let_others_in(began)
        with self._writing() as connection:
            connection.execute(delete(queues).where(queues.c.id == stage))

    def _in_parts(self, stage: int) -> list[list[int]]:
        """The items of a hidden queue, a few hundred at a time."""
        with self._opened.reading() as connection:
            chosen = select(items.c.id).where(items.c.queue_id == stage).order_by(items.c.id)
            ids = list(connection.execute(chosen).scalars())
        return [ids[at : at + 2 * TOGETHER] for at in range(0, len(ids), 2 * TOGETHER)]

    def clear_stages(self) -> int:
        """Complete or remove the imports of dead servers; returns their number."""
        with self._opened.reading() as connection:
            rows = connection.execute(select(queues).where(queues.c.workspace == self._stages)).all()
        left = [row for row in rows if _is_left(row.meta)]
        for row in left:
            if row.meta.get("moving"):
                self._move(row.id, row.meta["queue"])
                with self._writing() as connection:
                    connection.execute(delete(queues).where(queues.c.id == row.id))
            else:
                self._drop(row.id)
        return len(left)


def _until_it_works(finish: Callable[[], None], cancelled: Callable[[], bool]) -> None:
    """Complete an import that may be partly in its queue, also if the store goes away meanwhile.

    After an error, a user would import again, and the part that was moved would be there twice.
    """
    until, pause = time.monotonic() + FINISH_SECONDS, FIRST_PAUSE
    while True:
        try:
            return finish()
        except StorageError:
            if cancelled() or time.monotonic() > until:  # the next server completes it
                raise
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


def _let_others_in(began: float) -> None:
    """Pause, so that waiting votes can use the database's only writer."""
    time.sleep(min(0.25, max(0.002, BREATH * (time.monotonic() - began))))


def _is_left(meta: dict[str, Any]) -> bool:
    """Whether the server that started an import on this machine is gone."""
    if meta.get("host") != socket.gethostname():
        return False
    try:
        if int(meta["pid"]) == os.getpid():  # in a container every server has the same pid
            return meta.get("uid") not in _OPENED
        os.kill(int(meta["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, KeyError, TypeError, ValueError):
        return False
    return False
