"""`--prune`: stop hopeless settings early, by the median rule.

All trials of a wave run to a quarter of their steps and wait; then to half. There a setting is stopped if all its seeds
are below the median of all trials that reached the step. The recipe's own setting is never stopped. A decision depends
on the recorded metrics alone, not on which trial was first, so that it is the same for any number of jobs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

RUNGS = (0.25, 0.5)  # parts of the steps after which is decided
MIN_SETTINGS = 3  # fewer say nothing about a median


def rung_steps(total: int) -> list[int]:
    """The numbers of steps after which is decided."""
    return sorted({step for part in RUNGS if 0 < (step := math.floor(part * total)) < total})


def hopeless(
    values: Mapping[int, Sequence[float | None]],
    settings: Sequence[int],
    direction: str,
    kept: frozenset[int] = frozenset(),
) -> tuple[float | None, tuple[int, ...]]:
    """The median, and those of `settings` to stop.

    `values` has a value for each seed of each setting that reached the step; None where the seed diverged. `kept` are
    never stopped.
    """
    sign = -1.0 if direction == "min" else 1.0
    known = [sign * value for seeds in values.values() for value in seeds if value is not None]
    if len(values) < MIN_SETTINGS or not known:
        return None, ()
    middle = median(known)
    stopped = [
        setting
        for setting in settings
        if setting not in kept and all(value is None or sign * value < middle for value in values[setting])
    ]
    return sign * middle, tuple(stopped)
