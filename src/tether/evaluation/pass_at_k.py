"""pass@k: the probability that at least one of k answers to a prompt is right (Chen et al. 2021).

Of n answers, c are right. Drawing k of them without replacement gives the unbiased estimate

    pass@k = 1 - C(n - c, k) / C(n, k)

where 1 - (1 - c/n)^k would be too low. Prompts are independent, so a model's pass@k is the mean over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RIGHT = 1.0  # the score of a right answer


def pass_at_k(n: int, c: int, k: int) -> float:
    """The estimate from `c` right answers of `n`."""
    if not 0 <= c <= n:
        raise ValueError(f"{c} right answers of {n} is not possible")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} answers to each prompt, and there are {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def passes(scores: Sequence[float], k: int, right: float = RIGHT) -> float:
    """pass@k of one prompt's scores; NaN where fewer than k answers have one."""
    known = [score for score in scores if not math.isnan(score)]
    if len(known) < k:
        return math.nan
    return pass_at_k(len(known), sum(score >= right for score in known), k)
