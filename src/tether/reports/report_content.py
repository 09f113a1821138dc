"""What a report says, as values: the pages are made from these and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tether.reports.charts import ChartGroup

Level = Literal["good", "note", "warning"]


@dataclass(frozen=True)
class Figure:
    """A number worth saying first, already written out, such as "87 %", with what it rests on as `detail`."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class ReportFinding:
    """Something the run showed, in words. The first sentence stands out."""

    level: Level
    text: str


@dataclass(frozen=True)
class ScorePart:
    """One part of the true rule on one sample: 0 is not met, 1 is met, and what lies between is shown as a number."""

    name: str
    before: float
    after: float


@dataclass(frozen=True)
class Sample:
    """What two models answered to one held-out prompt, with the true score of each answer."""

    prompt: str
    before: str
    after: str
    before_score: float | None = None
    after_score: float | None = None
    parts: tuple[ScorePart, ...] = ()


@dataclass(frozen=True)
class NextStep:
    """Something to do with the result, with the command that does it where one does."""

    title: str
    text: str
    command: str | None = None


@dataclass(frozen=True)
class ReportContent:
    """Everything a report says. Only the title is needed; a part that is empty is left out of the page."""

    title: str
    subtitle: str = ""
    headline: tuple[Figure, ...] = ()
    findings: tuple[ReportFinding, ...] = ()
    charts: tuple[ChartGroup, ...] = ()
    samples: tuple[Sample, ...] = ()
    stages: tuple[tuple[str, float], ...] = ()
    recipe_text: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    next_steps: tuple[NextStep, ...] = ()
    before_name: str = "Before"
    after_name: str = "After"
