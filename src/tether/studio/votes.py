"""What a vote can be, and what it means: the answers' own places, whatever order they were shown in."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from tether.studio.replies import Refused

KINDS = ("pair", "ranking", "demonstration")
PAIR_CHOICES = ("left", "right", "tie", "both_bad", "skip")
SKIP = "skip"
SKIPPED = {"skip": True}  # a demonstration may be the word skip, so that its skip is not a text
MIN_RANKED, MAX_RANKED = 2, 9
MAX_TEXT = 200_000
AXES = ("overall", "coverage", "accuracy", "coherence")
LOWEST_RATING, HIGHEST_RATING = 1, 7
MAX_COMMENT = 5_000  # characters


def shown_order(key: str, item_id: int, rater_id: int, count: int) -> list[int]:
    """A shuffle of the answers that is the same whenever this rater sees this item.

    `key` is the queue's secret. An annotator who could compute the shuffle would know which answer is whose.
    """

    def lot(place: int) -> str:
        return hmac.new(key.encode(), f"{item_id}:{rater_id}:{place}".encode(), hashlib.sha256).hexdigest()

    return sorted(range(count), key=lot)


def check_choice(kind: str, count: int, order: Sequence[int], choice: Any) -> Any:
    """The choice as it is stored. Raises a 422 where it is not one that this kind of item has."""
    if choice == SKIPPED and kind != "demonstration":
        choice = SKIP
    if sorted(order) != list(range(count)):
        raise Refused(422, f"order: must be a shuffle of 0 to {count - 1}, as `next` gave it")
    if kind == "pair":
        if choice not in PAIR_CHOICES:
            raise Refused(422, f"choice: must be one of {', '.join(PAIR_CHOICES)}")
    elif kind == "ranking":
        if choice != SKIP and not _is_order(choice, count):
            raise Refused(
                422, f"choice: must be every shown place from 0 to {count - 1}, best first (ties in a list), or skip"
            )
    elif choice != SKIPPED and not isinstance(choice, str):
        raise Refused(422, "choice: must be the text of a demonstration")
    elif choice != SKIPPED and not 0 < len(choice.strip()) <= len(choice) <= MAX_TEXT:
        raise Refused(422, "choice: a demonstration cannot be empty, nor longer than 200,000 characters")
    return choice


def verdict(order: Sequence[int], choice: Any) -> str | None:
    """What a vote on a pair says, by the answers' own places: "0", "1", "tie" or "both_bad"; None for a skip."""
    if choice in ("left", "right"):
        return str(order[0 if choice == "left" else 1])
    return choice if choice in ("tie", "both_bad") else None


def _is_order(choice: Any, count: int) -> bool:
    """Whether a choice names every shown place once; places that tie stand together in a list."""
    if not isinstance(choice, list):
        return False
    places = [place for group in choice for place in (group if isinstance(group, list) else [group])]
    return all(type(place) is int for place in places) and sorted(places) == list(range(count))


def ranks_of(kind: str, order: Sequence[int], choice: Any) -> list[int] | None:
    """The rank of each answer by its own place, 0 for the best; equal ranks tie. None for a skip or a text."""
    if kind == "pair":
        said = verdict(order, choice)
        return None if said is None else [0, 0] if said in ("tie", "both_bad") else [int(said != "0"), int(said != "1")]
    if kind != "ranking" or not isinstance(choice, list):
        return None
    ranks = [0] * len(order)
    for rank, group in enumerate(choice):
        for place in group if isinstance(group, list) else [group]:
            ranks[order[place]] = rank
    return ranks


def choice_of_ranks(kind: str, ranks: Sequence[int]) -> Any:
    """The choice that says these ranks, the answers being shown in their own order."""
    if kind == "pair":
        return "tie" if ranks[0] == ranks[1] else "left" if ranks[0] < ranks[1] else "right"
    groups = [[place for place, rank in enumerate(ranks) if rank == value] for value in sorted(set(ranks))]
    return [group[0] if len(group) == 1 else group for group in groups]


Ratings = Sequence[dict[str, int]]


def check_ratings(count: int, ratings: Ratings | None) -> Ratings | None:
    """Ratings as they are stored: a mapping for each shown answer; None where nothing was rated."""
    if not ratings or not any(ratings):
        return None
    if len(ratings) != count:
        raise Refused(422, f"ratings: there must be one for each of the {count} answers")
    return ratings


def by_own_place(order: Sequence[int], shown: Sequence[Any]) -> list[Any]:
    """What was said of the answers as shown, in the answers' own order."""
    found: list[Any] = [None] * len(order)
    for place, own in enumerate(order):
        found[own] = shown[place]
    return found


def skipped(choice: Any) -> bool:
    """Whether the writer of a demonstration had nothing to say."""
    return choice == SKIPPED
