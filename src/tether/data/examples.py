"""Demonstrations, pairs and rankings as token rows, and as batches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.data.chat import prompt_token_ids
from tether.data.collate import attention_mask, pad_right
from tether.data.records import Record, read_records
from tether.data.truncate import cut_end, cut_middle
from tether.errors import DataError
from tether.types import Message, PairBatch, Prompt, RankedBatch, Sequences


@dataclass(frozen=True)
class Row:
    """One prompt with one answer, the end token included unless it was cut; the prompt is not trained on."""

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
    """Turns a prompt and its answers into rows with the tokenizer's own chat template and a learned end token.

    A row that is too long is cut at the end of a paragraph where `truncate` is set, and refused where it is not. Of
    prompt and answer the longer is cut; where that does not help, the other. The answers to one prompt keep the same
    prompt, for they were compared under it. An answer that was cut did not end there, so it gets no end token.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_id: int,
        max_length: int,
        *,
        truncate: bool = True,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_id = end_id
        self.max_length = max_length
        self.truncate = truncate
        self.notify = notify or _tell
        self.cut: Counter[str] = Counter()  # how many prompts and answers were cut

    def __call__(self, messages: tuple[Message, ...], answer: str, place: str, field: str) -> Row:
        """The row, as the policy itself would have sampled it: the template's prompt, the answer, the end token."""
        return self.rows(messages, [answer], place, field)[0]

    def rows(
        self,
        messages: tuple[Message, ...],
        answers: Sequence[str],
        place: str,
        field: str,
        ended: Sequence[bool] | None = None,
    ) -> list[Row]:
        """A row for each answer to one prompt; one that had not `ended` by itself gets no end token."""
        prompt = prompt_token_ids(self.tokenizer, Prompt(place, messages))
        ends = [[self.end_id] if whole else [] for whole in ended or [True] * len(answers)]
        encoded = [[*self._encode(answer), *end] for answer, end in zip(answers, ends, strict=True)]
        longest = max(map(len, encoded))
        if len(prompt) + longest > self.max_length:
            shorter = self._shorten(messages, prompt, answers, encoded, place) if self.truncate else None
            if shorter is None:
                repair = "no end of a paragraph fits: shorten it" if self.truncate else "shorten it, set data.truncate"
                raise DataError(
                    f"{place}: field {field!r} makes a row of {len(prompt) + longest} tokens, above data.max_length = "
                    f"{self.max_length}: {repair}, or raise the limit"
                )
            prompt, encoded = shorter
        return [Row(torch.tensor([*prompt, *answer]), len(prompt)) for answer in encoded]

    def report(self, path: str) -> None:
        """Tell what was cut in a file, and begin to count anew."""
        if self.cut:
            what = " and ".join(f"{number} {kind}{'s' * (number != 1)}" for kind, number in sorted(self.cut.items()))
            self.notify(f"{path}: {what} cut at the end of a paragraph, to fit data.max_length = {self.max_length}")
            self.cut.clear()

    def _shorten(
        self,
        messages: tuple[Message, ...],
        prompt: list[int],
        answers: Sequence[str],
        encoded: list[list[int]],
        place: str,
    ) -> tuple[list[int], list[list[int]]] | None:
        """`(prompt, answers)` as ids that fit, or None."""
        longest = max(map(len, encoded))
        for kind in ("answer", "prompt") if longest > len(prompt) else ("prompt", "answer"):
            if kind == "prompt":
                shorter = self._shorten_prompt(messages, self.max_length - longest, place)
                if shorter is not None:
                    self.cut["prompt"] += 1
                    return shorter, encoded
            else:
                room = self.max_length - len(prompt)
                cut = [
                    ids if len(ids) <= room else self._shorten_answer(answer, room)
                    for answer, ids in zip(answers, encoded, strict=True)
                ]
                fitting = [ids for ids in cut if ids is not None]
                if len(fitting) == len(cut):
                    self.cut["answer"] += sum(len(ids) > room for ids in encoded)
                    return prompt, fitting
        return None

    def _shorten_prompt(self, messages: tuple[Message, ...], room: int, place: str) -> list[int] | None:
        """The prompt's ids with its longest message cut in the middle."""
        which = max(range(len(messages)), key=lambda index: len(messages[index]["content"]))

        def ids(content: str) -> list[int]:
            changed = Message(role=messages[which]["role"], content=content)
            return prompt_token_ids(self.tokenizer, Prompt(place, (*messages[:which], changed, *messages[which + 1 :])))

        content = cut_middle(messages[which]["content"], lambda text: len(ids(text)) <= room)
        return None if content is None else ids(content)

    def _shorten_answer(self, answer: str, room: int) -> list[int] | None:
        """The ids of the answer's beginning, without an end token."""
        text = cut_end(answer, lambda text: len(self._encode(text)) <= room)
        return None if text is None else self._encode(text)

    def _encode(self, answer: str) -> list[int]:
        return list(self.tokenizer.encode(answer, add_special_tokens=False))


def read_demonstrations(path: str, encode: RowEncoder) -> list[Row]:
    """From records with `messages` (the last turn is the answer) or `prompt` and `completion`."""
    rows: list[Row] = []
    for record in read_records(path):
        if record.has("messages"):
            messages = record.messages("messages")
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise DataError(f"{record.place}: field 'messages' must end with an answer of role assistant")
            rows.append(encode(messages[:-1], messages[-1]["content"], record.place, "messages"))
        else:
            rows.append(encode(record.prompt_messages(), record.text("completion"), record.place, "completion"))
    encode.report(path)
    return rows


def read_rankings(path: str, encode: RowEncoder) -> list[Ranking]:
    """From records with `prompt`, `chosen` and `rejected`, or `prompt`, `answers` and perhaps `ranks`."""
    rankings = [_ranking(record, encode) for record in read_records(path)]
    encode.report(path)
    return rankings


def _ranking(record: Record, encode: RowEncoder) -> Ranking:
    messages = record.prompt_messages()
    if not record.has("answers"):
        answers = [record.text("chosen"), record.text("rejected")]
        longer = "chosen" if len(answers[0]) > len(answers[1]) else "rejected"
        ended = [record.flag("chosen_ended"), record.flag("rejected_ended")]
        return Ranking(tuple(encode.rows(messages, answers, record.place, longer, ended)), (0, 1))
    answers = record.texts("answers")
    if len(answers) < 2:
        raise DataError(f"{record.place}: field 'answers' needs at least two answers to rank")
    ranks = record.fields["ranks"] if record.has("ranks") else list(range(len(answers)))
    if not isinstance(ranks, list) or len(ranks) != len(answers) or not all(type(rank) is int for rank in ranks):
        raise DataError(f"{record.place}: field 'ranks' must be a list of {len(answers)} whole numbers, 0 for the best")
    if len(set(ranks)) < 2:
        raise DataError(f"{record.place}: field 'ranks' says that all answers tie: there is nothing to learn from it")
    ended = record.fields["ended"] if record.has("ended") else [True] * len(answers)
    if not isinstance(ended, list) or len(ended) != len(answers) or not all(type(end) is bool for end in ended):
        raise DataError(f"{record.place}: field 'ended' must be a list of {len(answers)} times true or false")
    return Ranking(tuple(encode.rows(messages, answers, record.place, "answers", ended)), tuple(ranks))


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


def _tell(message: str) -> None:
    print(f"tether: {message}", file=sys.stderr, flush=True)
