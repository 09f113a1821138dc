"""Encode prompts and answers as rows of tokens, and pad rows into batches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from tether.data.chat import has_template, prompt_text, prompt_token_ids, text_token_ids
from tether.data.conversations import Answer
from tether.data.prompts import cut_end, shortened
from tether.data.records import SampledIds, tokenizer_digest
from tether.errors import DataError
from tether.types import Message, Prompt, Rollout, Score, TokenBatch


class TooLongError(DataError):
    """A row that is longer than the limit and cannot be shortened."""

    REASON = "too long for data.max_length"


class Source(Protocol):
    """What a report is about: a named source with counts of its dropped records."""

    @property
    def name(self) -> str:
        """The name of the source."""
        ...

    @property
    def dropped(self) -> Counter[str]:
        """Counts of records dropped while reading, by reason."""
        ...


@dataclass(frozen=True)
class Row:
    """One prompt with one answer, which includes the end token unless it was cut; the prompt is not trained on.

    `trained` (T,) marks the trained tokens where they are not exactly the answer.
    """

    tokens: Tensor  # (T,)
    prompt_length: int
    trained: Tensor | None = None

    @property
    def response_mask(self) -> Tensor:
        """(T,) True on the tokens to train on."""
        return torch.arange(len(self.tokens)) >= self.prompt_length if self.trained is None else self.trained


class RowEncoder:
    """Encodes a prompt and its answers as rows, with the tokenizer's chat template and a trained end token.

    A row that is too long is cut at a paragraph end where `truncate` is set, and rejected otherwise. The longer of
    prompt and answer is cut first, then the other if that is not enough. All answers to one prompt keep the same
    prompt, because they were compared under it. An answer that was cut gets no end token.
    With `turns` "all", the assistant's earlier turns in the prompt are trained on as well.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_id: int,
        max_length: int,
        *,
        truncate: bool = True,
        overlong: Literal["drop", "error"] = "error",
        turns: Literal["last", "all"] = "last",
        notify: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_id = end_id
        self.max_length = max_length
        self.truncate = truncate
        self.overlong = overlong
        self.turns = turns
        self.notify = notify or _tell
        self.cut: Counter[str] = Counter()  # number of prompts and answers that were cut
        self.dropped: Counter[str] = Counter()
        self.encoded_again = 0  # records whose token ids belong to another tokenizer

    def __call__(self, prompt: Prompt | tuple[Message, ...], answer: Answer, place: str, field: str) -> Row:
        """The row exactly as the policy would sample it: the template's prompt, the answer, the end token."""
        return self.rows(prompt, [answer], place, field)[0]

    def rows(
        self,
        prompt: Prompt | tuple[Message, ...],
        answers: Sequence[Answer],
        place: str,
        field: str,
        ended: Sequence[bool] | None = None,
        sampled: SampledIds | None = None,
    ) -> list[Row]:
        """One row per answer to a prompt; an answer that has not `ended` by itself gets no end token.

        Where `sampled` has token ids of this tokenizer, the rows are made from those ids.
        """
        if sampled is not None and self.turns == "last" and self._can_read(sampled, place):
            return [Row(torch.tensor([*sampled.prompt, *ids]), len(sampled.prompt)) for ids in sampled.answers]
        prompt = prompt if isinstance(prompt, Prompt) else Prompt(place, prompt)
        before = prompt_token_ids(self.tokenizer, prompt)
        whole = ended or [True] * len(answers)
        encoded = [self._answer(prompt, answer, end) for answer, end in zip(answers, whole, strict=True)]
        longest = max(len(ids) for ids, _ in encoded)
        if len(before) + longest > self.max_length:
            shorter = self._shorten(prompt, before, answers, encoded) if self.truncate else None
            if shorter is None:
                repair = "no paragraph end fits: shorten it" if self.truncate else "shorten it, set data.truncate"
                raise TooLongError(
                    f"{place}: field {field!r} makes a row of {len(before) + longest} tokens, above data.max_length = "
                    f"{self.max_length}: {repair}, set data.overlong to drop, or raise the limit"
                )
            prompt, encoded = shorter
            before = prompt_token_ids(self.tokenizer, prompt)
        asked = self._earlier_turns(prompt, before) if self.turns == "all" else [False] * len(before)
        return [
            Row(torch.tensor([*before, *ids]), len(before), _mask([*asked, *learned], len(before)))
            for ids, learned in encoded
        ]

    def text(self, text: str, *, end: bool) -> list[Row]:
        """The row of a plain text, none for a text of one token. A text over the limit is cut and gets no end token."""
        ids = text_token_ids(self.tokenizer, text)
        if end and ids[-1:] != [self.end_id]:
            ids = [*ids, self.end_id]
        if len(ids) > self.max_length:
            self.cut["text"] += 1
        if len(ids) < 2:
            self.dropped["texts of one token"] += 1
            return []
        return [Row(torch.tensor(ids[: self.max_length]), 1)]

    def report(self, source: Source | str) -> None:
        """Report what was cut and dropped in a source, and reset the counts."""
        name, dropped = (source, Counter[str]()) if isinstance(source, str) else (source.name, source.dropped)
        if self.encoded_again:
            self.notify(
                f"{name}: {self.encoded_again} records hold token ids of another tokenizer: their texts are encoded "
                "with this one, so their tokens can differ from those that were sampled"
            )
            self.encoded_again = 0
        paragraphs = {kind: number for kind, number in self.cut.items() if kind != "text"}
        if paragraphs:
            what = " and ".join(f"{number} {kind}{'s' * (number != 1)}" for kind, number in sorted(paragraphs.items()))
            self.notify(f"{name}: {what} cut at a paragraph end, to fit data.max_length = {self.max_length}")
        if number := self.cut["text"]:
            self.notify(f"{name}: {number} text{'s' * (number != 1)} cut at data.max_length = {self.max_length} tokens")
        for reason, number in (dropped + self.dropped).items():
            self.notify(f"{name}: dropped {number}: {reason}")
        self.cut.clear()
        self.dropped.clear()

    @cached_property
    def digest(self) -> str:
        """The tokenizer's digest, computed on first use."""
        return tokenizer_digest(self.tokenizer)

    def _can_read(self, sampled: SampledIds, place: str) -> bool:
        """Whether the ids belong to this tokenizer and fit the limit; otherwise the texts are encoded and cut."""
        if sampled.tokenizer != self.digest:
            self.encoded_again += 1
            return False
        highest = max(max(ids) for ids in (sampled.prompt, *sampled.answers))
        if highest >= len(self.tokenizer):
            raise DataError(f"{place}: token id {highest} is not in the tokenizer, which has {len(self.tokenizer)}")
        return len(sampled.prompt) + max(map(len, sampled.answers)) <= self.max_length

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, prompt: Prompt, answer: Answer, ended: bool) -> tuple[list[int], list[bool]]:
        """(ids, which of them are trained on)."""
        if isinstance(answer, tuple):
            return self._turns(prompt, answer, ended)
        ids = [*self._encode(answer), *([self.end_id] if ended else [])]
        return ids, [True] * len(ids)

    def _turns(self, prompt: Prompt, turns: tuple[Message, ...], ended: bool) -> tuple[list[int], list[bool]]:
        """Turns of the assistant and of tools as the template writes them; only the assistant's are trained on."""
        if not has_template(self.tokenizer):
            raise DataError(f"{prompt.id}: an answer with tools or of several turns needs a model with a chat template")
        start = prompt_text(self.tokenizer, prompt)
        whole = replace(prompt, messages=(*prompt.messages, *turns))
        text, spans = self._spans(whole, len(prompt.messages))
        if not text.startswith(start):
            raise DataError(_rewrites(prompt.id))
        text = text.rstrip()
        ids, learned = self._marked(text[len(start) :], [(a - len(start), b - len(start)) for a, b in spans])
        if ended and ids[-1] != self.end_id:
            ids, learned = [*ids, self.end_id], [*learned, True]
        return ids, learned

    def _earlier_turns(self, prompt: Prompt, before: list[int]) -> list[bool]:
        """(prompt length,) True on the assistant's turns."""
        if not any(turn["role"] == "assistant" for turn in prompt.messages):
            return [False] * len(before)
        text, spans = self._spans(prompt, 0, answered=False)
        ids, learned = self._marked(text, spans)
        first = len(before) - len(ids)  # the length of BOS, where there is no template
        if first < 0 or before[first:] != ids:
            raise DataError(_rewrites(prompt.id))
        return [False] * first + learned

    def _spans(self, prompt: Prompt, first: int, *, answered: bool = True) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the spans of the assistant's turns from message `first` on.

        A span covers what the template writes from the beginning of an answer to the end of the turn. It includes the
        end token and excludes the white space after it.
        """
        text = prompt_text(self.tokenizer, prompt, answered=answered)
        spans: list[tuple[int, int]] = []
        for place, turn in enumerate(prompt.messages):
            if turn["role"] != "assistant" or place < max(first, 1):
                continue
            begun = prompt_text(self.tokenizer, replace(prompt, messages=prompt.messages[:place]))
            begun += "" if has_template(self.tokenizer) else "\n"
            done = prompt_text(self.tokenizer, replace(prompt, messages=prompt.messages[: place + 1]), answered=True)
            if not (done.startswith(begun) and text.startswith(done.rstrip())):
                raise DataError(_rewrites(prompt.id))
            spans.append((len(begun), len(done.rstrip())))
        return text, spans

    def _marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """The ids of a text, and which of them are inside one of the spans."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                "assistant turns can be told apart with a fast tokenizer only: set data.assistant_turns last"
            )
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        learned = [
            any(a <= start and end <= b and end > start for a, b in spans) for start, end in found["offset_mapping"]
        ]
        return list(found["input_ids"]), learned

    # -- cutting ------------------------------------------------------------------------------------------------------

    def _shorten(
        self,
        prompt: Prompt,
        before: list[int],
        answers: Sequence[Answer],
        encoded: list[tuple[list[int], list[bool]]],
    ) -> tuple[Prompt, list[tuple[list[int], list[bool]]]] | None:
        """`(prompt, answers)` shortened to fit, or None."""
        longest = max(len(ids) for ids, _ in encoded)
        for kind in ("answer", "prompt") if longest > len(before) else ("prompt", "answer"):
            if kind == "prompt":
                shorter = shortened(prompt, self.tokenizer, self.max_length - longest)
                if shorter is not None:
                    self.cut["prompt"] += 1
                    return shorter, encoded
            else:
                room = self.max_length - len(before)
                cut = [
                    pair if len(pair[0]) <= room else self._shorten_answer(answer, room)
                    for answer, pair in zip(answers, encoded, strict=True)
                ]
                fitting = [pair for pair in cut if pair is not None]
                if len(fitting) == len(cut):
                    self.cut["answer"] += sum(len(ids) > room for ids, _ in encoded)
                    return prompt, fitting
        return None

    def _shorten_answer(self, answer: Answer, room: int) -> tuple[list[int], list[bool]] | None:
        """The ids of the answer's beginning, without an end token."""
        if isinstance(answer, tuple):
            return None
        text = cut_end(answer, lambda text: len(self._encode(text)) <= room)
        if text is None:
            return None
        ids = self._encode(text)
        return ids, [True] * len(ids)

    def _encode(self, answer: str) -> list[int]:
        return list(self.tokenizer.encode(answer, add_special_tokens=False))


def _mask(learned: list[bool], prompt_length: int) -> Tensor | None:
    """The mask; None where exactly the answer is trained on."""
    plain = not any(learned[:prompt_length]) and all(learned[prompt_length:])
    return None if plain else torch.tensor(learned)


def _rewrites(place: str) -> str:
    return (
        f"{place}: the model's chat template writes earlier turns differently once they are answered, so they cannot "
        "be learned in place: set data.assistant_turns last, and give answers as text"
    )


def _tell(message: str) -> None:
    print(f"tether: {message}", file=sys.stderr, flush=True)


def pad_right(rows: Sequence[Tensor], fill: float | bool) -> Tensor:
    """(B, longest) the rows stacked, each padded on the right with `fill`."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=float(fill))


def attention_mask(rows: Sequence[Tensor]) -> Tensor:
    """(B, longest) bool, True on each row's own tokens, computed from lengths and never from token ids."""
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths.max())) < lengths[:, None]


@dataclass(frozen=True)
class Collated:
    """The usable rows: a batch whose row b is `rollouts[b]`, scored `scores[b]`; and counts of what was dropped."""

    batch: TokenBatch
    rollouts: list[Rollout]
    scores: list[Score]
    dropped: dict[str, float]


def collate(
    rollouts: Sequence[Rollout], scores: Sequence[Score], *, pad_id: int, temperature: float, need_groups: bool
) -> Collated:
    """One batch of the usable rollouts, and counts of what was dropped.

    Dropped, never scored as zero: an answer that the engine failed on, one without a sampled token, and one whose score
    is missing or not finite.
    Where the algorithm compares the samples of a prompt, a sample without siblings is dropped as well.
    """
    if len(rollouts) != len(scores):
        raise DataError(
            f"the reward returned {len(scores)} scores for {len(rollouts)} rollouts: it must return one for each"
        )
    sampled = [(rollout, score) for rollout, score in zip(rollouts, scores, strict=True) if rollout.finish != "error"]
    kept = [(rollout, score) for rollout, score in sampled if rollout.response_length > 0]
    counts = {
        "dropped/error": float(len(rollouts) - len(sampled)),
        "dropped/empty": float(len(sampled) - len(kept)),
    }
    valid = [(rollout, score) for rollout, score in kept if score.usable]
    counts["dropped/unscored"] = float(len(kept) - len(valid))
    if need_groups:
        sizes = Counter(rollout.group_id for rollout, _ in valid)
        paired = [(rollout, score) for rollout, score in valid if sizes[rollout.group_id] > 1]
        counts["dropped/alone"] = float(len(valid) - len(paired))
        valid = paired
    if not valid:
        reasons = ", ".join(f"{int(number)} {name.removeprefix('dropped/')}" for name, number in counts.items())
        raise DataError(f"none of the {len(rollouts)} rollouts can be trained on ({reasons}): check the reward")
    kept_rollouts, kept_scores = [rollout for rollout, _ in valid], [score for _, score in valid]
    batch = _batch(kept_rollouts, kept_scores, pad_id, temperature)
    return Collated(batch, kept_rollouts, kept_scores, counts)


def _batch(rollouts: Sequence[Rollout], scores: Sequence[Score], pad_id: int, temperature: float) -> TokenBatch:
    assert not any(bool(rollout.response_mask[0]) for rollout in rollouts), "the first token has no state before it"
    tokens = [rollout.token_ids for rollout in rollouts]
    return TokenBatch(
        tokens=pad_right(tokens, pad_id),
        attention_mask=attention_mask(tokens),
        response_mask=pad_right([rollout.response_mask for rollout in rollouts], False),
        temperature=temperature,
        behavior_logprobs=pad_right([rollout.behavior_logprobs for rollout in rollouts], 0.0),
        untruncated_logprobs=pad_right([rollout.untruncated_logprobs for rollout in rollouts], 0.0),
        scores=torch.tensor([score.value for score in scores], dtype=torch.float32),
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts]),
        truncated=torch.tensor([rollout.finish == "length" for rollout in rollouts]),
    )
