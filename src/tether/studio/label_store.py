"""Asking and voting. A vote that was acknowledged is a vote kept, and one that is sent twice is there once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError

from tether.errors import StorageError
from tether.runs.store.schema import items, queues, raters, votes
from tether.studio.ballots import check_choice, shown_order
from tether.studio.label_queues import INSERT_AUDITS, NewItem, Queues, may_see
from tether.studio.people import Person
from tether.studio.replies import Refused

IMPORTER_NAME = "import"
REPEAT_GAP = 5  # votes between an item and its hidden repeat
LOOKED_AT = 50  # items from which the next one is chosen

# Built once: building a statement costs more than running it.
_INSERT_VOTES = insert(votes).returning(votes.c.id, sort_by_parameter_order=True)
_KNOWN = select(votes.c.id, votes.c.rater_id).where(votes.c.client_uid == bindparam("uid"))
_ITEM = select(items).where(items.c.id == bindparam("item"))
_ITEMS_ASKED = (
    select(items.c.id, items.c.kind, items.c.answers, items.c.queue_id, queues.c.open)
    .join(queues, queues.c.id == items.c.queue_id)
    .where(queues.c.workspace == bindparam("place"), items.c.id.in_(bindparam("items", expanding=True)))
)
_MINE = (votes.c.rater_id == bindparam("rater")) & ~votes.c.undone
_LEFT = (
    select(items.c.id, items.c.repeat_of)
    .where(items.c.queue_id == bindparam("queue"))
    .where(~select(votes.c.id).where(votes.c.item_id == items.c.id, _MINE).exists())
    .order_by(items.c.priority.desc(), items.c.id)
    .limit(LOOKED_AT)
)
_LATELY = select(votes.c.item_id).where(_MINE).order_by(votes.c.created.desc(), votes.c.id.desc()).limit(REPEAT_GAP)


@dataclass(frozen=True)
class Ballot:
    """A vote as it is sent; `client_uid` is the sender's own, and the same when it is sent again."""

    client_uid: str
    item_id: int
    order: Sequence[int]
    choice: Any
    seconds: float | None = None


class Labels(Queues):
    """All that is done with the queues of a workspace."""

    def next_item(self, person: Person, queue_id: int) -> dict[str, Any]:
        """What to ask a person next, their answers in the order to show them; `item` is null at the end."""
        with self._opened.reading() as connection:
            queue = self._queue(connection, queue_id, person)
            there, done = self._progress(connection, queue_id, person.id)
            item = self._ask(connection, queue_id, person.id) if queue.open else None
        about = {name: getattr(queue, name) for name in ("id", "name", "kind", "guidelines")}
        shown = None if item is None else _shown(item, person)
        return {"item": shown, "remaining": there - done, "done": done, "queue": about}

    def _ask(self, connection: Connection, queue_id: int, rater: int) -> Row[Any] | None:
        """The item that this rater is due."""
        rows = connection.execute(_LEFT, {"queue": queue_id, "rater": rater}).all()
        lately = set(connection.execute(_LATELY, {"rater": rater}).scalars())
        chosen = _choose(rows, lately)
        return None if chosen is None else connection.execute(_ITEM, {"item": chosen}).first()

    def vote(self, person: Person, ballot: Ballot) -> int:
        """Keep a vote; its id. One that was kept before is found again, and nothing changes."""
        try:
            with self._writing() as connection:
                return self._keep(connection, person, ballot)
        except (IntegrityError, Refused) as error:
            known = self._known(person, ballot)
            if known is not None:
                return known
            if isinstance(error, Refused):
                raise
            raise Refused(409, "you have voted on this already: undo that first") from None

    def vote_together(self, sent: Sequence[tuple[Person, Ballot]]) -> list[int | Exception]:
        """Keep many votes by one commit; for each its id, or why it is refused: just as `vote` one by one has it."""
        results: list[int | Exception | None] = [None] * len(sent)
        try:
            with self._writing() as connection:
                for place, kept in self._keep_plain(connection, sent).items():
                    results[place] = kept
        except (IntegrityError, StorageError):  # one of them cannot be kept, and took the others' commit with it
            results = [None] * len(sent)
        return [self._vote_or_why(*sent[place]) if kept is None else kept for place, kept in enumerate(results)]

    def _vote_or_why(self, person: Person, ballot: Ballot) -> int | Exception:
        try:
            return self.vote(person, ballot)
        except (Refused, StorageError) as error:
            return error

    def _keep_plain(self, connection: Connection, sent: Sequence[tuple[Person, Ballot]]) -> dict[int, int]:
        """Insert the votes that nothing speaks against: place in `sent` -> id. The others are left for `vote`."""
        asked = {"items": [ballot.item_id for _, ballot in sent], "place": self._key}
        found = {row.id: row for row in connection.execute(_ITEMS_ASKED, asked)}
        rows: dict[int, dict[str, Any]] = {}
        for place, (person, ballot) in enumerate(sent):
            item = found.get(ballot.item_id)
            if item is None or not item.open or not may_see(person, item.queue_id, is_open=item.open):
                continue
            try:
                choice = check_choice(item.kind, len(item.answers), ballot.order, ballot.choice)
            except Refused:
                continue
            rows[place] = _vote_row(person.id, ballot, choice)
        if not rows:
            return {}
        ids = list(connection.execute(_INSERT_VOTES, list(rows.values())).scalars())
        kept = dict(zip(rows, ids, strict=True))
        self._audit_votes(connection, [(rows[at]["rater_id"], vote, rows[at]["item_id"]) for at, vote in kept.items()])
        return kept

    def _known(self, person: Person, ballot: Ballot) -> int | None:
        with self._opened.reading() as connection:
            found = connection.execute(_KNOWN, {"uid": ballot.client_uid}).first()
        if found is not None and found.rater_id != person.id:
            raise Refused(409, "client_uid was used by someone else: make a new one for each vote")
        return None if found is None else found.id

    def _keep(self, connection: Connection, person: Person, ballot: Ballot) -> int:
        item = connection.execute(_ITEM, {"item": ballot.item_id}).first()
        if item is None:
            raise Refused(404, f"there is no item {ballot.item_id}")
        if not self._queue(connection, item.queue_id, person).open:
            raise Refused(409, "this queue is closed")
        choice = check_choice(item.kind, len(item.answers), ballot.order, ballot.choice)
        return self._insert_vote(connection, person.id, ballot, choice)

    def _insert_vote(self, connection: Connection, rater: int, ballot: Ballot, choice: Any) -> int:
        vote_id = connection.execute(_INSERT_VOTES, [_vote_row(rater, ballot, choice)]).scalar_one()
        self._audit_votes(connection, [(rater, vote_id, ballot.item_id)])
        return vote_id

    def _audit_votes(self, connection: Connection, kept: Sequence[tuple[int, int, int]]) -> None:
        """The audits of votes: (rater, vote, item) of each."""
        rows = [self._audit_row(rater, "vote", vote, item=item) for rater, vote, item in kept]
        connection.execute(INSERT_AUDITS, rows)

    def undo(self, person: Person, queue_id: int | None = None) -> int | None:
        """Take a person's last standing vote back; the item that can be voted on again, or None."""
        chosen = select(votes.c.id, votes.c.item_id).join(items, items.c.id == votes.c.item_id)
        chosen = chosen.where(votes.c.rater_id == person.id, ~votes.c.undone)
        if queue_id is not None:
            chosen = chosen.where(items.c.queue_id == queue_id)
        with self._writing() as connection:
            last = connection.execute(chosen.order_by(votes.c.created.desc(), votes.c.id.desc()).limit(1)).first()
            if last is None:
                return None
            connection.execute(update(votes).where(votes.c.id == last.id).values(undone=True))
            self._audit(connection, person.id, "undo", last.id, item=last.item_id)
        return last.item_id

    def standing_votes(self, queue_id: int) -> list[Row[Any]]:
        """Every vote of a queue that was not undone, with its item; the oldest first."""
        columns = (votes, items.c.kind, items.c.prompt, items.c.answers, items.c.meta, items.c.repeat_of)
        chosen = select(*columns).join(items, items.c.id == votes.c.item_id)
        chosen = chosen.where(items.c.queue_id == queue_id, ~votes.c.undone).order_by(votes.c.id)
        with self._opened.reading() as connection:
            return list(connection.execute(chosen).all())

    def take_in(self, by: Person, queue_id: int, new: Sequence[NewItem], choices: Sequence[Any]) -> int:
        """Items with the choices of their records, None for no choice; how many votes that is. All or nothing."""
        with self._writing() as connection:
            queue = self._queue(connection, queue_id)
            ids = self._insert_items(connection, queue, new)
            rater = self._without_token(connection, queue_id, IMPORTER_NAME)
            count = 0
            for item_id, item, choice in zip(ids, new, choices, strict=True):
                if choice is not None:
                    order = list(range(len(item.answers)))
                    kept = check_choice(queue.kind, len(order), order, choice)
                    uid = f"import-{item_id}-{secrets.token_hex(8)}"
                    self._insert_vote(connection, rater, Ballot(uid, item_id, order, kept), kept)
                    count += 1
            self._audit(connection, by.id, "import", queue_id, items=len(ids), votes=count)
        return count

    def vote_as(self, by: Person, queue_id: int, name: str, choices: Mapping[int, Any]) -> int:
        """The votes of a judge who is no person, on items that it has not voted on; how many are new."""
        with self._writing() as connection:
            queue = self._queue(connection, queue_id)
            rater = self._without_token(connection, queue_id, name)
            mine = select(votes.c.item_id).where(votes.c.rater_id == rater, ~votes.c.undone)
            voted = set(connection.execute(mine).scalars())
            new = {item: choice for item, choice in choices.items() if item not in voted}
            for item, choice in new.items():
                ballot = Ballot(f"judge-{item}-{secrets.token_hex(8)}", item, [0, 1], choice)
                self._insert_vote(connection, rater, ballot, check_choice(queue.kind, 2, ballot.order, choice))
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


def _vote_row(rater: int, ballot: Ballot, choice: Any) -> dict[str, Any]:
    values = {"client_uid": ballot.client_uid, "item_id": ballot.item_id, "rater_id": rater}
    values |= {"order": list(ballot.order), "choice": choice, "seconds": ballot.seconds}
    return values | {"created": time.time(), "undone": False}


def _choose(rows: Sequence[Any], lately: set[int]) -> int | None:
    """The first item that does not ask again what was just asked, or has not been asked yet; else the first."""
    waiting = {row.id for row in rows}
    ready = [row for row in rows if row.repeat_of is None or row.repeat_of not in (lately | waiting)]
    return next((row.id for row in ready or rows), None)


def _shown(item: Row[Any], person: Person) -> dict[str, Any]:
    """An item without anything that tells where an answer came from."""
    order = shown_order(item.id, person.id, len(item.answers))
    answers = [{"text": item.answers[place]["text"]} for place in order]
    return {"id": item.id, "kind": item.kind, "prompt": item.prompt, "answers": answers, "order": order}
