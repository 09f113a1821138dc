"""A run's metrics in memory, thinned for drawing: read once, then only what is new.

A run's metrics in memory, column by column: read once, and then only what is new.

A page asks for a few curves of a run again and again. The database has all of them step by step, a million numbers
for a long run. A curve is read when it is first asked for, and from then on only its newest steps.

Long curves made short enough to draw, without losing a spike: each bucket keeps its mean, its low and its high.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, func, select

from tether.store.database.schema import metrics, runs, steps
from tether.store.read import OpenWorkspace

MAX_RUNS = 12
ROWS_AT_A_TIME = 2_000  # so few that they stay in the processor's cache: with twenty thousand it takes a third longer


@dataclass(frozen=True)
class MetricSeries:
    """One metric: where it was measured, and what it was; not finite is NaN."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass
class _Column:
    """One metric up to the step `last` of its run, which need not have it."""

    last: int = -1
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def series(self) -> MetricSeries:
        """A copy: the arrays go on growing."""
        return MetricSeries(np.array(self.steps, dtype=np.int64), np.array(self.values, dtype=np.float64))

    def extend(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Take in what comes after."""
        self.steps.frombytes(steps.tobytes())
        self.values.frombytes(values.tobytes())


@dataclass
class _Run:
    """What is known of one run up to its step `last`, which was `recorded` at that time."""

    uid: str
    last: int = -1
    recorded: float = 0.0
    named: int = -1  # the step up to which the names of all metrics are known
    columns: dict[str, _Column] = field(default_factory=dict)  # every metric by name; only those asked for are read


class MetricCache:
    """The metrics of the runs that were looked at last."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, run_id: int) -> list[str]:
        """What was measured."""
        with self._looking_at(run_id) as (connection, run):
            _find_names(connection, run_id, run)
            return sorted(run.columns)

    def series(self, run_id: int, names: Collection[str] | None = None) -> Mapping[str, MetricSeries]:
        """The metrics of a run, all or those named, as the database has them now."""
        with self._looking_at(run_id) as (connection, run):
            columns = _up_to_date(connection, run_id, run, names)
            return {name: column.series() for name, column in columns.items()}

    def rows(self, run_id: int) -> list[dict[str, float]]:
        """One mapping a step, in order, each with its "step": the same numbers as `tether.store.read.read_run` has."""
        with self._looking_at(run_id) as (connection, run):
            chosen = select(steps.c.step).where(steps.c.run_id == run_id, steps.c.step <= run.last)
            taken = list(connection.execute(chosen.order_by(steps.c.step)).scalars())
            columns = _up_to_date(connection, run_id, run, None)
            series = {name: column.series() for name, column in columns.items()}
        return _as_rows(taken, series)  # with nobody kept waiting: it takes longer than reading did

    @contextmanager
    def _looking_at(self, run_id: int) -> Iterator[tuple[Connection, _Run]]:
        """What is remembered of a run. Where reading on fails half-way it is forgotten, and read anew the next time."""
        with self._lock, self._opened.reading() as connection:
            run = _current(connection, run_id, self._runs.pop(run_id, None))
            yield connection, run
            self._runs[run_id] = run
            while len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)


def _as_rows(taken: Sequence[int], series: Mapping[str, MetricSeries]) -> list[dict[str, float]]:
    """The mapping of each step that was taken. What was measured at all of them, as most is, goes in at once."""
    whole = {name: one.values.tolist() for name, one in series.items() if len(one.steps) == len(taken)}
    names = ("step", *whole)
    rows = [dict(zip(names, values, strict=True)) for values in zip(taken, *whole.values(), strict=True)]
    for name in series.keys() - whole.keys():
        places = np.searchsorted(np.array(taken, dtype=np.int64), series[name].steps)
        for place, value in zip(places.tolist(), series[name].values.tolist(), strict=True):
            rows[place][name] = value
    return rows


def _current(connection: Connection, run_id: int, known: _Run | None) -> _Run:
    """What is known, and how far the run is by now; begun anew where it took steps back."""
    uid = connection.execute(select(runs.c.uid).where(runs.c.id == run_id)).scalar() or ""
    if known is None or known.uid != uid or _recorded(connection, run_id, known.last) != known.recorded:
        known = _Run(uid)
    last = connection.execute(select(func.max(steps.c.step)).where(steps.c.run_id == run_id)).scalar()
    if last is not None and last > known.last:
        known.last, known.recorded = last, _recorded(connection, run_id, last)
    return known


def _find_names(connection: Connection, run_id: int, run: _Run) -> None:
    """Give every metric of the steps that are new its column, which is still empty."""
    if run.named < run.last:
        new = select(metrics.c.name).where(metrics.c.run_id == run_id, metrics.c.step > run.named)
        for name in connection.execute(new.distinct()).scalars():
            run.columns.setdefault(name, _Column())
        run.named = run.last


def _up_to_date(connection: Connection, run_id: int, run: _Run, names: Collection[str] | None) -> Mapping[str, _Column]:
    """The columns of these metrics, or of all, with what is new: those read up to the same step are read together."""
    if names is None and run.named < 0:  # nothing is known: the names are met on the way, without a look for them first
        _read(connection, run_id, run, -1, None)
        run.named = run.last
    _find_names(connection, run_id, run)
    wanted = {name: column for name, column in run.columns.items() if names is None or name in names}
    behind: dict[int, list[str]] = {}
    for name, column in wanted.items():
        if column.last < run.last:
            behind.setdefault(column.last, []).append(name)
    for after, several in behind.items():
        _read(connection, run_id, run, after, None if len(several) == len(run.columns) else several)
    return wanted


def _read(connection: Connection, run_id: int, run: _Run, after: int, names: Sequence[str] | None) -> None:
    """Read what these metrics, or all, were after a step: each row goes to the end of its column.

    A chunk of rows is sorted by metric as arrays, steps in order within each: a loop over a million rows takes longer
    than the database does.
    """
    places: dict[str, int] = defaultdict(count().__next__)  # a number for each name, as it is met
    for rows in _new_rows(connection, run_id, (after, run.last), names):
        taken, named, values = (list(map(itemgetter(place), rows)) for place in range(3))
        which = np.fromiter(map(places.__getitem__, named), np.int64, len(rows))
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(places)))[:-1]
        steps_of = np.split(np.array(taken, dtype=np.int64)[order], ends)
        values_of = np.split(np.array(values, dtype=np.float64)[order], ends)  # None, which is null, becomes NaN
        for name, place in places.items():
            run.columns.setdefault(name, _Column()).extend(steps_of[place], values_of[place])
    for name in run.columns if names is None else names:
        run.columns[name].last = run.last


def _recorded(connection: Connection, run_id: int, step: int) -> float:
    """When a step was recorded: a step that was taken again has another time."""
    if step < 0:
        return 0.0
    chosen = select(steps.c.recorded).where(steps.c.run_id == run_id, steps.c.step == step)
    return connection.execute(chosen).scalar() or 0.0


def _new_rows(
    connection: Connection, run_id: int, between: tuple[int, int], names: Sequence[str] | None
) -> Iterator[Sequence[tuple[int, str, float | None]]]:
    """(step, name, value) after one step and up to another, in order, some at a time.

    They are the driver's plain tuples: SQLAlchemy's rows, which can more, take three times as long.
    """
    after, last = between
    chosen = select(metrics.c.step, metrics.c.name, metrics.c.value)
    chosen = chosen.where(metrics.c.run_id == run_id, metrics.c.step > after, metrics.c.step <= last)
    if names is not None:
        chosen = chosen.where(metrics.c.name.in_(names))
    cursor: Any = connection.execute(chosen.order_by(metrics.c.step)).cursor
    while rows := cursor.fetchmany(ROWS_AT_A_TIME):
        yield rows


def shown_series(series: MetricSeries, points: int) -> dict[str, Any]:
    """`{steps, values}`, and where it is longer than `points`, one entry a bucket with `low` and `high` as well."""
    if len(series.steps) <= points:
        return {"steps": series.steps.tolist(), "values": _plain(series.values)}
    edges = np.linspace(0, len(series.steps), points + 1).astype(int)  # bucket i is [edges[i], edges[i + 1])
    starts = edges[:-1]
    finite = np.isfinite(series.values)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, series.values, 0.0), starts)
    return {
        "steps": series.steps[edges[1:] - 1].tolist(),
        "values": _plain(np.divide(sums, counts, out=np.full(points, np.nan), where=counts > 0)),
        "low": _plain(np.fmin.reduceat(np.where(finite, series.values, np.inf), starts)),
        "high": _plain(np.fmax.reduceat(np.where(finite, series.values, -np.inf), starts)),
    }


def _plain(values: NDArray[Any]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
