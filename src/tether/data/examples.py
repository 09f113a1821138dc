"""Demonstrations, texts, pairs and rankings as token rows and as batches: read, held out, and ordered for training.

`read_texts` gives the rows of plain text or demonstrations whose gradient PPO-ptx adds to that of RL.
`split_by_prompt` splits by prompt, so no prompt is on both sides. `DataOrder` gives the items of a step as a function
of one integer, the position in the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from tether.config.base import Paths, ReadSettings
from tether.data.chat import has_template
from tether.data.conversations import (
    IMPLIED,
    Demonstration,
    Preference,
    demonstration_of,
    grouped_by_prompt,
    is_labelled,
    preference_of,
)
from tether.data.records import PLAIN, Record, read_records
from tether.data.rows import Row, RowEncoder, TooLongError, attention_mask, pad_right
from tether.data.sources import shown_source
from tether.errors import DataError
from tether.seeds import derive_seed
from tether.types import PairBatch, RankedBatch, Sequences


@dataclass(frozen=True)
class Ranking:
    """The answers to one prompt, and their ranks (0 is best, equal ranks tie)."""

    rows: tuple[Row, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A text whose tokens are all trained on."""

    text: str
    shape: str = "text"


@dataclass(frozen=True)
class Parsed:
    """The parsed records of a source, and counts of those left out, by reason."""

    name: str
    examples: Sequence[Any]
    records: int
    dropped: Counter[str]
    columns: dict[str, int]  # for each column, the number of records in which it is not empty

    def checked(self) -> Parsed:
        """Return self; raise DataError where no record can be trained on."""
        if not self.examples:
            reasons = ", ".join(f"{number} {reason}" for reason, number in self.dropped.items())
            raise DataError(f"{self.name}: none of the {self.records} records can be trained on ({reasons})")
        return self


def columns_in(records: Sequence[Record]) -> dict[str, int]:
    """For each column, the number of records in which it is not empty."""
    return dict(Counter(name for record in records for name, value in record.fields.items() if value is not None))


# -- demonstrations -----------------------------------------------------------------------------------------------


def parse_demonstrations(paths: Paths, settings: ReadSettings = PLAIN, *, split: str | None = None) -> Parsed:
    """Demonstrations and texts. Of labeled answers only the good ones are kept."""
    dropped: Counter[str] = Counter()
    found: list[Demonstration | Text] = []
    records = read_records(paths, settings, split=split)
    for record in records:
        example = _text(record) or demonstration_of(record, settings)
        if isinstance(example, Demonstration) and not example.good:
            dropped["answers with label false"] += 1
        else:
            found.append(example)
    return Parsed(shown_source(paths), found, len(records), dropped, columns_in(records)).checked()


def _text(record: Record) -> Text | None:
    others = ("messages", "conversations", "prompt", "instruction", "completion", "chosen")
    if not record.has("text") or any(record.has(field) for field in others):
        return None
    return Text(record.text("text"))


def encode_demonstrations(parsed: Parsed, encode: RowEncoder, *, end_texts: bool = True) -> list[Row]:
    """Their rows; reports what was cut or dropped."""
    rows: list[Row] = []
    for example in parsed.examples:
        if isinstance(example, Text):
            rows += encode.text(example.text, end=end_texts)
            continue
        try:
            said = ([example.answer], example.prompt.id, example.field, [example.ended], example.sampled)
            rows += encode.rows(example.prompt, *said)
        except TooLongError:
            if encode.overlong == "error":
                raise
            encode.dropped[TooLongError.REASON] += 1
    encode.report(parsed)
    if not rows:
        raise DataError(f"{parsed.name}: no record fits data.max_length = {encode.max_length}: raise it")
    return rows


def read_demonstrations(
    paths: Paths, encode: RowEncoder, settings: ReadSettings = PLAIN, *, split: str | None = None
) -> list[Row]:
    """Rows from records with `messages`, `prompt` and `completion`, `text`, or any other shape that has an answer."""
    return encode_demonstrations(parse_demonstrations(paths, settings, split=split), encode)


# -- preferences --------------------------------------------------------------------------------------------------


def parse_rankings(paths: Paths, settings: ReadSettings = PLAIN, *, split: str | None = None) -> Parsed:
    """Preferences. Labeled answers become rankings of the prompts that have both good and bad ones."""
    dropped: Counter[str] = Counter()
    found: list[Preference] = []
    labelled: list[Demonstration] = []
    records = read_records(paths, settings, split=split)
    for record in records:
        if is_labelled(record) and not record.has("chosen") and not record.has("answers"):
            labelled.append(demonstration_of(record, settings))
            continue
        preference = preference_of(record, settings)
        if preference is None:
            dropped["pairs whose answers are equal"] += 1
        else:
            found.append(preference)
    grouped = grouped_by_prompt(labelled)
    if alone := len(labelled) - sum(len(each.answers) for each in grouped):
        dropped["labeled answers to prompts that have only good or only bad ones"] += alone
    return Parsed(shown_source(paths), [*found, *grouped], len(records), dropped, columns_in(records)).checked()


def encode_rankings(parsed: Parsed, encode: RowEncoder) -> list[Ranking]:
    """Their rows; reports what was cut or dropped."""
    rankings: list[Ranking] = []
    templated = has_template(encode.tokenizer)
    for each in parsed.examples:
        answers = each.answers
        if templated and each.shape == IMPLIED:  # the leading blank only separated the answer from the prompt
            answers = tuple(text.lstrip() if isinstance(text, str) else text for text in answers)
        try:
            rows = encode.rows(each.prompt, answers, each.prompt.id, each.field, each.ended, each.sampled)
        except TooLongError:
            if encode.overlong == "error":
                raise
            encode.dropped[TooLongError.REASON] += 1
        else:
            rankings.append(Ranking(tuple(rows), each.ranks))
    encode.report(parsed)
    if not rankings:
        raise DataError(f"{parsed.name}: no record fits data.max_length = {encode.max_length}: raise it")
    return rankings


def read_rankings(
    paths: Paths, encode: RowEncoder, settings: ReadSettings = PLAIN, *, split: str | None = None
) -> list[Ranking]:
    """Rankings from `chosen` and `rejected`, or `answers` and optional `ranks`, or `completion` and `label`."""
    return encode_rankings(parse_rankings(paths, settings, split=split), encode)


# -- batches ------------------------------------------------------------------------------------------------------


def collate_rows(rows: Sequence[Row], pad_id: int) -> Sequences:
    """Demonstrations as one padded batch."""
    return Sequences(**_columns(rows, pad_id))


def collate_rankings(rankings: Sequence[Ranking], pad_id: int) -> RankedBatch:
    """Rankings as one padded batch; every ranking has its own group id."""
    sizes = torch.tensor([len(ranking.rows) for ranking in rankings])
    return RankedBatch(
        **_columns([row for ranking in rankings for row in ranking.rows], pad_id),
        group_ids=torch.arange(len(rankings)).repeat_interleave(sizes),
        ranks=torch.tensor([rank for ranking in rankings for rank in ranking.ranks]),
    )


def collate_pairs(rankings: Sequence[Ranking], pad_id: int) -> PairBatch:
    """Every pair of each ranking as two rows; the reference log-probs are filled in later."""
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


def read_texts(paths: Paths, encode: RowEncoder) -> list[Row]:
    """Rows from records with `text`, which train on every token but the first, or from demonstrations.

    A text is cut at the maximum row length. It gets no end token, because it serves as pretraining data.
    """
    return encode_demonstrations(parse_demonstrations(paths), encode, end_texts=False)


# -- held out, and the order of the rest ---------------------------------------------------------------------------

Example = TypeVar("Example", Row, Ranking)


def split_by_prompt(
    examples: Sequence[Example], fraction: float, seed: int, source: str
) -> tuple[list[Example], list[Example]]:
    """`(training, held out)`, both in the order of the file.

    The seed shuffles the prompts; prompts are held out in that order until their records reach `fraction`, rounded.
    """
    groups: dict[bytes, list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault(prompt_key(example), []).append(index)
    if len(groups) < 2:
        raise DataError(
            f"data.held_out_fraction: {source} has {len(groups)} prompt, and one of two must be held out: name a file "
            "with data.held_out, or add prompts"
        )
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted, drawn = max(1, round(fraction * len(examples))), set[int]()
    shuffled = [list(groups.values())[place] for place in order]
    for members in shuffled[:-1]:  # keep at least one prompt for training
        if len(drawn) >= wanted:
            break
        drawn.update(members)
    training = [example for index, example in enumerate(examples) if index not in drawn]
    return training, [example for index, example in enumerate(examples) if index in drawn]


def prompt_key(example: Row | Ranking) -> bytes:
    """A key that is equal for examples with the same prompt: the tokens before the first trained token.

    For a text without a prompt (nothing, or only BOS, comes before it) the key is all of its tokens.
    """
    row = example.rows[0] if isinstance(example, Ranking) else example
    trained = row.response_mask.nonzero()
    before = int(trained[0]) if len(trained) else len(row.tokens)
    return row.tokens[: before if before > 1 else None].numpy().tobytes()


Item = TypeVar("Item")


@dataclass(frozen=True)
class DataOrder(Generic[Item]):
    """Items in an order that is reshuffled every epoch; `take` is a function of the position alone."""

    items: Sequence[Item]
    seed: int

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError("there is nothing to train on: the data set is empty")

    def take(self, position: int, count: int) -> list[Item]:
        """The `count` items from `position` on, continuing into later epochs."""
        taken: list[Item] = []
        while len(taken) < count:
            epoch, start = divmod(position + len(taken), len(self.items))
            order = self._order(epoch)[start : start + count - len(taken)]
            taken += [self.items[index] for index in order]
        return taken

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(len(self.items), generator=generator).tolist()
