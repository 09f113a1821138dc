"""Demonstrations, pairs and rankings as token rows, and as batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.data.chat import prompt_token_ids
from tether.data.collate import attention_mask, pad_right
from tether.data.records import Record, read_records
from tether.errors import DataError
from tether.types import Message, PairBatch, Prompt, RankedBatch, Sequences


@dataclass(frozen=True)
class Row:
    """One prompt with one answer, the end token included; `prompt_length` tokens are not trained on."""

    tokens: Tensor  # (T,)
    prompt_length: int

    @property
    def response_mask(self) -> Tensor:
        """(T,) True on the answer."""
        return torch.arange(len(self.tokens)) >= self.prompt_length


@dataclass(frozen=True)
class Ranking:
    """The answers to one prompt, and their ranks (0 is best, equal ranks tie)."""

    rows: tuple[Row, ...]
    ranks: tuple[int, ...]


class RowEncoder:
    """Turns (prompt, answer) into rows with the tokenizer's own chat template and a learned end token."""

    def __init__(self, tokenizer: Any, end_id: int, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.end_id = end_id
        self.max_length = max_length

    def __call__(self, messages: tuple[Message, ...], answer: str, place: str, field: str) -> Row:
        """The row, as the policy itself would have sampled it: the template's prompt, the answer, the end token."""
        prompt = prompt_token_ids(self.tokenizer, Prompt(place, messages))
        tokens = [*prompt, *self.tokenizer.encode(answer, add_special_tokens=False), self.end_id]
        if len(tokens) > self.max_length:
            raise DataError(
                f"{place}: field {field!r} makes a row of {len(tokens)} tokens, above data.max_length = "
                f"{self.max_length}: shorten it, or raise the limit"
            )
        return Row(torch.tensor(tokens), len(prompt))


def read_demonstrations(path: str, encode: RowEncoder) -> list[Row]:
    """From records with `messages` (the last turn is the answer) or `prompt` and `completion`."""
    rows: list[Row] = []
    for record in read_records(path):
        if "messages" in record.fields:
            messages = record.messages("messages")
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise DataError(f"{record.place}: field 'messages' must end with an answer of role assistant")
            rows.append(encode(messages[:-1], messages[-1]["content"], record.place, "messages"))
        else:
            rows.append(encode(record.prompt_messages(), record.text("completion"), record.place, "completion"))
    return rows


def read_rankings(path: str, encode: RowEncoder) -> list[Ranking]:
    """From records with `prompt`, `chosen` and `rejected`, or `prompt`, `answers` and perhaps `ranks`."""
    return [_ranking(record, encode) for record in read_records(path)]


def _ranking(record: Record, encode: RowEncoder) -> Ranking:
    messages = record.prompt_messages()
    if "answers" not in record.fields:
        chosen = encode(messages, record.text("chosen"), record.place, "chosen")
        rejected = encode(messages, record.text("rejected"), record.place, "rejected")
        return Ranking((chosen, rejected), (0, 1))
    answers = record.texts("answers")
    ranks = record.fields.get("ranks", list(range(len(answers))))
    if len(answers) < 2:
        raise DataError(f"{record.place}: field 'answers' needs at least two answers to rank")
    if not isinstance(ranks, list) or len(ranks) != len(answers) or not all(isinstance(rank, int) for rank in ranks):
        raise DataError(f"{record.place}: field 'ranks' must be a list of {len(answers)} whole numbers, 0 for the best")
    if len(set(ranks)) < 2:
        raise DataError(f"{record.place}: field 'ranks' says that all answers tie: there is nothing to learn from it")
    return Ranking(tuple(encode(messages, answer, record.place, "answers") for answer in answers), tuple(ranks))


def collate_rows(rows: Sequence[Row], pad_id: int) -> Sequences:
    """Demonstrations as one batch."""
    return Sequences(**_columns(rows, pad_id))


def collate_rankings(rankings: Sequence[Ranking], pad_id: int) -> RankedBatch:
    """Rankings as one batch; each keeps a group id of its own."""
    sizes = torch.tensor([len(ranking.rows) for ranking in rankings])
    return RankedBatch(
        **_columns([row for ranking in rankings for row in ranking.rows], pad_id),
        group_ids=torch.arange(len(rankings)).repeat_interleave(sizes),
        ranks=torch.tensor([rank for ranking in rankings for rank in ranking.ranks]),
    )


def collate_pairs(rankings: Sequence[Ranking], pad_id: int) -> PairBatch:
    """Every pair of each ranking as two rows, with reference log-probs still to be filled in."""
    pairs = [
        (better, worse)
        for ranking in rankings
        for better, best in zip(ranking.rows, ranking.ranks, strict=True)
        for worse, worst in zip(ranking.rows, ranking.ranks, strict=True)
        if best < worst
    ]
    columns = _columns([row for pair in pairs for row in pair], pad_id)
    return PairBatch(
        **columns,
        pair_ids=torch.arange(len(pairs)).repeat_interleave(2),
        chosen=torch.tensor([True, False]).repeat(len(pairs)),
        ref_logprobs=torch.zeros(columns["tokens"].shape),
    )


def _columns(rows: Sequence[Row], pad_id: int) -> dict[str, Any]:
    tokens = [row.tokens for row in rows]
    return {
        "tokens": pad_right(tokens, pad_id),
        "attention_mask": attention_mask(tokens),
        "response_mask": pad_right([row.response_mask for row in rows], False),
    }
