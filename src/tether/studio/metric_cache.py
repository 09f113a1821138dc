"""A run's metrics in memory, column by column: read once, and then only what is new.

A page asks for a few curves of a run again and again. The database has them step by step, a million numbers for a long
run; reading those takes about a second, and the newest few a millisecond.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
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
class _Columns:
    """The columns of one run up to its step `last`, which was `recorded` at that time."""

    uid: str
    last: int = -1
    recorded: float = 0.0
    steps: dict[str, array[int]] = field(default_factory=dict)
    values: dict[str, array[float]] = field(default_factory=dict)

    def add(self, rows: Iterable[Any]) -> None:
        nan = float("nan")
        for step, name, value in rows:
            if name not in self.steps:
                self.steps[name], self.values[name] = array("q"), array("d")
            self.steps[name].append(step)
            self.values[name].append(nan if value is None else value)

    def series(self) -> dict[str, Series]:
        """Copies: the arrays go on growing."""
        return {
            name: Series(np.array(places, dtype=np.int64), np.array(self.values[name], dtype=np.float64))
            for name, places in self.steps.items()
        }


class MetricCache:
    """The columns of the runs that were looked at last."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened
        self._runs: OrderedDict[int, _Columns] = OrderedDict()
        self._lock = threading.Lock()

    def series(self, run_id: int) -> Mapping[str, Series]:
        """Every metric of a run, as the database has it now."""
        with self._lock:
            with self._opened.reading() as connection:
                columns = self._current(connection, run_id)
            self._runs.pop(run_id, None)
            self._runs[run_id] = columns
            while len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
            return columns.series()

    def _current(self, connection: Connection, run_id: int) -> _Columns:
        """What is remembered, brought up to date; begun anew where the run took steps back."""
        uid = connection.execute(select(runs.c.uid).where(runs.c.id == run_id)).scalar() or ""
        known = self._runs.get(run_id)
        if known is None or known.uid != uid or _recorded(connection, run_id, known.last) != known.recorded:
            known = _Columns(uid)
        last = connection.execute(select(func.max(steps.c.step)).where(steps.c.run_id == run_id)).scalar()
        if last is not None and last > known.last:
            known.add(_new_rows(connection, run_id, known.last))
            known.last, known.recorded = last, _recorded(connection, run_id, last)
        return known


def _recorded(connection: Connection, run_id: int, step: int) -> float:
    """When a step was recorded: a step that was taken again has another time."""
    if step < 0:
        return 0.0
    chosen = select(steps.c.recorded).where(steps.c.run_id == run_id, steps.c.step == step)
    return connection.execute(chosen).scalar() or 0.0


def _new_rows(connection: Connection, run_id: int, after: int) -> Iterable[Any]:
    chosen = select(metrics.c.step, metrics.c.name, metrics.c.value)
    chosen = chosen.where(metrics.c.run_id == run_id, metrics.c.step > after).order_by(metrics.c.step, metrics.c.name)
    return connection.execute(chosen).all()
