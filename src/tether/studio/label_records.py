"""Votes and items as records: the valid votes and their meaning, and conversion between items and records.

Votes refer to the answers by their index in the item, whatever order they were shown in. An item holds the prompt's
messages and, for each answer, its text, whether it ended with an end token, and the sampled token ids if known. Nothing
that was sampled is lost in a conversion.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

from tether.errors import DataError
from tether.studio.label_queues import NewItem
from tether.studio.replies import Refused

# -- votes --------------------------------------------------------------------------------------------------------

PAIR_CHOICES = ("left", "right", "tie", "both_bad", "skip")
SKIP = "skip"
SKIPPED = {"skip": True}  # not the text "skip", which could be a demonstration
MIN_RANKED, MAX_RANKED = 2, 9
MAX_TEXT = 200_000
AXES = ("overall", "coverage", "accuracy", "coherence")
LOWEST_RATING, HIGHEST_RATING = 1, 7
MAX_COMMENT = 5_000  # characters


def shown_order(key: str, item_id: int, rater_id: int, count: int) -> list[int]:
    """A shuffle of the answers that is the same whenever this rater sees this item.

    `key` is the queue's secret: an annotator who could compute the shuffle would know the source of each answer.
    """

    def lot(place: int) -> str:
        return hmac.new(key.encode(), f"{item_id}:{rater_id}:{place}".encode(), hashlib.sha256).hexdigest()

    return sorted(range(count), key=lot)


def check_choice(kind: str, count: int, order: Sequence[int], choice: Any) -> Any:
    """The choice as it is stored. Raises a 422 if it is not valid for this kind of item."""
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
    """The meaning of a vote on a pair, by the answers' own indices: "0", "1", "tie" or "both_bad"; None for a skip."""
    if choice in ("left", "right"):
        return str(order[0 if choice == "left" else 1])
    return choice if choice in ("tie", "both_bad") else None


def _is_order(choice: Any, count: int) -> bool:
    """Whether a choice names every shown position once; tied positions form a list."""
    if not isinstance(choice, list):
        return False
    places = [place for group in choice for place in (group if isinstance(group, list) else [group])]
    return all(type(place) is int for place in places) and sorted(places) == list(range(count))


def ranks_of(kind: str, order: Sequence[int], choice: Any) -> list[int] | None:
    """The rank of each answer by its own index, 0 for the best; equal ranks tie. None for a skip or a text."""
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
    """The choice that expresses these ranks, if the answers are shown in their own order."""
    if kind == "pair":
        return "tie" if ranks[0] == ranks[1] else "left" if ranks[0] < ranks[1] else "right"
    groups = [[place for place, rank in enumerate(ranks) if rank == value] for value in sorted(set(ranks))]
    return [group[0] if len(group) == 1 else group for group in groups]


Ratings = Sequence[dict[str, int]]


def check_ratings(count: int, ratings: Ratings | None) -> Ratings | None:
    """Ratings as they are stored: one mapping for each shown answer; None if nothing was rated."""
    if not ratings or not any(ratings):
        return None
    if len(ratings) != count:
        raise Refused(422, f"ratings: there must be one for each of the {count} answers")
    return ratings


def by_own_place(order: Sequence[int], shown: Sequence[Any]) -> list[Any]:
    """Values for the answers as shown, reordered to the answers' own order."""
    found: list[Any] = [None] * len(order)
    for place, own in enumerate(order):
        found[own] = shown[place]
    return found


def skipped(choice: Any) -> bool:
    """Whether the rater skipped a demonstration."""
    return choice == SKIPPED


# -- records as items ---------------------------------------------------------------------------------------------

KEPT = ("category", "tools", "prompt_id")  # fields of a record that an item keeps unchanged
MAX_TAGS, MAX_TAG = 20, 60

Answers = Sequence[Mapping[str, Any]]


def item_from_record(kind: str, record: Mapping[str, Any], place: str) -> NewItem:
    """A record in the usual columns as an item; what it says about which answer is better is left out."""
    prompt = prompt_of(record, place)
    meta = {name: record[name] for name in KEPT if record.get(name) is not None}
    if not isinstance(meta.get("category", ""), str):
        del meta["category"]
    if tags := tags_of(record.get("tags"), place):
        meta["tags"] = tags
    if kind == "demonstration":
        return NewItem(prompt, (), meta)
    answers = _answers(record, place)
    low, high = (2, 2) if kind == "pair" else (MIN_RANKED, MAX_RANKED)
    if not low <= len(answers) <= high:
        raise DataError(f"{place}: a {kind} has {low} to {high} answers, and this has {len(answers)}")
    prompt_ids, tokenizer = record.get("prompt_token_ids"), record.get("tokenizer")
    if all("ids" in answer for answer in answers) and isinstance(tokenizer, str) and prompt_ids is not None:
        meta |= {"prompt_ids": _ids(prompt_ids, "prompt_token_ids", place), "tokenizer": tokenizer}
    else:  # ids are meaningless without their tokenizer
        answers = [{name: value for name, value in answer.items() if name != "ids"} for answer in answers]
    return NewItem(prompt, answers, meta)


def _answers(record: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    if "answers" in record:
        texts = record["answers"]
        count = len(texts) if isinstance(texts, list) else 0
        ended, ids = record.get("ended"), record.get("token_ids")
        ended = [True] * count if ended is None else ended
        ids = [None] * count if ids is None else ids
    else:
        names = ("chosen", "rejected")
        texts = [record.get(name) for name in names]
        ended = [True if (mark := record.get(f"{name}_ended")) is None else mark for name in names]
        ids = [record.get(f"{name}_token_ids") for name in names]
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise DataError(f"{place}: needs `chosen` and `rejected`, or `answers`: texts that are not empty")
    if not isinstance(ended, list) or len(ended) != len(texts) or not all(type(mark) is bool for mark in ended):
        raise DataError(f"{place}: field 'ended' must say true or false for each of the {len(texts)} answers")
    if not isinstance(ids, list) or len(ids) != len(texts):
        raise DataError(f"{place}: field 'token_ids' must hold a list for each of the {len(texts)} answers")
    return [
        {"text": text, "ended": mark} | ({} if own is None else {"ids": _ids(own, "token_ids", place)})
        for text, mark, own in zip(texts, ended, ids, strict=True)
    ]


def _ids(value: Any, field: str, place: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(one) is int and 0 <= one < 2**31 for one in value):
        raise DataError(f"{place}: field {field!r} must hold lists of token ids")
    return value


def tags_of(value: Any, place: str) -> list[str]:
    """A list of short tags; None means no tags."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(
        isinstance(tag, str) and 0 < len(tag.strip()) <= MAX_TAG for tag in value
    ):
        raise DataError(f"{place}: field 'tags' must be a list of words of at most {MAX_TAG} characters")
    if len(value) > MAX_TAGS:
        raise DataError(f"{place}: field 'tags' may hold {MAX_TAGS} words")
    return list(dict.fromkeys(tag.strip() for tag in value))


def prompt_of(record: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """The prompt as messages; `messages` may end with the answer, which is removed."""
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    given = prompt if prompt is not None else record.get("messages")
    if isinstance(given, list) and given and all(_is_message(turn) for turn in given):
        turns = [dict(turn) for turn in given]
        ends_with_answer = prompt is None and len(turns) > 1 and turns[-1]["role"] == "assistant"
        return turns[:-1] if ends_with_answer else turns
    raise DataError(f"{place}: needs `prompt`, a text or a list of messages")


def _is_message(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))


# -- items as records ---------------------------------------------------------------------------------------------


def record_of(prompt: Sequence[dict[str, Any]], answers: Answers, meta: Mapping[str, Any]) -> dict[str, Any]:
    """`prompt`, `answers`, `ended`, and the sampled token ids if they are known."""
    record: dict[str, Any] = head_of(prompt, meta) | {
        "answers": [answer["text"] for answer in answers],
        "ended": [answer.get("ended", True) for answer in answers],
    }
    if has_ids(answers, meta):
        record |= ids_of(meta) | {"token_ids": [answer["ids"] for answer in answers]}
    return record


def head_of(prompt: Sequence[dict[str, Any]], meta: Mapping[str, Any]) -> dict[str, Any]:
    """`prompt` and the other fields of the record. A single question is a text, as in most files."""
    alone = len(prompt) == 1 and set(prompt[0]) == {"role", "content"} and prompt[0]["role"] == "user"
    kept = {name: meta[name] for name in (*KEPT, "tags") if name in meta}
    return {"prompt": prompt[0]["content"] if alone else list(prompt)} | kept


def has_ids(answers: Answers, meta: Mapping[str, Any]) -> bool:
    """Whether the sampled tokens of every answer are known."""
    return "tokenizer" in meta and "prompt_ids" in meta and all("ids" in answer for answer in answers)


def ids_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the token ids of answers need beside them."""
    return {"prompt_token_ids": meta["prompt_ids"], "tokenizer": meta["tokenizer"]}
