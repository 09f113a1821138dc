"""A cache of the metrics of runs, and downsampling of long curves for drawing.

A page requests a few curves of a run again and again, and a long run has a million numbers in the database. The cache
reads a curve when it is first requested, and from then on only its new steps. A long curve is reduced to buckets; each
keeps its mean, minimum and maximum, so that no spike is lost.
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
ROWS_AT_A_TIME = 2_000  # they fit into the processor's cache: chunks of twenty thousand take a third longer


@dataclass(frozen=True)
class MetricSeries:
    """One metric: its steps and its values; a value that is not finite is NaN."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass
class _Column:
    """One metric, read up to the run's step `last`, which need not have a value."""

    last: int = -1
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def series(self) -> MetricSeries:
        """A copy, because the arrays keep growing."""
        return MetricSeries(np.array(self.steps, dtype=np.int64), np.array(self.values, dtype=np.float64))

    def extend(self, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Append later steps."""
        self.steps.frombytes(steps.tobytes())
        self.values.frombytes(values.tobytes())


@dataclass
class _Run:
    """The cached metrics of one run up to its step `last`, which was `recorded` at that time."""

    uid: str
    last: int = -1
    recorded: float = 0.0
    named: int = -1  # the step up to which the names of all metrics are known
    columns: dict[str, _Column] = field(default_factory=dict)  # every metric by name; read only when requested


class MetricCache:
    """The metrics of the most recently viewed runs."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, run_id: int) -> list[str]:
        """The names of a run's metrics."""
        with self._looking_at(run_id) as (connection, run):
            _find_names(connection, run_id, run)
            return sorted(run.columns)

    def series(self, run_id: int, names: Collection[str] | None = None) -> Mapping[str, MetricSeries]:
        """The metrics of a run, all or those named, as they are in the database now."""
        with self._looking_at(run_id) as (connection, run):
            columns = _up_to_date(connection, run_id, run, names)
            return {name: column.series() for name, column in columns.items()}

    def rows(self, run_id: int) -> list[dict[str, float]]:
        """One mapping per step, in order, with its "step": the same numbers as `tether.store.read.read_run`."""
        with self._looking_at(run_id) as (connection, run):
            chosen = select(steps.c.step).where(steps.c.run_id == run_id, steps.c.step <= run.last)
            taken = list(connection.execute(chosen.order_by(steps.c.step)).scalars())
            columns = _up_to_date(connection, run_id, run, None)
            series = {name: column.series() for name, column in columns.items()}
        return _as_rows(taken, series)  # outside the lock: it takes longer than reading

    @contextmanager
    def _looking_at(self, run_id: int) -> Iterator[tuple[Connection, _Run]]:
        """The cache of a run. If reading fails half-way it is dropped, and read again the next time."""
        with self._lock, self._opened.reading() as connection:
            run = _current(connection, run_id, self._runs.pop(run_id, None))
            yield connection, run
            self._runs[run_id] = run
            while len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)


def _as_rows(taken: Sequence[int], series: Mapping[str, MetricSeries]) -> list[dict[str, float]]:
    """The mapping of each step. A metric that every step has, as most do, is added in one pass."""
    whole = {name: one.values.tolist() for name, one in series.items() if len(one.steps) == len(taken)}
    names = ("step", *whole)
    rows = [dict(zip(names, values, strict=True)) for values in zip(taken, *whole.values(), strict=True)]
    for name in series.keys() - whole.keys():
        places = np.searchsorted(np.array(taken, dtype=np.int64), series[name].steps)
        for place, value in zip(places.tolist(), series[name].values.tolist(), strict=True):
            rows[place][name] = value
    return rows


def _current(connection: Connection, run_id: int, known: _Run | None) -> _Run:
    """The cache with the run's current last step; a new one if the run was rewound."""
    uid = connection.execute(select(runs.c.uid).where(runs.c.id == run_id)).scalar() or ""
    if known is None or known.uid != uid or _recorded(connection, run_id, known.last) != known.recorded:
        known = _Run(uid)
    last = connection.execute(select(func.max(steps.c.step)).where(steps.c.run_id == run_id)).scalar()
    if last is not None and last > known.last:
        known.last, known.recorded = last, _recorded(connection, run_id, last)
    return known


def _find_names(connection: Connection, run_id: int, run: _Run) -> None:
    """Add an empty column for every metric of the new steps."""
    if run.named < run.last:
        new = select(metrics.c.name).where(metrics.c.run_id == run_id, metrics.c.step > run.named)
        for name in connection.execute(new.distinct()).scalars():
            run.columns.setdefault(name, _Column())
        run.named = run.last


def _up_to_date(connection: Connection, run_id: int, run: _Run, names: Collection[str] | None) -> Mapping[str, _Column]:
    """The columns of these metrics, or of all, brought up to date; columns at the same step are read together."""
    if names is None and run.named < 0:  # an empty cache: reading all metrics finds their names on the way
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
    """Append the values of these metrics, or of all, after a step.

    A chunk of rows is sorted by metric as arrays, in order of steps: a Python loop over a million rows would take
    longer than the database.
    """
    places: dict[str, int] = defaultdict(count().__next__)  # a number for each name, in order of appearance
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
    """When a step was recorded: a step that was repeated has another time."""
    if step < 0:
        return 0.0
    chosen = select(steps.c.recorded).where(steps.c.run_id == run_id, steps.c.step == step)
    return connection.execute(chosen).scalar() or 0.0


def _new_rows(
    connection: Connection, run_id: int, between: tuple[int, int], names: Sequence[str] | None
) -> Iterator[Sequence[tuple[int, str, float | None]]]:
    """(step, name, value) after one step and up to another, in order, in chunks.

    These are the driver's plain tuples: SQLAlchemy's rows take three times as long.
    """
    after, last = between
    chosen = select(metrics.c.step, metrics.c.name, metrics.c.value)
    chosen = chosen.where(metrics.c.run_id == run_id, metrics.c.step > after, metrics.c.step <= last)
    if names is not None:
        chosen = chosen.where(metrics.c.name.in_(names))
    cursor: Any = connection.execute(chosen.order_by(metrics.c.step)).cursor
    while rows := cursor.fetchmany(ROWS_AT_A_TIME):
        yield rows


# -- downsampling for drawing -------------------------------------------------------------------------------------


def shown_series(series: MetricSeries, points: int) -> dict[str, Any]:
    """`{steps, values}`; if it is longer than `points`, one entry per bucket, also with `low` and `high`."""
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
