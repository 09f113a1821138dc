"""Compare the settings of a sweep: intervals over seeds, the chance of being the best, main effects.

Every setting runs with the same seeds, so differences are taken seed by seed, and the bootstrap draws seeds for all
settings together. A seed that diverged counts as worse than any value. This module needs no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tether.seeds import derive_seed
from tether.sweeps.manifest import SweepManifest
from tether.sweeps.results import TrialResult
from tether.sweeps.student_t import MeanInterval, mean_interval

DRAWS = 20_000  # resamples where there are too many to take each of them once
ALL_UP_TO = 50_000


@dataclass(frozen=True)
class RankedSetting:
    """A setting, or a value of one key: its value for each seed, and how it compares.

    `seeds` holds one value a seed: a number, minus infinity where the seed diverged (plus infinity where less is
    better), None where it has no value. `behind` is how much worse it is than the best.
    """

    values: Mapping[str, Any]
    number: int
    seeds: tuple[float | None, ...]
    state: str  # done, early, unfinished
    interval: MeanInterval | None = None
    behind: MeanInterval | None = None
    chance: float | None = None

    @property
    def diverged(self) -> int:
        """How many of its seeds diverged."""
        return sum(value is not None and math.isinf(value) for value in self.seeds)

    @property
    def complete(self) -> bool:
        """Whether every seed has a value, though it may be that of a divergence."""
        return self.state == "done" and all(value is not None for value in self.seeds)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "setting": self.number,
            "values": dict(self.values),
            "state": self.state,
            "seeds": [value if value is not None and math.isfinite(value) else None for value in self.seeds],
            "diverged": self.diverged,
            "interval": self.interval.as_json() if self.interval else None,
            "behind_best": self.behind.as_json() if self.behind else None,
            "chance_of_best": self.chance,
        }


@dataclass(frozen=True)
class KeyEffect:
    """The main effect of one key: its values, each averaged over the settings that have it."""

    key: str
    values: tuple[RankedSetting, ...]
    own: Any  # the recipe's value
    direction: str = "max"

    @property
    def best(self) -> RankedSetting | None:
        """The best of its values."""
        return best_of(self.values, self.direction)

    @property
    def span(self) -> float:
        """The difference between the means of its best and its worst value; 0 where there is one."""
        means = [each.interval.mean for each in self.values if each.interval is not None]
        return max(means) - min(means) if means else 0.0


# -- settings -----------------------------------------------------------------------------------------------------


def judge_settings(manifest: SweepManifest, results: Sequence[TrialResult]) -> list[RankedSetting]:
    """Every setting, in the order in which they were made."""
    by_setting: dict[int, dict[int, TrialResult]] = {}
    for result in results:
        by_setting.setdefault(result.trial.setting, {})[result.trial.seed] = result
    found: list[RankedSetting] = []
    for number, values in enumerate(manifest.settings):
        mine = [by_setting[number][seed] for seed in manifest.seeds]
        seeds = tuple(seed_value(result, manifest.direction) for result in mine)
        found.append(RankedSetting(values, number, seeds, _state(mine, number in manifest.stopped)))
    return compare(found, manifest.direction)


def seed_value(result: TrialResult, direction: str) -> float | None:
    """The value of a trial; an infinite one where it diverged, None where it has not ended."""
    worst = math.inf if direction == "min" else -math.inf
    if result.state == "diverged":
        return worst
    value = result.value()
    if result.state == "done" and value is None:  # the metric is not finite
        return worst
    return value if result.state == "done" else None


def _state(mine: Sequence[TrialResult], stopped: bool) -> str:
    if all(result.state in ("done", "diverged") for result in mine):
        return "done"
    return "early" if stopped else "unfinished"


def compare(candidates: Sequence[RankedSetting], direction: str) -> list[RankedSetting]:
    """The same settings with intervals, differences to the best, and chances of being the best."""
    sign = -1.0 if direction == "min" else 1.0
    with_means = [_with(each, interval=_finite_interval(each.seeds)) for each in candidates]
    best = best_of(with_means, direction)
    complete = [each for each in with_means if each.complete]
    chances = dict(
        zip(
            (each.number for each in complete),
            chance_of_best([[sign * value for value in each.seeds if value is not None] for each in complete]),
            strict=True,
        )
    )
    return [_with(each, behind=_behind(each, best, sign), chance=chances.get(each.number)) for each in with_means]


def _with(judged: RankedSetting, **changes: Any) -> RankedSetting:
    return RankedSetting(**{**judged.__dict__, **changes})


def _finite_interval(seeds: Sequence[float | None]) -> MeanInterval | None:
    known = [value for value in seeds if value is not None and math.isfinite(value)]
    return mean_interval(known) if known else None


def _behind(each: RankedSetting, best: RankedSetting | None, sign: float) -> MeanInterval | None:
    """How much worse it is than the best, seed by seed."""
    if best is None or each is best or each.state == "unfinished":
        return None
    pairs = zip(best.seeds, each.seeds, strict=True)
    gaps = [sign * (a - b) for a, b in pairs if a is not None and b is not None and math.isfinite(a - b)]
    return mean_interval(gaps) if gaps else None


def best_of(candidates: Sequence[RankedSetting], direction: str = "max") -> RankedSetting | None:
    """The complete setting with the best mean; one with a diverged seed only where there is no other."""
    complete = [each for each in candidates if each.complete and each.interval is not None]
    steady = [each for each in complete if not each.diverged] or complete
    sign = -1.0 if direction == "min" else 1.0
    return max(steady, key=lambda each: sign * each.interval.mean if each.interval else 0.0, default=None)


def ranked(judged: Sequence[RankedSetting], direction: str) -> list[RankedSetting]:
    """The settings, the best first: complete ones, then those with diverged seeds, then those that did not end."""
    sign = -1.0 if direction == "min" else 1.0

    def place(each: RankedSetting) -> tuple[int, int, float, int]:
        mean = sign * each.interval.mean if each.interval is not None else -math.inf
        return (("done", "early", "unfinished").index(each.state), each.diverged, -mean, each.number)

    return sorted(judged, key=place)


# -- the bootstrap ------------------------------------------------------------------------------------------------


def chance_of_best(candidates: Sequence[Sequence[float]]) -> list[float]:
    """For each candidate the share of resamples of the seeds in which its mean is the highest; ties are shared.

    Every resample is taken once where there are few of them; otherwise `DRAWS` are drawn, from a fixed seed.
    """
    if not candidates:
        return []
    values = np.array(candidates, dtype=np.float64)
    lost = np.isinf(values)
    counts = _resamples(values.shape[1])
    means = counts @ np.where(lost, 0.0, values).T / values.shape[1]
    means[(counts @ lost.T.astype(np.float64)) > 0] = -np.inf
    top = means.max(axis=1, keepdims=True)
    # Means of equal values differ in their last bits with the order of the sum.
    wins = (means >= top - 1e-12 * np.maximum(np.abs(top), 1.0)) & np.isfinite(top)
    shares = wins / np.maximum(wins.sum(axis=1, keepdims=True), 1)
    return [float(share) for share in shares.mean(axis=0)]


def _resamples(count: int) -> np.ndarray:
    """How often each seed is in each resample: one row a resample."""
    if count**count <= ALL_UP_TO:
        rows = np.array(list(itertools.product(range(count), repeat=count)))
    else:
        rows = np.random.default_rng(derive_seed(0, "sweep/bootstrap")).integers(0, count, (DRAWS, count))
    return np.stack([(rows == place).sum(axis=1) for place in range(count)], axis=1).astype(np.float64)


# -- main effects -------------------------------------------------------------------------------------------------


def main_effects(manifest: SweepManifest, judged: Sequence[RankedSetting], own: Mapping[str, Any]) -> list[KeyEffect]:
    """The effect of each key that has listed values; `own` are the recipe's values.

    In a study of one key at a time, a value's settings are those where only this key differs from the recipe.
    """
    found: list[KeyEffect] = []
    for variation in manifest.variations:
        if variation.is_range:
            continue
        key, alone = variation.key, manifest.sampler == "one-at-a-time"
        usable = [
            each
            for each in judged
            if not alone or all(each.values[other] == own[other] for other in each.values if other != key)
        ]
        groups: dict[str, list[RankedSetting]] = {}
        for each in usable:
            groups.setdefault(repr(each.values[key]), []).append(each)
        levels = [
            RankedSetting({key: members[0].values[key]}, place, _mean_by_seed(members), _worst_state(members))
            for place, members in enumerate(sorted(groups.values(), key=lambda group: _order(group[0].values[key])))
        ]
        found.append(KeyEffect(key, tuple(compare(levels, manifest.direction)), own[key], manifest.direction))
    return found


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then everything else by its text; null is first."""
    if value is None:
        return (0, 0.0, "")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (1, float(value), "")
    return (2, 0.0, str(value))


def _mean_by_seed(members: Sequence[RankedSetting]) -> tuple[float | None, ...]:
    """For each seed the mean over some settings; None where one of them has no value."""
    found: list[float | None] = []
    for column in zip(*(each.seeds for each in members), strict=True):
        known = [value for value in column if value is not None]
        found.append(sum(known) / len(known) if len(known) == len(column) else None)
    return tuple(found)


def _worst_state(members: Sequence[RankedSetting]) -> str:
    states = ("done", "early", "unfinished")
    return max((each.state for each in members), key=states.index)
