"""How far raters agree with each other, and with themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tether.studio.votes import ranks_of, verdict

Units = Mapping[Hashable, Mapping[int, str]]
"""What each rater said of each unit, where they said something."""


def krippendorff_alpha(units: Units) -> float | None:
    """Krippendorff's alpha for nominal data: 1 is full agreement, 0 what chance would give.

        alpha = 1 - D_observed / D_expected

    Over the n values of units that two raters or more judged, a unit with m values holds m (m - 1) ordered pairs of
    them, each of weight 1 / (m - 1). D_observed is the weight of unlike pairs over n, D_expected the share of unlike
    pairs among all n (n - 1). None where nobody shared a unit. Where all values are the same there is nothing to agree
    on by chance, and alpha is 1.

    K. Krippendorff, Content Analysis (2004), chapter 11.
    """
    shared = [Counter(said.values()) for said in units.values() if len(said) >= 2]
    totals: Counter[str] = Counter()
    for counts in shared:
        totals.update(counts)
    n = totals.total()
    if n == 0:
        return None
    observed = sum(_unlike(counts) / (counts.total() - 1) for counts in shared) / n
    expected = _unlike(totals) / (n * (n - 1))
    return 1.0 if expected == 0 else 1.0 - observed / expected


def _unlike(counts: Counter[str]) -> int:
    """Ordered pairs of values that differ."""
    return counts.total() ** 2 - sum(count**2 for count in counts.values())


@dataclass(frozen=True)
class Vote:
    """As much of a vote as agreement is about."""

    item: int
    repeat_of: int | None
    rater: int
    kind: str
    order: Sequence[int]
    choice: Any


def judgements(vote: Vote) -> dict[Hashable, str]:
    """What a vote says of each pair of answers: which is better. A ranking of n speaks of n (n - 1) / 2 pairs."""
    if vote.kind == "pair":
        said = verdict(vote.order, vote.choice)
        return {} if said is None else {(0, 1): said}
    ranks = ranks_of(vote.kind, vote.order, vote.choice)
    if ranks is None:
        return {}
    return {(one, other): _better(ranks, one, other) for one, other in combinations(range(len(ranks)), 2)}


def _better(ranks: Sequence[int], one: int, other: int) -> str:
    return "tie" if ranks[one] == ranks[other] else str(one if ranks[one] < ranks[other] else other)


def agreement(votes: Iterable[Vote]) -> dict[str, Any]:
    """`alpha` between raters (hidden repeats aside); `pairs` judged by two or more; `consistency` of each rater."""
    everything = list(votes)
    units: dict[Hashable, dict[int, str]] = defaultdict(dict)
    for vote in everything:
        if vote.repeat_of is None:
            for pair, said in judgements(vote).items():
                units[vote.item, pair][vote.rater] = said
    own = {(vote.item, vote.rater): judgements(vote) for vote in everything}
    again: dict[int, list[bool]] = defaultdict(list)
    for vote in everything:
        first = own.get((vote.repeat_of, vote.rater)) if vote.repeat_of is not None else None
        for pair, said in judgements(vote).items() if first else ():
            if first and pair in first:
                again[vote.rater].append(said == first[pair])
    counted = Counter(vote.rater for vote in everything)
    every = [same for several in again.values() for same in several]
    return {
        "alpha": krippendorff_alpha(units),
        "pairs": sum(len(said) >= 2 for said in units.values()),
        "consistency": sum(every) / len(every) if every else None,
        "repeats": len(every),
        "raters": [
            {
                "id": rater,
                "votes": count,
                "consistency": sum(again[rater]) / len(again[rater]) if again[rater] else None,
                "repeats": len(again[rater]),
            }
            for rater, count in sorted(counted.items())
        ],
    }
