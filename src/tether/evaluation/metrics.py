"""Text metrics (ROUGE, diversity, and the user's own), and confidence intervals.

ROUGE-1, ROUGE-2 and ROUGE-L are F1 scores (Lin 2004) over shared words, pairs of words, and words in order. Words are
runs of letters and digits in lower case, without stemming or stop words. On English text this equals the package
`rouge-score` without its stemmer. Equal texts score 1; texts that share nothing, or have no words, score 0.

Diversity metrics detect a collapsed policy. Intervals exist for proportions, means, paired differences, and statistics
of a whole set. A metric of the user's own is a function of a prompt and an answer, reported beside the shipped ones.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tether.config.rewards import FunctionPart
from tether.errors import ConfigError
from tether.rewards.function import FunctionReward
from tether.types import Prompt, Rollout, Score

_WORD = re.compile(r"[^\W_]+")


class Rouge(NamedTuple):
    """F1 of each kind, from 0 to 1."""

    rouge1: float
    rouge2: float
    rougeL: float  # noqa: N815 (its name)


def words(text: str) -> list[str]:
    """The words that every metric in this package counts."""
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
    """F1 of shared n-grams; each counts as often as both texts have it."""
    ours, theirs = Counter(ngrams(candidate, n)), Counter(ngrams(reference, n))
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    Hyyrö's bit-vector method (2004): bit j of `row` is 0 where the table of longest common lengths increases by one
    from column j to j + 1, so that one row of the table takes two integer operations.
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


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams divided by all n-grams of the texts (Li et al. 2016); NaN where there are none.

    It falls with the amount of text, so compare only sets of similar size.
    """
    counts = _counts(texts, n).values()
    return len(counts) / sum(counts) if counts else math.nan


def distinct_without_each(groups: Sequence[Sequence[str]], n: int) -> list[float]:
    """`distinct_n` without each group in turn, in one pass; the jackknife needs these values."""
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
    """1 - (distinct n-grams / n-grams) within one text: 0 without repetition, near 1 in a loop."""
    grams = ngrams(words(text), n)
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _counts(texts: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(gram for text in texts for gram in ngrams(words(text), n))


LEVEL = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A number and its interval; `count` is the number of independent observations."""

    value: float
    low: float
    high: float
    count: int
    method: str  # wilson, bootstrap or jackknife


def wilson(successes: float, trials: int, *, level: float = LEVEL) -> Estimate:
    """A proportion with Wilson's score interval (1927), which stays within [0, 1] and has width even at 0 and 1.

        centre = (p + z²/2n) / (1 + z²/n),   half = z √(p(1-p)/n + z²/4n²) / (1 + z²/n)

    A tie may count as half a success: it varies less than a coin flip, so the interval is then a little too wide.
    """
    if trials < 1 or not 0.0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials is not a proportion")
    z, p = _z(level), successes / trials
    scale = 1.0 + z * z / trials
    centre = (p + z * z / (2 * trials)) / scale
    half = z * math.sqrt(p * (1.0 - p) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if successes == 0 else max(centre - half, 0.0)  # exact, where rounding would miss the bound
    high = 1.0 if successes == trials else min(centre + half, 1.0)
    return Estimate(p, low, high, trials, "wilson")


def bootstrap_mean(values: Sequence[float], *, seed: int, level: float = LEVEL, resamples: int = RESAMPLES) -> Estimate:
    """A mean with the percentile bootstrap (Efron 1979): the middle `level` of the means of resampled values."""
    if not values:
        raise ValueError("a mean needs at least one value")
    return bootstrap([values], lambda columns: columns[0].mean(dim=-1), seed=seed, level=level, resamples=resamples)


def bootstrap(
    columns: Sequence[Sequence[float]],
    statistic: Callable[[Tensor], Tensor],
    *,
    seed: int,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Estimate:
    """A statistic of n observations with its percentile bootstrap interval.

    An observation is one value of each of the C columns. `statistic` maps (C, ..., n) values to one number for each
    set of n of them.
    """
    table = torch.tensor(columns, dtype=torch.float64)  # (C, n)
    count = table.shape[1]
    generator = torch.Generator().manual_seed(seed)
    found = torch.cat([statistic(table[:, rows]) for rows in _resampled(count, resamples, generator)])
    tail = (1.0 - level) / 2.0
    low, high = torch.quantile(found, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return Estimate(float(statistic(table)), low, high, count, "bootstrap")


def paired_difference(
    first: Sequence[float], second: Sequence[float], *, seed: int, level: float = LEVEL, resamples: int = RESAMPLES
) -> Estimate:
    """The mean of first - second, bootstrapped over pairs: shared effects, such as a hard prompt, cancel."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot be paired with {len(second)}")
    differences = [one - other for one, other in zip(first, second, strict=True)]
    return bootstrap_mean(differences, seed=seed, level=level, resamples=resamples)


def jackknife(
    value: float,
    without_each: Sequence[float],
    *,
    level: float = LEVEL,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """A statistic of a whole set, with a normal interval from its values without each member in turn.

        se² = (n-1)/n Σ (θ_i - θ̄)²

    For statistics that count distinct items: a bootstrap repeats members, which makes every set look less varied.
    `bounds` are the bounds of the statistic itself.
    """
    count = len(without_each)
    if count < 2:
        return Estimate(value, value, value, count, "jackknife")
    mean = sum(without_each) / count
    error = math.sqrt((count - 1) / count * sum((part - mean) ** 2 for part in without_each))
    half = _z(level) * error
    return Estimate(value, max(value - half, bounds[0]), min(value + half, bounds[1]), count, "jackknife")


def _z(level: float) -> float:
    """The number of standard deviations that cover the middle `level` of a normal distribution."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"a confidence level is between 0 and 1, not {level}")
    return NormalDist().inv_cdf(0.5 + level / 2.0)


def _resampled(count: int, resamples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """(rows, count) indices drawn with replacement, in chunks of at most about a million."""
    piece = max(1, 1_000_000 // count)
    for start in range(0, resamples, piece):
        yield torch.randint(count, (min(piece, resamples - start), count), generator=generator)


# -- the user's own ------------------------------------------------------------------------------------------------

SHIPPED = (
    *("score", "rouge1", "rouge2", "rougeL", "ended", "length", "repetition", "distinct_1", "distinct_2"),
    *("kl_k1", "kl_k3"),
)


@dataclass(frozen=True)
class OwnMetric:
    """A function `f(prompt, completion, **columns)` that gives a number, and its name in reports."""

    name: str
    scores: FunctionReward

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise where the function needs a column that no record has."""
        self.scores.check(prompts)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """The value for each answer; one that the function cannot give is left out of the mean and counted."""
        return self.scores(rollouts)


def own_metrics(given: object, field: str, seed: int = 0) -> tuple[OwnMetric, ...]:
    """Metrics from functions and from names such as `my_metric.py:f`; each is reported under its function's name."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"{field}: expected a list of functions, was given a {type(given).__name__}")
    found: dict[str, OwnMetric] = {}
    for place, each in enumerate(cast("Sequence[object]", given)):
        metric = _metric(each, f"{field}[{place}]", seed)
        if metric.name in SHIPPED or metric.name in found:
            whose = "a shipped metric" if metric.name in SHIPPED else "another metric"
            raise ConfigError(f"{field}[{place}]: {metric.name} is the name of {whose}: rename the function")
        found[metric.name] = metric
    return tuple(found.values())


def _metric(given: object, field: str, seed: int) -> OwnMetric:
    if isinstance(given, str):
        if ":" not in given:
            raise ConfigError(f"{field}: {given!r} is neither file.py:name nor package.module:name")
        part = FunctionPart(kind="function", function=given)
        return OwnMetric(given.rpartition(":")[2], FunctionReward(part, field=field, seed=seed))
    function = cast("Callable[..., Any]", given)
    name = str(getattr(function, "__name__", type(function).__name__))
    name = "metric" if name == "<lambda>" else name
    part = FunctionPart(kind="function", name=name, function=f"object:{name}")
    return OwnMetric(name, FunctionReward(part, field=field, seed=seed, function=function))
