"""Learning-rate schedules as functions of progress, so that they hold no state of their own."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def rate_factor(schedule: Schedule, progress: float, warmup: float) -> float:
    """What the base rate is multiplied by at `progress` in [0, 1] of the run.

    Rises linearly over the first `warmup` of the run, then: 1; or (1 - p) linearly to 0; or (1 + cos(pi p)) / 2, where
    p is the progress through what follows the warm-up.
    """
    if progress < warmup:
        return progress / warmup
    if schedule == "constant":
        return 1.0
    through = (progress - warmup) / (1.0 - warmup) if warmup < 1.0 else 0.0
    return 1.0 - through if schedule == "linear" else (1.0 + math.cos(math.pi * through)) / 2.0
