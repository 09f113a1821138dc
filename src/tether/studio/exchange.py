"""Votes as records in the usual columns, to be trained on or taken elsewhere, and records as votes."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from tether.errors import DataError
from tether.studio.ballots import ranking, skipped, verdict
from tether.studio.label_fill import item_from_record
from tether.studio.label_queues import NewItem

Records = list[dict[str, Any]]


def export_records(votes: Sequence[Row[Any]], form: str) -> Records:
    """The votes of a queue as `pairs`, `rankings` or `messages`; each record names the votes that it stands for."""
    return EXPORTS[form](votes)


def _pairs(votes: Sequence[Row[Any]]) -> Records:
    """`prompt`, `chosen`, `rejected`: what most raters of an item prefer. Without a majority there is no record.

    A ranking gives every pair in it. Hidden repeats count with the item that they repeat.
    """
    tallies: dict[tuple[int, int, int], Counter[int]] = defaultdict(Counter)
    given: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    items: dict[int, Row[Any]] = {}
    for vote in votes:
        item = vote.repeat_of or vote.item_id
        items.setdefault(item, vote)
        for better, worse in _preferences(vote):
            key = (item, min(better, worse), max(better, worse))
            tallies[key][better] += 1
            given[key].append(vote.id)
    records: Records = []
    for (item, one, other), tally in tallies.items():
        if tally[one] != tally[other]:
            chosen, rejected = (one, other) if tally[one] > tally[other] else (other, one)
            texts = [answer["text"] for answer in items[item].answers]
            record = {"prompt": _prompt(items[item].prompt), "chosen": texts[chosen], "rejected": texts[rejected]}
            records.append(record | {"item": item, "votes": given[item, one, other]})
    return records


def _preferences(vote: Row[Any]) -> list[tuple[int, int]]:
    """(better, worse) for all that a vote says, by the answers' own places."""
    if vote.kind == "pair":
        said = verdict(vote.order, vote.choice)
        return [] if said not in ("0", "1") else [(int(said), 1 - int(said))]
    places = (ranking(vote.order, vote.choice) if vote.kind == "ranking" else None) or []
    return [(better, worse) for at, better in enumerate(places) for worse in places[at + 1 :]]


def _rankings(votes: Sequence[Row[Any]]) -> Records:
    """`prompt`, `answers`, `ranks`: one record a vote, 0 the best; answers that tie have the same rank."""
    records: Records = []
    for vote in votes:
        ranks = _ranks(vote)
        if ranks is not None:
            answers = [answer["text"] for answer in vote.answers]
            record = {"prompt": _prompt(vote.prompt), "answers": answers, "ranks": ranks}
            records.append(record | {"item": vote.item_id, "votes": [vote.id]})
    return records


def _ranks(vote: Row[Any]) -> list[int] | None:
    if vote.kind == "pair":
        said = verdict(vote.order, vote.choice)
        return None if said is None else [0, 0] if said in ("tie", "both_bad") else [int(said != "0"), int(said != "1")]
    places = ranking(vote.order, vote.choice) if vote.kind == "ranking" else None
    return None if places is None else [places.index(answer) for answer in range(len(places))]


def _messages(votes: Sequence[Row[Any]]) -> Records:
    """`messages`: demonstrations as they were written; of a comparison, the answer that most prefer."""
    written = [vote for vote in votes if vote.kind == "demonstration" and not skipped(vote.choice)]
    records: Records = [
        {"messages": [*vote.prompt, _said(vote.choice)], "item": vote.item_id, "votes": [vote.id]} for vote in written
    ]
    for record in _pairs(votes):
        turns = record["prompt"]
        asked = turns if isinstance(turns, list) else [{"role": "user", "content": turns}]
        kept = {"item": record["item"], "votes": record["votes"]}
        records.append({"messages": [*asked, _said(record["chosen"])]} | kept)
    return records


EXPORTS: dict[str, Callable[[Sequence[Row[Any]]], Records]] = {
    "pairs": _pairs,
    "rankings": _rankings,
    "messages": _messages,
}


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _prompt(messages: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """A single question as a text, as most files have it; a conversation as its messages."""
    alone = len(messages) == 1 and messages[0]["role"] == "user"
    return messages[0]["content"] if alone else messages


def as_lines(records: Iterable[dict[str, Any]]) -> str:
    """JSONL."""
    return "".join(json.dumps(record) + "\n" for record in records)


# -- records that come in ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Imported:
    """An item, and the choice that its record made where it made one."""

    item: NewItem
    choice: Any


def read_lines(text: str) -> Records:
    """Records from JSONL; a DataError names the line."""
    records: Records = []
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


def imported(kind: str, records: Sequence[dict[str, Any]]) -> list[Imported]:
    """Records as items with their votes: `chosen` over `rejected`, `ranks`, or the answer that ends `messages`."""
    found: list[Imported] = []
    for number, record in enumerate(records, start=1):
        place = f"record {number}"
        found.append(Imported(item_from_record(kind, record, place), _choice(kind, record)))
    return found


def _choice(kind: str, record: dict[str, Any]) -> Any:
    """What a record says, answers being shown in its own order; None where it says nothing."""
    if kind == "demonstration":
        return _written(record)
    if "answers" not in record:  # `chosen` stands first, `rejected` second
        return "left" if kind == "pair" else [0, 1]
    answers, ranks = record["answers"], record.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != len(answers) or not all(type(rank) is int for rank in ranks):
        return None
    if kind == "pair":
        return "tie" if ranks[0] == ranks[1] else "left" if ranks[0] < ranks[1] else "right"
    is_order = len(set(ranks)) == len(ranks)
    return sorted(range(len(ranks)), key=ranks.__getitem__) if is_order else None


def _written(record: dict[str, Any]) -> str | None:
    """The answer that a demonstration ends with."""
    turns = record.get("messages")
    last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
    text = last.get("content") if last.get("role") == "assistant" else record.get("completion")
    return text if isinstance(text, str) and text.strip() else None
