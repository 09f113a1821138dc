"""Export votes as records in the usual columns, and import records as items and votes, in the background.

There are four forms. `rankings` has one record per item with everything that was sampled; training reads this form.
`pairs` has two answers per record, for other programs. `messages` has demonstrations and preferred answers. `votes` has
one record per vote with every detail. Imports run one at a time, report progress, and can be cancelled.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from sqlalchemy import Row

from tether.errors import DataError, TetherError
from tether.redact import redact
from tether.studio import label_staging
from tether.studio.label_queues import NewItem
from tether.studio.label_records import (
    AXES,
    HIGHEST_RATING,
    LOWEST_RATING,
    MAX_COMMENT,
    SKIP,
    SKIPPED,
    by_own_place,
    choice_of_ranks,
    has_ids,
    head_of,
    ids_of,
    item_from_record,
    ranks_of,
    record_of,
    skipped,
)
from tether.studio.label_staging import Cancelled, GivenVote, ItemWithVotes, StagedItems
from tether.studio.label_store import Labels
from tether.studio.people import Person
from tether.studio.replies import Refused

Records = list[dict[str, Any]]
Votes = Sequence[Row[Any]]


def export_records(votes: Votes, form: str) -> Records:
    """The votes of a queue in one of the forms; each record lists the ids of its votes."""
    return EXPORTS[form](votes)


def consensus(ranked: Sequence[Sequence[int]]) -> list[int]:
    """Combine several rankings of the same answers into one, 0 for the best; equal ranks tie.

    Borda count: an answer gains a point for each answer that a vote ranks below it, and loses one for each above it.
    For a pair this is the majority.
    """
    count = len(ranked[0])
    points = [
        sum((ranks[other] > ranks[one]) - (ranks[other] < ranks[one]) for ranks in ranked for other in range(count))
        for one in range(count)
    ]
    order = sorted(set(points), reverse=True)
    return [order.index(point) for point in points]


def _by_item(votes: Votes) -> dict[int, list[Row[Any]]]:
    """The ranking votes on each item; hidden repeats count for the item that they repeat."""
    found: dict[int, list[Row[Any]]] = defaultdict(list)
    for vote in votes:
        if ranks_of(vote.kind, vote.order, vote.choice) is not None:
            found[vote.repeat_of or vote.item_id].append(vote)
    return found


def _rankings(votes: Votes) -> Records:
    """`prompt`, `answers`, `ranks`, `ended`: one record per item with its combined votes. All-tied items are left out.

    `ratings` are the mean ratings of each answer, `comments` are all comments.
    """
    records: Records = []
    for item, said in _by_item(votes).items():
        ranks = consensus([ranks_of(vote.kind, vote.order, vote.choice) or [] for vote in said])
        if len(set(ranks)) > 1:
            record = record_of(said[0].prompt, said[0].answers, said[0].meta) | {"ranks": ranks}
            records.append(record | _remarks(said) | {"item": item, "votes": [vote.id for vote in said]})
    return records


def _remarks(said: Votes) -> dict[str, Any]:
    comments = [vote.comment for vote in said if vote.comment]
    rated = [by_own_place(vote.order, vote.ratings) for vote in said if vote.ratings]
    found: dict[str, Any] = {"comments": comments} if comments else {}
    if rated:
        found["ratings"] = [_means([ratings[place] for ratings in rated]) for place in range(len(said[0].answers))]
    return found


def _means(ratings: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """The mean on each axis; an integer if it is a whole number."""
    means: dict[str, float] = {}
    for axis in AXES:
        given = [one[axis] for one in ratings if axis in one]
        if given:
            mean = sum(given) / len(given)
            means[axis] = int(mean) if mean == int(mean) else mean
    return means


def _pairs(votes: Votes) -> Records:
    """`prompt`, `chosen`, `rejected`, and whether they were cut off: every pair that the rankings decide."""
    records: Records = []
    for item, said in _by_item(votes).items():
        ranks = consensus([ranks_of(vote.kind, vote.order, vote.choice) or [] for vote in said])
        first = said[0]
        for one, other in combinations(range(len(ranks)), 2):
            if ranks[one] != ranks[other]:
                better, worse = (one, other) if ranks[one] < ranks[other] else (other, one)
                record = _pair(first, better, worse)
                records.append(record | {"item": item, "votes": [vote.id for vote in said]})
    return records


def _pair(vote: Row[Any], better: int, worse: int) -> dict[str, Any]:
    record = head_of(vote.prompt, vote.meta)
    known = has_ids(vote.answers, vote.meta)
    for name, place in (("chosen", better), ("rejected", worse)):
        answer = vote.answers[place]
        record |= {name: answer["text"], f"{name}_ended": answer.get("ended", True)}
        record |= {f"{name}_token_ids": answer["ids"]} if known else {}
    return record | (ids_of(vote.meta) if known else {})


def _messages(votes: Votes) -> Records:
    """`messages`: demonstrations as written; for a comparison, the answer or answers that most raters prefer."""
    records: Records = []
    for vote in votes:
        if vote.kind == "demonstration" and not skipped(vote.choice):
            records.append(_turns(vote, vote.choice) | {"item": vote.item_id, "votes": [vote.id]})
    for record in _rankings(votes):
        for place, rank in enumerate(record["ranks"]):
            if rank == 0:
                kept = {"ended": record["ended"][place], "item": record["item"], "votes": record["votes"]}
                if "token_ids" in record:
                    kept |= {name: record[name] for name in ("prompt_token_ids", "tokenizer")}
                    kept["token_ids"] = [record["token_ids"][place]]
                asked = record["prompt"]
                asked = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
                extra = {name: record[name] for name in ("tools", "category", "tags") if name in record}
                records.append({"messages": [*asked, _said(record["answers"][place])]} | extra | kept)
    return records


def _turns(vote: Row[Any], text: str) -> dict[str, Any]:
    extra = {name: vote.meta[name] for name in ("tools", "category", "tags") if name in vote.meta}
    return {"messages": [*vote.prompt, _said(text)]} | extra


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _every_vote(votes: Votes) -> Records:
    """One record per vote, including skips and ties: what was shown, who voted what, and how long it took."""
    records: Records = []
    for vote in votes:
        if vote.kind == "demonstration":
            said = {"completion": None if skipped(vote.choice) else vote.choice}
            record = head_of(vote.prompt, vote.meta) | said
        else:
            record = record_of(vote.prompt, vote.answers, vote.meta)
            record["ranks"] = ranks_of(vote.kind, vote.order, vote.choice)
            record |= {"both_bad": True} if vote.kind == "pair" and vote.choice == "both_bad" else {}
            record |= {"ratings": by_own_place(vote.order, vote.ratings)} if vote.ratings else {}
        record |= {"comment": vote.comment} if vote.comment else {}
        details = {"rater": vote.rater, "seconds": vote.seconds, "created": vote.created}
        records.append(record | details | {"item": vote.item_id, "repeats": vote.repeat_of, "votes": [vote.id]})
    return records


EXPORTS: dict[str, Callable[[Votes], Records]] = {
    "rankings": _rankings,
    "pairs": _pairs,
    "messages": _messages,
    "votes": _every_vote,
}


def as_lines(records: Iterable[dict[str, Any]]) -> str:
    """JSONL."""
    return "".join(json.dumps(record) + "\n" for record in records)


# -- import ------------------------------------------------------------------------------------------------------


MAX_LINES = 100_000  # records in one text


def read_lines(text: str) -> Records:
    """Parse records from JSONL; a DataError names the line."""
    records: Records = []
    if text.count("\n") > MAX_LINES and sum(bool(line.strip()) for line in text.split("\n")) > MAX_LINES:
        raise DataError(f"text: at most {MAX_LINES:,} records at a time; split the file and import its parts")
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"line {number}: not JSON ({error})") from None
            if not isinstance(record, dict):
                raise DataError(f"line {number}: must be an object")
            records.append(record)
    return records


def imported(kind: str, records: Sequence[dict[str, Any]]) -> list[ItemWithVotes]:
    """Records as items with votes: `chosen` over `rejected`, `ranks`, or the answer at the end of `messages`.

    Records with a `rater` are votes. Records with the same `item` are votes on one item, and a rater's second vote on
    it is left out.
    """
    found: dict[object, NewItem] = {}
    said: dict[object, dict[str | None, GivenVote]] = {}
    for number, record in enumerate(records, start=1):
        place = f"record {number}"
        rater = record.get("rater")
        is_vote = isinstance(rater, str) and bool(rater.strip()) and len(rater) <= 80
        key = ("item", _plain(record.get("repeats") or record.get("item"))) if is_vote else number
        if key not in found:
            found[key], said[key] = item_from_record(kind, record, place), {}
        vote = _vote(kind, record, rater if is_vote else None, place)
        if vote is not None:
            said[key].setdefault(vote.rater, vote)
    return [ItemWithVotes(item, tuple(said[key].values())) for key, item in found.items()]


def _plain(value: Any) -> str:
    return json.dumps(value, default=str)


def _vote(kind: str, record: Mapping[str, Any], rater: str | None, place: str) -> GivenVote | None:
    choice = _choice(kind, record)
    if choice is None:
        if rater is None:
            return None
        choice = SKIPPED if kind == "demonstration" else SKIP
    comment, seconds = record.get("comment"), record.get("seconds")
    if comment is not None and (not isinstance(comment, str) or len(comment) > MAX_COMMENT):
        raise DataError(f"{place}: field 'comment' must be a text of at most {MAX_COMMENT} characters")
    is_time = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds <= 1e7
    return GivenVote(choice, rater, comment, _ratings(record), seconds if is_time else None)


def _ratings(record: Mapping[str, Any]) -> list[dict[str, int]] | None:
    """The ratings of one rater, which are integers; means of several raters are left out."""
    given, answers = record.get("ratings"), record.get("answers")
    if not isinstance(given, list) or not isinstance(answers, list) or len(given) != len(answers):
        return None
    fits = all(
        isinstance(one, dict)
        and all(axis in AXES and type(n) is int and LOWEST_RATING <= n <= HIGHEST_RATING for axis, n in one.items())
        for one in given
    )
    return [dict(one) for one in given] if fits else None


def _choice(kind: str, record: Mapping[str, Any]) -> Any:
    """The choice in a record, with the answers in its own order; None if it has none."""
    if kind == "demonstration":
        return _written(record)
    if "answers" not in record:  # `chosen` is first, `rejected` second
        return "left" if kind == "pair" else [0, 1]
    answers, ranks = record["answers"], record.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != len(answers) or not all(type(rank) is int for rank in ranks):
        return None
    if kind == "pair" and record.get("both_bad") is True:
        return "both_bad"
    return choice_of_ranks(kind, ranks)


def _written(record: Mapping[str, Any]) -> str | None:
    """The answer at the end of a demonstration."""
    turns = record.get("messages")
    last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
    text = last.get("content") if last.get("role") == "assistant" else record.get("completion")
    return text if isinstance(text, str) and text.strip() else None


# -- imports in the background ------------------------------------------------------------------------------------

State = Literal["waiting", "running", "done", "cancelled", "failed"]
MAX_WAITING = 4  # imports that are running or queued
MAX_KNOWN = 50  # finished imports whose results are kept
PATIENCE = 2.0  # seconds that a request waits before it replies that its import is still running


@dataclass
class BackgroundImport:
    """One import, from the request to its end."""

    id: str
    queue: int
    records: int
    done: int = 0
    state: State = "waiting"
    taken: StagedItems | None = None
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    future: Future[StagedItems] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the import has ended."""
        return self.state not in ("waiting", "running")

    def as_json(self) -> dict[str, Any]:
        """As JSON for the page."""
        shown = {"id": self.id, "queue_id": self.queue, "state": self.state, "records": self.records, "done": self.done}
        if self.taken is not None:
            shown |= {"items": self.taken.items, "votes": self.taken.votes}
        return shown | ({"error": self.error} if self.error else {})


class Imports:
    """The imports of a server."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._known: dict[str, BackgroundImport] = {}
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="imports")

    def take_in(
        self, by: Person, queue: int, given: Sequence[ItemWithVotes], *, action: str, origin: dict[str, Any] | None
    ) -> BackgroundImport:
        """Start an import and wait a moment for it; a small one, of one transaction, runs here at once."""
        if len(given) <= label_staging.TOGETHER:
            taken = self._labels.take_in(by, queue, given, action=action, origin=origin)
            return BackgroundImport("", queue, len(given), len(given), "done", taken)
        with self._lock:
            if sum(not one.is_over for one in self._known.values()) >= MAX_WAITING:
                raise Refused(409, f"{MAX_WAITING} imports are running: wait for one, or cancel one")
            started = BackgroundImport(secrets.token_hex(6), queue, len(given))
            over = [key for key, one in self._known.items() if one.is_over]
            for key in over[: max(0, len(self._known) - MAX_KNOWN + 1)]:
                del self._known[key]
            self._known[started.id] = started
        started.future = self._worker.submit(self._run, started, by, given, action, origin)
        with suppress(TimeoutError, Cancelled):
            started.future.result(timeout=PATIENCE)
        return started

    def _run(
        self,
        one: BackgroundImport,
        by: Person,
        given: Sequence[ItemWithVotes],
        action: str,
        origin: dict[str, Any] | None,
    ) -> StagedItems:
        def report(done: int) -> None:
            one.done = done

        try:
            if one.stop.is_set():
                raise Cancelled
            one.state = "running"
            options = {"action": action, "origin": origin, "report": report, "cancelled": one.stop.is_set}
            one.taken = self._labels.take_in(by, one.queue, given, **options)
        except Cancelled:
            one.state = "cancelled"
            raise
        except Exception as error:
            expected = isinstance(error, TetherError | Refused)
            said = getattr(error, "detail", None) or (str(error) if expected else type(error).__name__)
            one.error, one.state = redact(str(said)), "failed"
            raise
        one.done, one.state = one.records, "done"
        return one.taken

    def get(self, import_id: str) -> BackgroundImport:
        """One import, or a 404."""
        found = self._known.get(import_id)
        if found is None:
            raise Refused(404, "there is no such import; a server knows only the imports since its start")
        return found

    def all(self) -> list[BackgroundImport]:
        """All imports, the newest first."""
        return list(self._known.values())[::-1]

    def cancel(self, import_id: str) -> BackgroundImport:
        """Cancel an import: none of its records stays. A finished import is not changed."""
        found = self.get(import_id)
        found.stop.set()
        with suppress(Exception):
            if found.future is not None:
                found.future.result(timeout=PATIENCE)
        return found

    def close(self) -> None:
        """Cancel the running imports, and end."""
        for one in self._known.values():
            one.stop.set()
        self._worker.shutdown()
