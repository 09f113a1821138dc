"""The items of a queue for its owner (assignments, gold, tags, disagreement), and the agreement of raters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from sqlalchemy import Row, delete, insert, select, update

from tether.store.database.schema import assignments, items, queues, raters, votes
from tether.studio.label_queues import Queues
from tether.studio.label_records import by_own_place, ranks_of, verdict
from tether.studio.people import Person
from tether.studio.replies import Refused

Units = Mapping[Hashable, Mapping[int, str]]
"""The value that each rater gave to each unit."""


def krippendorff_alpha(units: Units) -> float | None:
    """Krippendorff's alpha for nominal data: 1 is full agreement, 0 is the agreement expected by chance.

        alpha = 1 - D_observed / D_expected

    Only units with two or more raters count; they have n values in total. A unit with m values has m (m - 1) ordered
    pairs, each of weight 1 / (m - 1). D_observed is the weight of unlike pairs divided by n. D_expected is the fraction
    of unlike pairs among all n (n - 1). The result is None if no unit has two raters, and 1 if all values are equal.

    K. Krippendorff, Content Analysis (2004), chapter 11.
    """
    shared = [Counter(said.values()) for said in units.values() if len(said) >= 2]
    totals: Counter[str] = Counter()
    for counts in shared:
        totals.update(counts)
    n = totals.total()
    if n == 0:
        return None
    observed = sum(_unlike(counts) / (counts.total() - 1) for counts in shared) / n
    expected = _unlike(totals) / (n * (n - 1))
    return 1.0 if expected == 0 else 1.0 - observed / expected


def _unlike(counts: Counter[str]) -> int:
    """Number of ordered pairs of values that differ."""
    return counts.total() ** 2 - sum(count**2 for count in counts.values())


@dataclass(frozen=True)
class Vote:
    """The parts of a vote that agreement needs."""

    item: int
    repeat_of: int | None
    rater: int
    kind: str
    order: Sequence[int]
    choice: Any


def judgements(vote: Vote) -> dict[Hashable, str]:
    """The better answer of each pair, according to a vote. A ranking of n answers decides n (n - 1) / 2 pairs."""
    if vote.kind == "pair":
        said = verdict(vote.order, vote.choice)
        return {} if said is None else {(0, 1): said}
    ranks = ranks_of(vote.kind, vote.order, vote.choice)
    if ranks is None:
        return {}
    return {(one, other): _better(ranks, one, other) for one, other in combinations(range(len(ranks)), 2)}


def _better(ranks: Sequence[int], one: int, other: int) -> str:
    return "tie" if ranks[one] == ranks[other] else str(one if ranks[one] < ranks[other] else other)


def agreement(votes: Iterable[Vote]) -> dict[str, Any]:
    """`alpha` between raters (without hidden repeats), `pairs` with two or more raters, `consistency` of each rater."""
    everything = list(votes)
    units: dict[Hashable, dict[int, str]] = defaultdict(dict)
    for vote in everything:
        if vote.repeat_of is None:
            for pair, said in judgements(vote).items():
                units[vote.item, pair][vote.rater] = said
    own = {(vote.item, vote.rater): judgements(vote) for vote in everything}
    again: dict[int, list[bool]] = defaultdict(list)
    for vote in everything:
        first = own.get((vote.repeat_of, vote.rater)) if vote.repeat_of is not None else None
        for pair, said in judgements(vote).items() if first else ():
            if first and pair in first:
                again[vote.rater].append(said == first[pair])
    counted = Counter(vote.rater for vote in everything)
    every = [same for several in again.values() for same in several]
    return {
        "alpha": krippendorff_alpha(units),
        "pairs": sum(len(said) >= 2 for said in units.values()),
        "consistency": sum(every) / len(every) if every else None,
        "repeats": len(every),
        "raters": [
            {
                "id": rater,
                "votes": count,
                "consistency": sum(again[rater]) / len(again[rater]) if again[rater] else None,
                "repeats": len(again[rater]),
            }
            for rater, count in sorted(counted.items())
        ],
    }


# -- items --------------------------------------------------------------------------------------------------------

Status = Literal["any", "open", "judged", "done", "skipped"]


@dataclass(frozen=True)
class ItemFilter:
    """Which items to list. `rater`: judged by or assigned to a person; `disagreement`: raters disagree."""

    status: Status = "any"
    rater: int | None = None
    disagreement: bool = False
    gold: bool | None = None
    tag: str = ""
    text: str = ""


class Items(Queues):
    """The items of a queue, for its owner."""

    def listed(self, queue_id: int, wanted: ItemFilter, limit: int, offset: int) -> dict[str, Any]:
        """A page of the items that match the filter, their number, and all tags."""
        queue = self.queue(queue_id)
        rows = self.items(queue_id)
        with self._opened.reading() as connection:
            said = select(votes, raters.c.name.label("rater"), raters.c.excluded)
            joined = votes.join(items, items.c.id == votes.c.item_id).join(raters, raters.c.id == votes.c.rater_id)
            said = said.select_from(joined).where(items.c.queue_id == queue_id, ~votes.c.undone).order_by(votes.c.id)
            by_item: dict[int, list[Row[Any]]] = defaultdict(list)
            for vote in connection.execute(said):
                by_item[vote.item_id].append(vote)
            given: dict[int, list[int]] = defaultdict(list)
            chosen = select(assignments).join(items, items.c.id == assignments.c.item_id)
            for row in connection.execute(chosen.where(items.c.queue_id == queue_id)):
                given[row.item_id].append(row.rater_id)
        tags = Counter(tag for row in rows for tag in row.meta.get("tags", ()))
        needed = queue.meta.get("votes_per_item") or 1
        found = [_listed_item(row, by_item[row.id], given[row.id], needed) for row in rows]
        fitting = [item for item in found if _fits(item, wanted)]
        page = fitting[offset : offset + limit]
        return {"items": page, "total": len(fitting), "of": len(found), "tags": dict(tags.most_common(100))}

    def assign(self, by: Person, queue_id: int, chosen: Sequence[int], people: Sequence[int], each: int | None) -> int:
        """Assign items to people: to all of them, or to `each` of them in turn. Without people, to everyone again.

        No items means all items of the queue. A repeat goes to the people who have the item that it repeats. Returns
        the number of assigned items.
        """
        with self._writing() as connection:
            queue = self._queue(connection, queue_id)
            rows = connection.execute(
                select(items.c.id, items.c.repeat_of).where(items.c.queue_id == queue_id).order_by(items.c.id)
            ).all()
            known = set(
                connection.execute(
                    select(raters.c.id).where(raters.c.workspace == self._key, raters.c.id.in_(people))
                ).scalars()
            )
            if missing := [person for person in people if person not in known]:
                raise Refused(404, f"there is no annotator {missing[0]}")
            wanted = set(chosen or [row.id for row in rows])
            if unknown := wanted - {row.id for row in rows}:
                raise Refused(404, f"there is no item {min(unknown)} in queue {queue_id}")
            firsts = [row.id for row in rows if row.repeat_of is None and row.id in wanted]
            whose = _shared(firsts, people, each or len(people))
            mine = [row.id for row in rows if (row.repeat_of or row.id) in whose]
            if mine:
                connection.execute(delete(assignments).where(assignments.c.item_id.in_(mine)))
            new = [
                {"item_id": row.id, "rater_id": rater}
                for row in rows
                for rater in whose.get(row.repeat_of or row.id, ())
            ]
            if new:
                connection.execute(insert(assignments), new)
            some = select(assignments.c.item_id).join(items).where(items.c.queue_id == queue_id).limit(1)
            is_assigned = connection.execute(some).first() is not None
            meta = queue.meta | {"assigned": is_assigned}
            connection.execute(update(queues).where(queues.c.id == queue_id).values(meta=meta))
            self._audit(connection, by.id, "assign", queue_id, items=len(firsts), raters=list(people), each=each)
        return len(firsts)

    def set_gold(self, by: Person, item_id: int, ranks: Sequence[int] | None) -> None:
        """Set the correct ranks of an item's answers, or None to make it an ordinary item."""
        with self._writing() as connection:
            item = self._item(connection, item_id)
            if ranks is not None:
                if item.kind == "demonstration":
                    raise Refused(422, "gold: a demonstration has no correct ranks")
                if len(ranks) != len(item.answers):
                    raise Refused(
                        422, f"gold: must hold a rank for each of the {len(item.answers)} answers, 0 for the best"
                    )
            values = {"gold": None if ranks is None else list(ranks)}
            connection.execute(
                update(items).where((items.c.id == item_id) | (items.c.repeat_of == item_id)).values(values)
            )
            self._audit(connection, by.id, "gold", item_id, ranks=values["gold"])

    def set_tags(self, by: Person, item_id: int, tags: Sequence[str]) -> None:
        """Replace the tags of an item."""
        with self._writing() as connection:
            item = self._item(connection, item_id)
            connection.execute(update(items).where(items.c.id == item_id).values(meta=item.meta | {"tags": list(tags)}))
            self._audit(connection, by.id, "tags", item_id, tags=list(tags))

    def exclude(self, by: Person, rater_id: int, excluded: bool) -> None:
        """Exclude a person's votes from training and export, or include them again."""
        mine = (raters.c.workspace == self._key) & (raters.c.id == rater_id)
        with self._writing() as connection:
            if connection.execute(select(raters.c.id).where(mine)).first() is None:
                raise Refused(404, f"there is no annotator {rater_id}")
            connection.execute(update(raters).where(mine).values(excluded=excluded))
            self._audit(connection, by.id, "exclude" if excluded else "include", rater_id)

    def _item(self, connection: Any, item_id: int) -> Row[Any]:
        chosen = select(items).join(queues, queues.c.id == items.c.queue_id)
        found = connection.execute(chosen.where(items.c.id == item_id, queues.c.workspace == self._key)).first()
        if found is None:
            raise Refused(404, f"there is no item {item_id}")
        return found


def _shared(firsts: Sequence[int], people: Sequence[int], each: int) -> dict[int, list[int]]:
    """Assign each item to `each` people in turn, so that all get equally many."""
    if not people:
        return {item: [] for item in firsts}
    each = min(each, len(people))
    return {
        item: [people[(place * each + turn) % len(people)] for turn in range(each)] for place, item in enumerate(firsts)
    }


def _listed_item(row: Row[Any], said: Sequence[Row[Any]], given: Sequence[int], needed: int) -> dict[str, Any]:
    listed = [_listed_vote(row.kind, vote) for vote in said]
    real = [vote for vote in listed if not vote["skipped"]]
    enough = set(given) <= {vote["rater_id"] for vote in listed} if given else len(real) >= needed
    status = "done" if listed and enough else "judged" if real else "skipped" if listed else "open"
    return {
        "id": row.id,
        "kind": row.kind,
        "prompt": row.prompt,
        "answers": [
            {name: answer.get(name) for name in ("text", "source")} | {"ended": answer.get("ended", True)}
            for answer in row.answers
        ],
        "tags": row.meta.get("tags", []),
        "gold": row.gold,
        "repeat_of": row.repeat_of,
        "assigned": sorted(given),
        "votes": listed,
        "status": status,
        "disagreement": disagreement(row, said),
    }


def _listed_vote(kind: str, vote: Row[Any]) -> dict[str, Any]:
    ranks = ranks_of(kind, vote.order, vote.choice)
    written = vote.choice if kind == "demonstration" and isinstance(vote.choice, str) else None
    return {
        "id": vote.id,
        "rater_id": vote.rater_id,
        "rater": vote.rater,
        "excluded": vote.excluded,
        "ranks": ranks,
        "both_bad": vote.choice == "both_bad" and kind == "pair",
        "written": written,
        "skipped": ranks is None and written is None,
        "comment": vote.comment,
        "ratings": None if vote.ratings is None else by_own_place(vote.order, vote.ratings),
        "seconds": vote.seconds,
    }


def disagreement(row: Row[Any], said: Sequence[Row[Any]]) -> float | None:
    """The fraction of pairs of votes that disagree about a pair of answers; None with fewer than two votes."""
    listed = [judgements(Vote(row.id, None, vote.rater_id, row.kind, vote.order, vote.choice)) for vote in said]
    listed = [one for one in listed if one]
    if len(listed) < 2:
        return None
    pairs: Mapping[Any, list[str]] = defaultdict(list)
    for one in listed:
        for pair, better in one.items():
            pairs[pair].append(better)
    unlike = alike = 0
    for values in pairs.values():
        counts, n = Counter(values), len(values)
        same = sum(count * (count - 1) for count in counts.values()) // 2
        alike += same
        unlike += n * (n - 1) // 2 - same
    return unlike / (unlike + alike)


def _fits(item: Mapping[str, Any], wanted: ItemFilter) -> bool:
    if wanted.status != "any" and item["status"] != wanted.status:
        return False
    if wanted.rater is not None and wanted.rater not in (
        *item["assigned"],
        *(vote["rater_id"] for vote in item["votes"]),
    ):
        return False
    if wanted.disagreement and not item["disagreement"]:
        return False
    if wanted.gold is not None and (item["gold"] is not None) != wanted.gold:
        return False
    if wanted.tag and wanted.tag not in item["tags"]:
        return False
    return not wanted.text or wanted.text.casefold() in _words(item)


def _words(item: Mapping[str, Any]) -> str:
    """All text of an item, for search."""
    said = [turn.get("content") or "" for turn in item["prompt"]] + [answer["text"] for answer in item["answers"]]
    said += [vote["comment"] or "" for vote in item["votes"]] + [vote["written"] or "" for vote in item["votes"]]
    return "\n".join(map(str, said)).casefold()


# -- gold ---------------------------------------------------------------------------------------------------------

MIN_GOLD = 3  # minimum votes on gold items before a rater is flagged


def gold_accuracy(said: Sequence[Row[Any]], least: float) -> dict[int, dict[str, Any]]:
    """By rater: `votes` on gold items, `accuracy` (the mean fraction of pairs of answers that are ordered as in the
    gold), and whether that is below `least`, with MIN_GOLD votes or more."""
    shares: dict[int, list[float]] = defaultdict(list)
    for vote in said:
        ranks = ranks_of(vote.kind, vote.order, vote.choice)
        if ranks is not None and vote.gold is not None:
            shares[vote.rater_id].append(_alike(ranks, vote.gold))
    return {
        rater: {
            "votes": len(values),
            "accuracy": sum(values) / len(values),
            "flagged": len(values) >= MIN_GOLD and sum(values) / len(values) < least,
        }
        for rater, values in shares.items()
    }


def _alike(ranks: Sequence[int], gold: Sequence[int]) -> float:
    """Of the pairs of answers that the gold decides, the fraction that a vote orders the same way."""
    n = len(ranks)
    pairs = [(one, other) for one in range(n) for other in range(one + 1, n)]
    decided = [pair for pair in pairs if gold[pair[0]] != gold[pair[1]]] or pairs
    same = [_sign(ranks, *pair) == _sign(gold, *pair) for pair in decided]
    return sum(same) / len(same)


def _sign(ranks: Sequence[int], one: int, other: int) -> int:
    return (ranks[one] > ranks[other]) - (ranks[one] < ranks[other])
