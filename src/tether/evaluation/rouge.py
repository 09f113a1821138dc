"""ROUGE-1, ROUGE-2 and ROUGE-L as F1 (Lin 2004): how many words, pairs of words, and words in order two texts share.

Words are runs of letters and digits in lower case; nothing is stemmed and no word is left out. On English text this is
what the package `rouge-score` does without its stemmer. A text against itself is 1; texts that share nothing are 0, and
so is a text with no words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_WORD = re.compile(r"[^\W_]+")


class Rouge(NamedTuple):
    """F1 of each kind, from 0 to 1."""

    rouge1: float
    rouge2: float
    rougeL: float  # noqa: N815 (its name)


def words(text: str) -> list[str]:
    """The words that every metric of this package counts."""
    return _WORD.findall(text.lower())


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Every run of `n` tokens, in order."""
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def rouge(candidate: str, reference: str) -> Rouge:
    """The three scores of one text against one reference."""
    ours, theirs = words(candidate), words(reference)
    return Rouge(
        rouge_n(ours, theirs, 1), rouge_n(ours, theirs, 2), _f1(longest_common(ours, theirs), len(ours), len(theirs))
    )


def rouge_n(candidate: Sequence[str], reference: Sequence[str], n: int) -> float:
    """F1 of shared n-grams, each counted as often as both have it."""
    ours, theirs = Counter(ngrams(candidate, n)), Counter(ngrams(reference, n))
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest subsequence of both.

    Hyyrö's bit-vector method (2004): bit j of `row` is 0 where the table of longest common lengths goes up by one
    from column j to j + 1, so that one row of the table is two operations on whole numbers.
    """
    places: dict[str, int] = {}
    for column, word in enumerate(b):
        places[word] = places.get(word, 0) | 1 << column
    everything = (1 << len(b)) - 1
    row = everything
    for word in a:
        found = row & places.get(word, 0)
        row = ((row + found) | (row - found)) & everything
    return len(b) - row.bit_count()


def _f1(shared: int, ours: int, theirs: int) -> float:
    """2 P R / (P + R) with P = shared / ours and R = shared / theirs."""
    return 2.0 * shared / (ours + theirs) if ours and theirs else 0.0
