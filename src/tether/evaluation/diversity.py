"""How varied texts are: what a collapsed policy loses first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tether.evaluation.rouge import ngrams, words


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Different n-grams over all n-grams of the texts together (Li et al. 2016); NaN where there are none.

    It falls as there is more text, so compare only sets of like size.
    """
    counts = _counts(texts, n).values()
    return len(counts) / sum(counts) if counts else math.nan


def distinct_without_each(groups: Sequence[Sequence[str]], n: int) -> list[float]:
    """`distinct_n` of all texts but one group's, for each group in turn: what a jackknife needs, in one pass."""
    own = [_counts(texts, n) for texts in groups]
    all_counts: Counter[tuple[str, ...]] = Counter()
    for counts in own:
        all_counts.update(counts)
    different, total = len(all_counts), all_counts.total()
    values: list[float] = []
    for counts in own:
        lost = sum(all_counts[gram] == number for gram, number in counts.items())
        rest = total - counts.total()
        values.append((different - lost) / rest if rest else math.nan)
    return values


def repetition_rate(text: str, n: int = 4) -> float:
    """1 - (different n-grams / n-grams) within one text: 0 where nothing repeats, towards 1 in a loop."""
    grams = ngrams(words(text), n)
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _counts(texts: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(gram for text in texts for gram in ngrams(words(text), n))
