"""Held-out text: how well a model predicts short passages that Tether ships, of prose, dialogue and code.

Bits per byte compare models of different tokenizers; the perplexity is of tokens, and compares models of one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from tether.evaluation.suite.suite_model import SuiteModel

FILE = "texts.txt"
MARK = "%% "  # a line with the kind of the passage that follows


class Passage(NamedTuple):
    """A passage and its kind: prose, dialogue or code."""

    kind: str
    text: str


@cache
def passages() -> tuple[Passage, ...]:
    """The passages, kinds mixed evenly, so that the first N hold every kind."""
    found: list[Passage] = []
    for block in files("tether.evaluation.suite").joinpath(FILE).read_text(encoding="utf-8").split(MARK)[1:]:
        kind, _, text = block.partition("\n")
        found.append(Passage(kind, text.rstrip("\n")))
    counts = {kind: sum(each.kind == kind for each in found) for kind in dict.fromkeys(each.kind for each in found)}
    seen = dict.fromkeys(counts, 0)
    placed: list[tuple[float, int, Passage]] = []
    for number, each in enumerate(found):
        seen[each.kind] += 1
        placed.append(((seen[each.kind] - 0.5) / counts[each.kind], number, each))
    return tuple(each for _, _, each in sorted(placed))


@dataclass(frozen=True)
class TextScore:
    """How well one passage was predicted."""

    nats: float  # -log p of all its tokens
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for a byte of the passage."""
        return self.nats / math.log(2.0) / self.bytes

    @property
    def nats_per_token(self) -> float:
        """The log of the passage's perplexity."""
        return self.nats / self.tokens


def score_texts(model: SuiteModel, texts: list[str]) -> list[TextScore]:
    """Every token of every text, the first one after `opening`; a text beyond the context is cut into windows."""
    opening = model.opening
    size = model.context_length - len(opening)
    encoded = [list(model.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    owners, rows = [], []
    for number, ids in enumerate(encoded):
        for start in range(0, len(ids), size):
            owners.append(number)
            rows.append([*opening, *ids[start : start + size]])
    sums = [0.0] * len(texts)
    for owner, logprobs in zip(owners, model.logprobs(rows, [len(opening)] * len(rows), "perplexity"), strict=True):
        sums[owner] -= float(logprobs.sum())
    return [
        TextScore(nats, len(ids), len(text.encode("utf-8")))
        for nats, ids, text in zip(sums, encoded, texts, strict=True)
    ]
