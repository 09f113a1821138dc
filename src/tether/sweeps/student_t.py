"""Student's t for whole degrees of freedom: intervals over a few seeds, without a statistics package.

The probability within [-t, t] is a finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its interval; both ends are None where one value says nothing about the spread."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def as_json(self) -> dict[str, float | int | None]:
        """Plain data."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "count": self.count}


def within(t: float, freedom: int) -> float:
    """The probability that |T| is at most `t`."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2 == 1
    term, total = (cosine, cosine if freedom > 1 else 0.0) if odd else (1.0, 1.0)
    for place in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (place - 1) / place
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t with `confidence` of the probability within [-t, t], by bisection."""
    low, high = 0.0, 1.0
    while within(high, freedom) < confidence:
        high *= 2.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if within(middle, freedom) < confidence else (low, middle)
    return 0.5 * (low + high)


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """The mean and its t interval: mean +- t s / sqrt(n), with s the sample's deviation."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return MeanInterval(mean, None, None, count)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    reach = t_quantile(count - 1) * deviation / math.sqrt(count)
    return MeanInterval(mean, mean - reach, mean + reach, count)
