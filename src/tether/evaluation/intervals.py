"""How sure a number is: intervals for proportions, means, differences, and statistics of a whole set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

LEVEL = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A number and the interval around it; `count` is how many independent things it rests on."""

    value: float
    low: float
    high: float
    count: int
    method: str  # wilson, bootstrap or jackknife


def wilson(successes: float, trials: int, *, level: float = LEVEL) -> Estimate:
    """A proportion with Wilson's score interval (1927), which stays within [0, 1] and has width also at 0 and 1.

        centre = (p + z²/2n) / (1 + z²/n),   half = z √(p(1-p)/n + z²/4n²) / (1 + z²/n)

    A tie may be half a success: it varies less than a coin does, so the interval is then a little too wide.
    """
    if trials < 1 or not 0.0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials is no proportion")
    z, p = _z(level), successes / trials
    scale = 1.0 + z * z / trials
    centre = (p + z * z / (2 * trials)) / scale
    half = z * math.sqrt(p * (1.0 - p) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if successes == 0 else max(centre - half, 0.0)  # exactly, where rounding would miss the bound
    high = 1.0 if successes == trials else min(centre + half, 1.0)
    return Estimate(p, low, high, trials, "wilson")


def bootstrap_mean(values: Sequence[float], *, seed: int, level: float = LEVEL, resamples: int = RESAMPLES) -> Estimate:
    """A mean with the percentile bootstrap (Efron 1979): the middle `level` of the means of resampled values."""
    if not values:
        raise ValueError("there is no mean of no values")
    column = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    means = torch.cat([column[rows].mean(dim=1) for rows in _resampled(len(values), resamples, generator)])
    tail = (1.0 - level) / 2.0
    low, high = torch.quantile(means, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return Estimate(float(column.mean()), low, high, len(values), "bootstrap")


def paired_difference(
    first: Sequence[float], second: Sequence[float], *, seed: int, level: float = LEVEL, resamples: int = RESAMPLES
) -> Estimate:
    """The mean of first - second, bootstrapped over pairs: what both share, such as a hard prompt, cancels."""
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
    """A statistic of a whole set, with a normal interval from its values on the set without each member in turn.

        se² = (n-1)/n Σ (θ_i - θ̄)²

    For statistics that count what is different: a bootstrap repeats members, and so makes every set look less varied.
    `bounds` are those of the statistic itself.
    """
    count = len(without_each)
    if count < 2:
        return Estimate(value, value, value, count, "jackknife")
    mean = sum(without_each) / count
    error = math.sqrt((count - 1) / count * sum((part - mean) ** 2 for part in without_each))
    half = _z(level) * error
    return Estimate(value, max(value - half, bounds[0]), min(value + half, bounds[1]), count, "jackknife")


def _z(level: float) -> float:
    """How many standard deviations hold the middle `level` of a normal distribution."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"a level of confidence is between 0 and 1, not {level}")
    return NormalDist().inv_cdf(0.5 + level / 2.0)


def _resampled(count: int, resamples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """(rows, count) indices drawn with replacement, in pieces of about a million at most."""
    piece = max(1, 1_000_000 // count)
    for start in range(0, resamples, piece):
        yield torch.randint(count, (min(piece, resamples - start), count), generator=generator)
