"""What a vote can be, and what it means: the answers' own places, whatever order they were shown in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from tether.studio.replies import Refused

KINDS = ("pair", "ranking", "demonstration")
PAIR_CHOICES = ("left", "right", "tie", "both_bad", "skip")
SKIP = "skip"
SKIPPED = {"skip": True}  # a demonstration may be the word skip, so that its skip is not a text
FEWEST_RANKED, MOST_RANKED = 2, 9
LONGEST_TEXT = 200_000


def shown_order(item_id: int, rater_id: int, count: int) -> list[int]:
    """A shuffle of the answers that is the same whenever this rater sees this item."""

    def lot(place: int) -> str:
        return hashlib.sha256(f"{item_id}:{rater_id}:{place}".encode()).hexdigest()

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
        is_shuffle = isinstance(choice, list) and sorted(map(str, choice)) == sorted(map(str, range(count)))
        if choice != SKIP and not (is_shuffle and all(type(place) is int for place in choice)):
            raise Refused(422, f"choice: must be every shown place from 0 to {count - 1}, best first, or skip")
    elif choice != SKIPPED and not isinstance(choice, str):
        raise Refused(422, "choice: must be the text of a demonstration")
    elif choice != SKIPPED and not 0 < len(choice.strip()) <= len(choice) <= LONGEST_TEXT:
        raise Refused(422, "choice: a demonstration cannot be empty, nor longer than 200,000 characters")
    return choice


def verdict(order: Sequence[int], choice: Any) -> str | None:
    """What a vote on a pair says, by the answers' own places: "0", "1", "tie" or "both_bad"; None for a skip."""
    if choice in ("left", "right"):
        return str(order[0 if choice == "left" else 1])
    return choice if choice in ("tie", "both_bad") else None


def ranking(order: Sequence[int], choice: Any) -> list[int] | None:
    """The answers' own places, best first; None for a skip."""
    return [order[place] for place in choice] if isinstance(choice, list) else None


def skipped(choice: Any) -> bool:
    """Whether the writer of a demonstration had nothing to say."""
    return choice == SKIPPED
