"""What the pages about runs read from the run store. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from sqlalchemy import Row, and_, func, select

from tether.store.database.open import is_inside
from tether.store.database.schema import events, metrics, rollouts, runs, steps
from tether.store.read import LATEST, OpenWorkspace, RunSummary, list_runs, state_now
from tether.studio.metric_cache import MetricCache
from tether.studio.replies import Refused

SPARK_METRICS = ("score", "loss")
"""Whichever of these a run has is drawn in the list of runs, the first before the second."""
SPARK_POINTS = 40
PACE_STEPS = 11  # the last ones, from which the time that is left is told


def run_with_id(opened: OpenWorkspace, run_id: int) -> RunSummary:
    """One run, or a 404."""
    for run in list_runs(opened):
        if run.id == run_id:
            return run
    raise Refused(404, f"there is no run {run_id} in this workspace")


def summary_row(run: RunSummary, spark: Sequence[float | None], left: float | None = None) -> dict[str, Any]:
    """A run as the list of runs shows it."""
    return {
        "id": run.id,
        "name": run.name,
        "method": run.method,
        "state": run.state,
        "step": run.steps_done,
        "steps": run.steps_target,
        "created": run.created,
        "updated": run.updated,
        "latest": dict(run.latest),
        "spark": list(spark),
        "seconds_left": left,
        "note": run.note,
        "tags": list(run.tags),
        "group": run.group,
        "lineage": [{"role": one.role, "source": one.source, "run": one.run} for one in run.lineage],
    }


def seconds_left(opened: OpenWorkspace, run: RunSummary) -> float | None:
    """How long a running run will take, at the pace of its last steps; None before its second step."""
    if run.state != "running" or run.steps_done < 2:
        return None
    chosen = select(steps.c.recorded).where(steps.c.run_id == run.id).order_by(steps.c.step.desc()).limit(PACE_STEPS)
    with opened.reading() as connection:
        times = list(connection.execute(chosen).scalars())
    if len(times) < 2:
        return None
    pace = median(later - earlier for later, earlier in pairwise(times))  # one jump of the clock does not count
    return max(0.0, pace * (run.steps_target - run.steps_done))


def sparks(opened: OpenWorkspace, found: Sequence[RunSummary]) -> dict[int, list[float | None]]:
    """A few values of each run's score, or loss, evenly apart: enough for a curve as small as a word."""
    drawn: dict[int, list[float | None]] = {}
    with opened.reading() as connection:
        for run in found:
            steps = spread(range(run.steps_done), SPARK_POINTS)
            chosen = select(metrics.c.name, metrics.c.value).where(metrics.c.run_id == run.id)
            chosen = chosen.where(metrics.c.step.in_(steps), metrics.c.name.in_(SPARK_METRICS))
            values: dict[str, list[float | None]] = {name: [] for name in SPARK_METRICS}
            for name, value in connection.execute(chosen.order_by(metrics.c.step)):
                values[name].append(value)
            drawn[run.id] = next(filter(None, values.values()), [])
    return drawn


def spread(places: Sequence[int], most: int) -> list[int]:
    """At most `most` of them, evenly apart, first and last included."""
    if len(places) <= most:
        return list(places)
    if most < 2:
        return list(places[:most])
    return [places[round(at * (len(places) - 1) / (most - 1))] for at in range(most)]


def run_page(opened: OpenWorkspace, run: RunSummary, cache: MetricCache) -> dict[str, Any]:
    """All that a run's page needs before it asks for curves."""
    return summary_row(run, sparks(opened, [run])[run.id], seconds_left(opened, run)) | {
        "config": dict(run.config),
        "environment": dict(run.environment),
        "events": [event_row(row) for row in news(opened, run.id, run.steps_done, 0)[1]],
        "metric_names": cache.names(run.id),
        "rollout_steps": kept_steps(opened, run.id),
    }


def event_row(row: Row[Any]) -> dict[str, Any]:
    """Something that happened to a run."""
    return {"time": row.time, "kind": row.kind, "text": row.text, "step": row.step, "data": row.data}


# -- what changed, for the stream ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pulse:
    """A run as a stream tells it."""

    id: int
    state: str
    step: int
    steps: int
    latest: Mapping[str, float] = field(default_factory=dict[str, float])


def pulses(opened: OpenWorkspace, run_id: int | None = None) -> list[Pulse]:
    """The state of every run, or of one: cheap enough to be asked for several times a second."""
    mine = runs.c.workspace == opened.workspace.key
    wanted = mine if run_id is None else and_(mine, runs.c.id == run_id)
    columns = (runs.c.id, runs.c.name, runs.c.state, runs.c.steps_done, runs.c.steps_target)
    last = and_(metrics.c.run_id == runs.c.id, metrics.c.step == runs.c.steps_done - 1, metrics.c.name.in_(LATEST))
    with opened.reading() as connection:
        rows = connection.execute(select(*columns).where(wanted).order_by(runs.c.id)).all()
        rows = [row for row in rows if is_inside(row.name)]
        joined = select(runs.c.id, metrics.c.name, metrics.c.value).select_from(runs.outerjoin(metrics, last))
        measured = connection.execute(joined.where(wanted)).all()
    latest: dict[int, dict[str, float]] = {}
    for run, name, value in measured:
        if name is not None:
            latest.setdefault(run, {})[name] = value
    return [
        Pulse(row.id, state_now(opened, row), row.steps_done, row.steps_target, latest.get(row.id, {})) for row in rows
    ]


def news(opened: OpenWorkspace, run_id: int, after_step: int, after_event: int) -> tuple[list[Any], list[Any]]:
    """(steps, events) of a run that came after the ones given: `(step, metrics)` and rows with their ids."""
    measured = select(metrics.c.step, metrics.c.name, metrics.c.value)
    measured = measured.where(metrics.c.run_id == run_id, metrics.c.step > after_step)
    happened = select(events).where(events.c.run_id == run_id, events.c.id > after_event).order_by(events.c.id)
    with opened.reading() as connection:
        numbers = connection.execute(measured.order_by(metrics.c.step, metrics.c.name)).all()
        told = connection.execute(happened).all()
    by_step: dict[int, dict[str, float]] = {}
    for step, name, value in numbers:
        by_step.setdefault(step, {})[name] = value
    return list(by_step.items()), list(told)


def last_event(opened: OpenWorkspace, run_id: int) -> int:
    """The id of a run's newest event; 0 where there is none."""
    with opened.reading() as connection:
        return connection.execute(select(func.max(events.c.id)).where(events.c.run_id == run_id)).scalar() or 0


# -- rollouts -----------------------------------------------------------------------------------------------------


def kept_steps(opened: OpenWorkspace, run_id: int) -> list[int]:
    """The steps whose rollouts were kept."""
    chosen = select(rollouts.c.step).where(rollouts.c.run_id == run_id).distinct().order_by(rollouts.c.step)
    with opened.reading() as connection:
        return list(connection.execute(chosen).scalars())
