"""Items as records in the usual columns, and records as items; nothing of what was sampled is lost on the way.

An item holds the prompt's messages and, for each answer, its text, whether it ended by itself, and the token ids that
were sampled, where they are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tether.errors import DataError
from tether.studio.label_queues import NewItem
from tether.studio.votes import MAX_RANKED, MIN_RANKED

KEPT = ("category", "tools", "prompt_id")  # fields of a record that an item keeps as they are
MAX_TAGS, MAX_TAG = 20, 60

Answers = Sequence[Mapping[str, Any]]


def item_from_record(kind: str, record: Mapping[str, Any], place: str) -> NewItem:
    """A record in the usual columns, as something to ask: what it says about which answer is better is left out."""
    prompt = prompt_of(record, place)
    meta = {name: record[name] for name in KEPT if record.get(name) is not None}
    if not isinstance(meta.get("category", ""), str):
        del meta["category"]
    if tags := tags_of(record.get("tags"), place):
        meta["tags"] = tags
    if kind == "demonstration":
        return NewItem(prompt, (), meta)
    answers = _answers(record, place)
    fewest, most = (2, 2) if kind == "pair" else (MIN_RANKED, MAX_RANKED)
    if not fewest <= len(answers) <= most:
        raise DataError(f"{place}: a {kind} has {fewest} to {most} answers, and this has {len(answers)}")
    prompt_ids, tokenizer = record.get("prompt_token_ids"), record.get("tokenizer")
    if all("ids" in answer for answer in answers) and isinstance(tokenizer, str) and prompt_ids is not None:
        meta |= {"prompt_ids": _ids(prompt_ids, "prompt_token_ids", place), "tokenizer": tokenizer}
    else:  # ids say nothing without the tokenizer that they are of
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
    """A list of short words; None is no tags."""
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
    """The prompt as messages; `messages` may end with the answer, which is not part of it."""
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
    """`prompt`, `answers`, `ended`, and the sampled token ids where they are known."""
    record: dict[str, Any] = head_of(prompt, meta) | {
        "answers": [answer["text"] for answer in answers],
        "ended": [answer.get("ended", True) for answer in answers],
    }
    if has_ids(answers, meta):
        record |= ids_of(meta) | {"token_ids": [answer["ids"] for answer in answers]}
    return record


def head_of(prompt: Sequence[dict[str, Any]], meta: Mapping[str, Any]) -> dict[str, Any]:
    """`prompt` and what else was said of it. A single question is a text, as most files have it."""
    alone = len(prompt) == 1 and set(prompt[0]) == {"role", "content"} and prompt[0]["role"] == "user"
    kept = {name: meta[name] for name in (*KEPT, "tags") if name in meta}
    return {"prompt": prompt[0]["content"] if alone else list(prompt)} | kept


def has_ids(answers: Answers, meta: Mapping[str, Any]) -> bool:
    """Whether the sampled tokens of every answer are known."""
    return "tokenizer" in meta and "prompt_ids" in meta and all("ids" in answer for answer in answers)


def ids_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that the ids of answers need beside them."""
    return {"prompt_token_ids": meta["prompt_ids"], "tokenizer": meta["tokenizer"]}
