"""A run's metrics in memory, column by column: read once, and then only what is new.

A page asks for a few curves of a run again and again. The database has all of them step by step, a million numbers
for a long run. A curve is read when it is first asked for, and from then on only its newest steps.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, func, select

from tether.runs.read import OpenWorkspace
from tether.runs.store.schema import metrics, runs, steps

MOST_RUNS = 12


@dataclass(frozen=True)
class Series:
    """One metric: where it was measured, and what it was; not finite is NaN."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass
class _Column:
    """One metric up to the step `last` of its run, which need not have it."""

    last: int = -1
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def series(self) -> Series:
        """A copy: the arrays go on growing."""
        return Series(np.array(self.steps, dtype=np.int64), np.array(self.values, dtype=np.float64))


@dataclass
class _Run:
    """What is known of one run up to its step `last`, which was `recorded` at that time."""

    uid: str
    last: int = -1
    recorded: float = 0.0
    columns: dict[str, _Column] = field(default_factory=dict)  # every metric by name; only those asked for are read


class MetricCache:
    """The metrics of the runs that were looked at last."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, run_id: int) -> list[str]:
        """What was measured."""
        with self._lock, self._opened.reading() as connection:
            return sorted(self._current(connection, run_id).columns)

    def series(self, run_id: int, names: Collection[str] | None = None) -> Mapping[str, Series]:
        """The metrics of a run, all or those named, as the database has them now."""
        with self._lock, self._opened.reading() as connection:
            run = self._current(connection, run_id)
            wanted = [name for name in run.columns if names is None or name in names]
            _read(connection, run_id, run, wanted)
            return {name: run.columns[name].series() for name in wanted}

    def _current(self, connection: Connection, run_id: int) -> _Run:
        """What is remembered, its names brought up to date; begun anew where the run took steps back."""
        uid = connection.execute(select(runs.c.uid).where(runs.c.id == run_id)).scalar() or ""
        known = self._runs.pop(run_id, None)
        if known is None or known.uid != uid or _recorded(connection, run_id, known.last) != known.recorded:
            known = _Run(uid)
        last = connection.execute(select(func.max(steps.c.step)).where(steps.c.run_id == run_id)).scalar()
        if last is not None and last > known.last:
            new = select(metrics.c.name).where(metrics.c.run_id == run_id, metrics.c.step > known.last).distinct()
            for name in connection.execute(new).scalars():
                known.columns.setdefault(name, _Column())
            known.last, known.recorded = last, _recorded(connection, run_id, last)
        self._runs[run_id] = known
        while len(self._runs) > MOST_RUNS:
            self._runs.popitem(last=False)
        return known


def _read(connection: Connection, run_id: int, run: _Run, names: Sequence[str]) -> None:
    """Read what is new of these metrics: those that were read up to the same step together."""
    behind: dict[int, list[str]] = {}
    for name in names:
        if run.columns[name].last < run.last:
            behind.setdefault(run.columns[name].last, []).append(name)
    for after, several in behind.items():
        columns = {name: run.columns[name] for name in several}
        for step, name, value in _new_rows(connection, run_id, after, several):
            column = columns[name]
            column.steps.append(step)
            column.values.append(math.nan if value is None else value)
        for column in columns.values():
            column.last = run.last


def _recorded(connection: Connection, run_id: int, step: int) -> float:
    """When a step was recorded: a step that was taken again has another time."""
    if step < 0:
        return 0.0
    chosen = select(steps.c.recorded).where(steps.c.run_id == run_id, steps.c.step == step)
    return connection.execute(chosen).scalar() or 0.0


def _new_rows(connection: Connection, run_id: int, after: int, names: Sequence[str]) -> Iterable[Any]:
    """Plain tuples of the driver: rows that can more take three times as long."""
    chosen = select(metrics.c.step, metrics.c.name, metrics.c.value)
    chosen = chosen.where(metrics.c.run_id == run_id, metrics.c.step > after, metrics.c.name.in_(names))
    cursor = connection.execute(chosen.order_by(metrics.c.step)).cursor
    assert cursor is not None
    return cursor.fetchall()
