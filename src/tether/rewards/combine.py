"""Several rewards as one: a weighted sum that keeps each part's own value, and each failure's reason, in view.

In `Score.parts` a part that scored has its raw value under its name; a part that failed has no value, but
`NAME/failed/REASON: 1`. So what is logged is a function of the scores alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tether.errors import DataError
from tether.protocols import RewardFn
from tether.types import Rollout, Score

FAILED = "failed"


def failed(reason: str) -> Score:
    """The score of a rollout that could not be scored: masked out and counted by its reason, never read as zero."""
    return Score(math.nan, {f"{FAILED}/{reason}": 1.0}, valid=False)


class WeightedReward(NamedTuple):
    """One part of a combined reward."""

    name: str
    weight: float
    reward: RewardFn


@dataclass(frozen=True)
class CombinedReward:
    """The weighted sum of its parts. A rollout that any part failed to score has no valid score."""

    parts: tuple[WeightedReward, ...]

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout; each part sees the whole batch."""
        columns = [self._column(part, rollouts) for part in self.parts]
        return [self._combine([column[row] for column in columns]) for row in range(len(rollouts))]

    def _column(self, part: WeightedReward, rollouts: Sequence[Rollout]) -> list[Score]:
        try:
            scores = list(part.reward(rollouts))
        except Exception as error:
            raise DataError(f"part {part.name!r} raised {type(error).__name__}: {error}") from error
        if len(scores) != len(rollouts):
            raise DataError(f"part {part.name!r} gave {len(scores)} scores for {len(rollouts)} rollouts")
        return scores

    def _combine(self, scores: Sequence[Score]) -> Score:
        total, values, valid = 0.0, dict[str, float](), True
        for part, score in zip(self.parts, scores, strict=True):
            if score.valid and not math.isfinite(score.value):
                score = failed("not_finite")
            values |= {f"{part.name}/{name}": value for name, value in score.parts.items()}
            if score.valid:
                values[part.name] = score.value
                total += part.weight * score.value
            elif not any(name.startswith(f"{FAILED}/") for name in score.parts):
                values[f"{part.name}/{FAILED}/invalid"] = 1.0
            valid = valid and score.valid
        return Score(total if valid else math.nan, values, valid)


def part_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """`reward/NAME`, the mean over the rollouts that the part scored; `reward/NAME/failed`, how many it did not.

    Failures are counted by reason as well, as `reward/NAME/failed/REASON`.
    """
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for score in scores:
        for name, value in score.parts.items():
            if FAILED in name.split("/"):
                failures[name] += 1
            elif math.isfinite(value):
                sums[name] += value  # pyright: ignore[reportArgumentType] (a Counter of floats)
                counts[name] += 1
    metrics = {f"reward/{name}": sums[name] / counts[name] for name in counts}
    metrics |= {f"reward/{name}/{FAILED}": 0.0 for name in counts if "/" not in name}
    for name, number in failures.items():
        part, _, _ = f"/{name}".rpartition(f"/{FAILED}")
        metrics[f"reward/{name}"] = float(number)
        metrics[f"reward{part}/{FAILED}"] = metrics.get(f"reward{part}/{FAILED}", 0.0) + number
    return dict(sorted(metrics.items()))


def failure_reasons(scores: Sequence[Score]) -> str:
    """In words, for an error: "remote: 12 timeout"; nothing where no reason is known."""
    reasons: Counter[str] = Counter()
    for score in scores:
        for name in score.parts:
            if FAILED in (steps := name.split("/")):
                part = "/".join(steps[: steps.index(FAILED)])
                reasons[f"{part}: {steps[-1]}" if part else steps[-1]] += 1
    return ", ".join(f"{reason} ({number})" for reason, number in reasons.most_common(5))
