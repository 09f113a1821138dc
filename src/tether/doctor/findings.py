"""What the audits work with: verdicts, and a run's metrics as curves.

A verdict is a finding with its reason and repair, that all is well, or that there is too little data. `Curve` is one
metric over a run: where it began and ended, and whether it changed by more than noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tether.reports.charts import LARGEST
from tether.store.recorded import NOTHING, RecordedRun

Severity = Literal["note", "warning", "alarm"]
SEVERITIES: tuple[Severity, ...] = ("alarm", "warning", "note")
"""Most severe first. alarm: the run is being wasted. warning: the result will be worse than it could be. note: worth
knowing, and perhaps intended."""

GUIDE = "docs/doctor.md"


@dataclass(frozen=True)
class Finding:
    """A problem with a run, in words that a person can act on."""

    audit: str  # the audit's name, which is also the anchor in docs/doctor.md
    severity: Severity
    title: str
    saw: str  # with numbers and steps
    why: str = ""  # it matters
    change: tuple[str, ...] = ()  # what to do, most likely cure first; each names a key of the recipe where one does it
    metric: str = ""  # whose curve this is about
    first_step: int = 0
    last_step: int = 0
    examples: tuple[str, ...] = ()  # tokens or answers, as the model wrote them
    rule: str = ""  # the user's own rule that found it; empty: one of Tether's

    @property
    def link(self) -> str:
        """Where the guide explains it, or the user's rule that found it."""
        return self.rule or f"{GUIDE}#{self.audit}"

    def as_json(self) -> dict[str, Any]:
        """Plain values, including the link."""
        return dataclasses.asdict(self) | {"link": self.link}


@dataclass(frozen=True)
class Healthy:
    """The audit had enough data and found nothing."""

    saw: str


@dataclass(frozen=True)
class TooLittle:
    """The audit did not have enough data; the text says what it needs."""

    lacks: str


Verdict = Finding | Healthy | TooLittle


@dataclass(frozen=True)
class Audit:
    """One rule: its name, the question that it answers, and the pure function that computes the verdict."""

    name: str
    question: str
    examine: Callable[[RecordedRun], Verdict]


END_PART = 0.2  # the first and the last fifth of a run are its start and its end
ERRORS = 3.0  # a change counts from this many standard errors of the difference of the two means


NEAR_CEILING = 0.95  # fraction of the maximum reward, over the last fifth of a run: the task is solved
SOLVED_SPREAD = 0.1  # a spread below this fraction of the initial one: all scores are alike
UNBOUNDED = ("model", "remote", "function", "task")  # reward parts without a known maximum


@dataclass(frozen=True)
class Curve:
    """The finite values of one metric, in order of their steps."""

    name: str
    steps: NDArray[np.int64]  # (n,)
    values: NDArray[np.float64]  # (n,)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def span(self) -> int:
        """The number of points in a fifth of the run; at least 2, so that one point never decides."""
        return min(len(self), max(2, round(END_PART * len(self))))

    @property
    def start(self) -> float:
        """The mean over the first fifth."""
        return float(self.values[: self.span].mean())

    @property
    def end(self) -> float:
        """The mean over the last fifth."""
        return float(self.values[-self.span :].mean())

    @property
    def last_step(self) -> int:
        """Its last step."""
        return int(self.steps[-1])

    @property
    def first_step(self) -> int:
        """Its first step."""
        return int(self.steps[0])

    def half(self) -> Curve:
        """The second half, after the run has settled."""
        return self.since(len(self) // 2)

    def since(self, place: int) -> Curve:
        """The curve from index `place` on."""
        return Curve(self.name, self.steps[place:], self.values[place:])

    def noise(self) -> float:
        """The standard deviation from point to point, from second differences, in which a constant slope cancels."""
        if len(self) < 3:
            return math.inf
        bends = np.diff(self.values, n=2)
        return float(np.sqrt(np.mean(bends**2) / 6.0))

    def margin(self) -> float:
        """The minimum significant difference between two means over a fifth."""
        return ERRORS * self.noise() * math.sqrt(2.0 / self.span)

    def rose(self) -> bool:
        """Whether it ends above its start by more than noise."""
        return len(self) >= 3 and self.end - self.start > self.margin()

    def smooth(self) -> NDArray[np.float64]:
        """(n,) a centered moving mean about a fifth of the run wide, shorter at the ends."""
        half = self.span // 2
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        low = np.maximum(np.arange(len(self)) - half, 0)
        high = np.minimum(np.arange(len(self)) + half + 1, len(self))
        return (sums[high] - sums[low]) / (high - low)


def curve(run: RecordedRun, name: str) -> Curve:
    """One metric of a run, without values that are not finite or are practically infinite."""
    steps, values = run.series.get(name, NOTHING)
    known = np.abs(values) <= LARGEST
    return Curve(name, steps[known], values[known])


def setting(run: RecordedRun, key: str, default: Any) -> Any:
    """A dotted key of the run's recipe; `default` where it is missing or null."""
    found: Any = run.config
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return default if found is None else found


def algorithm(run: RecordedRun) -> str:
    """The section of the recipe with the algorithm's settings: its method, except in runs of `tether control`."""
    return str(setting(run, "algorithm", "ppo")) if run.method == "control" else run.method


def ceiling(run: RecordedRun) -> float | None:
    """The run's maximum reward, if its recipe implies one: rules and built-in tasks score 0 to 1."""
    parts = setting(run, "reward.parts", ())
    if parts:
        counted = [part for part in parts if isinstance(part, Mapping) and part.get("weight", 1.0)]
        if any(part.get("kind") in UNBOUNDED for part in counted) or len(counted) < 1:
            return None
        top = sum(max(float(part.get("weight", 1.0)), 0.0) for part in counted)
    else:
        own = setting(run, "task.name", None) if setting(run, "task.reward", None) is None else None
        if not isinstance(own, str) or (own != "match-case" and not own.startswith("reasoning-gym:")):
            return None
        top = 1.0
    bound = setting(run, "reward.clip", None)
    return min(top, float(bound)) if bound is not None else top


def solved(run: RecordedRun) -> bool:
    """Whether the task is solved: scores end at the reward's maximum, or are all alike after a rise.

    A constant reward, or scores that fell to one value, do not count: they are at no known maximum and did not rise.
    """
    score, spread, top = curve(run, "score"), curve(run, "score_std"), ceiling(run)
    if len(score) < 3:
        return False
    if top is not None and top > 0.0 and score.end >= NEAR_CEILING * top:
        return True
    alike = len(spread) > 0 and spread.end < SOLVED_SPREAD * float(spread.values.max())
    return alike and score.rose()


def rows_per_step(run: RecordedRun) -> int:
    """The number of answers per iteration, or of steps of environments."""
    if run.method == "control":
        return int(setting(run, "environment.count", 1)) * int(setting(run, "rollout.steps", 2048))
    return int(setting(run, "rollout.prompts_per_step", 64)) * int(setting(run, "rollout.samples_per_prompt", 1))


def percent(part: float) -> str:
    """0.123 as "12 %"."""
    return f"{100.0 * part:.1f} %" if 0.0 < abs(part) < 0.1 else f"{100.0 * part:.0f} %"
