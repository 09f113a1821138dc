"""A report on a source of records: counts, lengths and examples. `tether data` prints it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tether.config.recipes import DPORecipe, Recipe, RewardRecipe, RLRecipe, SFTRecipe
from tether.data.chat import prompt_token_ids
from tether.data.conversations import is_labelled, prompt_of
from tether.data.examples import (
    Parsed,
    columns_in,
    encode_demonstrations,
    encode_rankings,
    parse_demonstrations,
    parse_rankings,
)
from tether.data.prompts import PromptRule
from tether.data.records import Record, read_records
from tether.data.rows import Row, RowEncoder
from tether.data.sources import shown_source
from tether.models.tokenizer import TextModel

QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class MarkedText:
    """Some text, and whether its tokens are trained on."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Shown:
    """One row of an example: its label ("chosen", "rank 2"), and its pieces."""

    title: str
    pieces: tuple[MarkedText, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataReport:
    """Counts, lengths in tokens, and a few examples."""

    source: str
    method: str
    model: str
    context: int
    limit: str  # the maximum length of a row or prompt, as text
    records: int
    used: int
    columns: dict[str, int]  # for each column, the number of records in which it is not empty
    shapes: dict[str, int]
    dropped: dict[str, int]
    cut: dict[str, int]
    lengths: dict[str, list[int]]  # quantiles
    trained: int  # tokens
    examples: tuple[tuple[Shown, ...], ...]
    notes: tuple[str, ...] = field(default=())


def guessed_method(record: Record) -> str:
    """The method that a record is suited for."""
    if record.has("chosen") or record.has("answers"):
        return "reward"
    answered = ("completion", "output", "text")
    if any(record.has(name) for name in answered) or is_labelled(record):
        return "sft"
    for name in ("messages", "conversations"):
        if record.has(name):
            return "sft" if record.messages(name)[-1]["role"] == "assistant" else "ppo"
    return "ppo"


def report_on(recipe: Recipe, model: TextModel, examples: int) -> DataReport:
    """Read the recipe's records as training would, with only the tokenizer loaded."""
    match recipe:
        case RLRecipe():
            return _on_prompts(recipe, model, examples)
        case SFTRecipe():
            parsed = parse_demonstrations(recipe.data.train, recipe.data)
        case RewardRecipe() | DPORecipe():
            parsed = parse_rankings(recipe.data.train, recipe.data)
        case _:
            raise ValueError(f"{recipe.method} reads no records")
    return _on_rows(recipe, parsed, model, examples)


def _on_rows(
    recipe: SFTRecipe | RewardRecipe | DPORecipe, parsed: Parsed, model: TextModel, examples: int
) -> DataReport:
    data, told = recipe.data, list[str]()
    longest = min(data.max_length, model.context_length)
    turns = data.assistant_turns if isinstance(recipe, SFTRecipe) else "last"
    encode = _Counting(
        model.tokenizer,
        model.end_id,
        longest,
        truncate=data.truncate,
        overlong=data.overlong,
        turns=turns,
        notify=told.append,
    )
    if isinstance(recipe, SFTRecipe):
        rows = encode_demonstrations(parsed, encode)
        shown = [(_shown("", row, model),) for row in rows[:examples]]
        used, groups = len(rows), [[row] for row in rows]
    else:
        rankings = encode_rankings(parsed, encode)
        groups = [list(ranking.rows) for ranking in rankings]
        used = len(rankings)
        shown = [
            tuple(_shown(_rank(rank), row, model) for rank, row in zip(ranking.ranks, ranking.rows, strict=True))
            for ranking in rankings[:examples]
        ]
    flat = [row for group in groups for row in group]
    masks = [row.response_mask for row in flat]
    lengths = {
        "prompt": quantiles(row.prompt_length for row in flat),
        "answer" if isinstance(recipe, RewardRecipe) else "trained": quantiles(int(mask.sum()) for mask in masks),
        "row": quantiles(len(row.tokens) for row in flat),
    }
    return DataReport(
        source=parsed.name,
        method=recipe.method,
        model=model.name,
        context=model.context_length,
        limit=f"{longest} tokens per row",
        records=parsed.records,
        used=used,
        columns=parsed.columns,
        shapes=dict(Counter(example.shape for example in parsed.examples)),
        dropped=dict(parsed.dropped + encode.dropped_in_all),
        cut=dict(encode.cut_in_all),
        lengths=lengths,
        trained=sum(int(mask.sum()) for mask in masks),
        examples=tuple(shown),
        notes=_notes(recipe, parsed, turns),
    )


class _Counting(RowEncoder):
    """A row encoder whose `report` does not reset the counts."""

    def report(self, source: Any) -> None:
        self.cut_in_all, self.dropped_in_all = Counter(self.cut), Counter(self.dropped)
        super().report(source)


def _notes(recipe: Recipe, parsed: Parsed, turns: str) -> tuple[str, ...]:
    several = sum(
        any(turn["role"] == "assistant" for turn in example.prompt.messages)
        for example in parsed.examples
        if hasattr(example, "prompt")
    )
    if not several or not isinstance(recipe, SFTRecipe):
        return ()
    which = "only the last one is" if turns == "last" else "all that follow a user's turn are"
    return (
        f"Conversations with several assistant turns: {several}; {which} trained on (data.assistant_turns {turns}).",
    )


def _rank(rank: int) -> str:
    return "best" if rank == 0 else f"rank {rank + 1}"


def _on_prompts(recipe: RLRecipe, model: TextModel, examples: int) -> DataReport:
    assert recipe.task.prompts is not None
    records = read_records(recipe.task.prompts, recipe.data)
    asked = [prompt_of(record, recipe.data, index) for index, record in enumerate(records)]
    rule = PromptRule.of(recipe.data, model.context_length, recipe.rollout.max_new_tokens)
    found = rule.apply([prompt for prompt, _ in asked], model.tokenizer, shown_source(recipe.task.prompts))
    shown: list[tuple[Shown, ...]] = []
    for prompt in found.prompts[:examples]:
        text = model.tokenizer.decode(prompt_token_ids(model.tokenizer, prompt), skip_special_tokens=False)
        notes = () if prompt.answer is None else (f"answer: {prompt.answer}",)
        if prompt.meta:
            notes = (*notes, f"columns for rewards: {', '.join(prompt.meta)}")
        shown.append(
            (Shown("", (MarkedText(str(text), False), MarkedText("the answer is sampled here", True)), notes),)
        )
    different = len({repr((prompt.messages, prompt.tools)) for prompt in found.prompts})
    answered = sum(prompt.answer is not None for prompt in found.prompts)
    return DataReport(
        source=shown_source(recipe.task.prompts),
        method=recipe.method,
        model=model.name,
        context=model.context_length,
        limit=rule.why,
        records=len(records),
        used=len(found.prompts),
        columns=columns_in(records),
        shapes=dict(Counter(shape for _, shape in asked)),
        dropped={f"longer than {rule.why}": found.dropped} if found.dropped else {},
        cut={"prompt": found.cut} if found.cut else {},
        lengths={"prompt": quantiles(found.lengths)},
        trained=0,
        examples=tuple(shown),
        notes=(f"{different} different prompts, {answered} with an answer to check against.",),
    )


def quantiles(numbers: Iterable[int]) -> list[int]:
    """The values at QUANTILES; each is one of the numbers."""
    ordered = sorted(numbers)
    return [ordered[round(share * (len(ordered) - 1))] for share in QUANTILES] if ordered else []


def _shown(title: str, row: Row, model: TextModel) -> Shown:
    """A row as text, split into trained and untrained pieces."""
    mask = row.response_mask.tolist()
    edges = [0, *(at for at in range(1, len(mask)) if mask[at] != mask[at - 1]), len(mask)]
    pieces = [
        MarkedText(str(model.tokenizer.decode(_ids(row.tokens[a:b]), skip_special_tokens=False)), mask[a])
        for a, b in itertools.pairwise(edges)
    ]
    return Shown(title, tuple(pieces))


def _ids(tokens: torch.Tensor) -> list[int]:
    return tokens.tolist()
