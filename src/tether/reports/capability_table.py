"""What a run changed in the capabilities that its suite measured, as the run recorded it: one row per metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tether.reports.charts import interval_text
from tether.reports.report import ReportTable
from tether.store.recorded import RecordedRun

EVENT = "capability"
"""The kind of the event whose data `changes_of` reads."""

Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class CapabilityChange:
    """One metric at the start and at the end of a run, and the paired difference, end minus start."""

    name: str
    label: str
    better: Direction
    margin: float  # a smaller change for the worse is no loss
    judged: bool
    start: tuple[float, float, float]  # value and its 95 % interval
    end: tuple[float, float, float]
    difference: tuple[float, float, float]
    adjusted: tuple[float, float]  # the difference's interval, widened for the number of metrics judged
    count: int  # items

    @property
    def loss(self) -> float:
        """The difference in the direction that is worse: positive where the metric got worse."""
        return self.difference[0] if self.better == "lower" else -self.difference[0]

    @property
    def is_loss(self) -> bool:
        """Whether it got worse by more than the margin, and the widened interval leaves 0 on the better side."""
        low, high = self.adjusted
        certain = low > 0.0 if self.better == "lower" else high < 0.0
        return self.judged and self.loss > self.margin and certain

    def as_json(self) -> dict[str, Any]:
        """Plain values, as an event holds them."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CapabilityChange:
        """Read what `as_json` wrote."""
        texts = {name: str(record[name]) for name in ("name", "label")}
        better: Direction = "lower" if record["better"] == "lower" else "higher"
        start, end, difference = (_three(record[name]) for name in ("start", "end", "difference"))
        low, high = record["adjusted"]
        return cls(
            **texts,
            better=better,
            margin=float(record["margin"]),
            judged=bool(record["judged"]),
            start=start,
            end=end,
            difference=difference,
            adjusted=(float(low), float(high)),
            count=int(record["count"]),
        )

    @property
    def texts(self) -> tuple[str, str, str]:
        """The start, the end and the difference, each with its interval."""
        return interval_text(*self.start), interval_text(*self.end), interval_text(*self.difference)

    def row(self) -> tuple[str, ...]:
        """As a report shows it."""
        verdict = "loss" if self.is_loss else "" if self.judged else "not judged"
        return (self.label, *self.texts, self.better, verdict)


COLUMNS = ("", "before", "after", "difference", "better", "")
NOTE = (
    "Capabilities before the first and after the last step, with 95 % intervals; differences are over pairs of the "
    "same items."
)


def capability_table(changes: Sequence[CapabilityChange]) -> ReportTable:
    """One row per metric."""
    return ReportTable("What it forgot", COLUMNS, tuple(change.row() for change in changes), NOTE)


def changes_of(run: RecordedRun) -> list[CapabilityChange]:
    """The changes that the run recorded after its last step; empty where it measured none."""
    last = next((event for event in reversed(run.events) if event.kind == EVENT), None)
    if last is None:
        return []
    try:
        return [CapabilityChange.from_json(record) for record in last.data["changes"]]
    except (KeyError, TypeError, ValueError):  # of another version
        return []


def _three(values: Any) -> tuple[float, float, float]:
    value, low, high = values
    return float(value), float(low), float(high)
