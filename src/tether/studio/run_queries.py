"""Queries of the run store for the pages about runs: lists, live changes, findings, and answers token by token.

The doctor's findings are cached until a run changes, because pages request them each time they are opened. This module
needs no torch.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from sqlalchemy import Row, and_, func, select

from tether.doctor.doctor import Doctor, Examination
from tether.store.database.open import is_inside
from tether.store.database.schema import events, metrics, rollouts, runs, steps
from tether.store.read import LATEST, OpenWorkspace, RunSummary, list_runs, recorded, state_now
from tether.store.recorded import Column, StoredRollout, rollout_head_of
from tether.studio.metric_cache import MetricCache
from tether.studio.replies import Refused

SPARK_METRICS = ("score", "loss")
"""The metrics for the small curve in the list of runs; the first that a run has is drawn."""
SPARK_POINTS = 40
PACE_STEPS = 11  # the last steps, from which the remaining time is estimated


def run_with_id(opened: OpenWorkspace, run_id: int) -> RunSummary:
    """One run, or a 404."""
    for run in list_runs(opened):
        if run.id == run_id:
            return run
    raise Refused(404, f"there is no run {run_id} in this workspace")


def summary_row(run: RunSummary, spark: Sequence[float | None], left: float | None = None) -> dict[str, Any]:
    """A run as a row of the list of runs."""
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
    """Estimated remaining time of a running run, from its last steps; None before its second step."""
    if run.state != "running" or run.steps_done < 2:
        return None
    chosen = select(steps.c.recorded).where(steps.c.run_id == run.id).order_by(steps.c.step.desc()).limit(PACE_STEPS)
    with opened.reading() as connection:
        times = list(connection.execute(chosen).scalars())
    if len(times) < 2:
        return None
    pace = median(later - earlier for later, earlier in pairwise(times))  # robust to a jump of the clock
    return max(0.0, pace * (run.steps_target - run.steps_done))


def sparks(opened: OpenWorkspace, found: Sequence[RunSummary]) -> dict[int, list[float | None]]:
    """A few evenly spaced values of each run's score or loss, enough for a very small curve."""
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


def spread(places: Sequence[int], limit: int) -> list[int]:
    """At most `most` of them, evenly spaced, including the first and the last."""
    if len(places) <= limit:
        return list(places)
    if limit < 2:
        return list(places[:limit])
    return [places[round(at * (len(places) - 1) / (limit - 1))] for at in range(limit)]


def run_page(opened: OpenWorkspace, run: RunSummary, cache: MetricCache) -> dict[str, Any]:
    """The data of a run's page, without the curves."""
    return summary_row(run, sparks(opened, [run])[run.id], seconds_left(opened, run)) | {
        "config": dict(run.config),
        "environment": dict(run.environment),
        "events": [event_row(row) for row in news(opened, run.id, run.steps_done, 0)[1]],
        "metric_names": cache.names(run.id),
        "rollout_steps": kept_steps(opened, run.id),
    }


def event_row(row: Row[Any]) -> dict[str, Any]:
    """An event of a run."""
    return {"time": row.time, "kind": row.kind, "text": row.text, "step": row.step, "data": row.data}


# -- changes, for live events -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pulse:
    """The state of a run for live events."""

    id: int
    state: str
    step: int
    steps: int
    latest: Mapping[str, float] = field(default_factory=dict[str, float])


def pulses(opened: OpenWorkspace, run_id: int | None = None) -> list[Pulse]:
    """The state of every run, or of one: cheap enough to be read several times a second."""
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
    """(steps, events) of a run after the given ones: `(step, metrics)`, and event rows with their ids."""
    measured = select(metrics.c.step, metrics.c.name, metrics.c.value)
    measured = measured.where(metrics.c.run_id == run_id, metrics.c.step > after_step)
    happened = select(events).where(events.c.run_id == run_id, events.c.id > after_event).order_by(events.c.id)
    with opened.reading() as connection:
        numbers = connection.execute(measured.order_by(metrics.c.step, metrics.c.name)).all()
        found = connection.execute(happened).all()
    by_step: dict[int, dict[str, float]] = {}
    for step, name, value in numbers:
        by_step.setdefault(step, {})[name] = value
    return list(by_step.items()), list(found)


def last_event(opened: OpenWorkspace, run_id: int) -> int:
    """The id of a run's newest event; 0 if there is none."""
    with opened.reading() as connection:
        return connection.execute(select(func.max(events.c.id)).where(events.c.run_id == run_id)).scalar() or 0


# -- rollouts -----------------------------------------------------------------------------------------------------


def kept_steps(opened: OpenWorkspace, run_id: int) -> list[int]:
    """The steps whose rollouts were kept."""
    chosen = select(rollouts.c.step).where(rollouts.c.run_id == run_id).distinct().order_by(rollouts.c.step)
    with opened.reading() as connection:
        return list(connection.execute(chosen).scalars())


# -- findings of the doctor ---------------------------------------------------------------------------------------

MAX_DIAGNOSES = 100


class Diagnoses:
    """The doctor for all pages. A long run takes half a second, so one run is examined at a time."""

    def __init__(self, opened: OpenWorkspace, metrics: MetricCache) -> None:
        self._opened, self._metrics = opened, metrics
        self._heard: OrderedDict[int, tuple[tuple[object, ...], Examination]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: RunSummary) -> Examination:
        """The findings of every audit about the current run. Its metrics come from the cache of the curves."""
        with self._lock:
            written = (run.created, run.updated, run.state, run.steps_done, last_event(self._opened, run.id))
            known, said = self._heard.pop(run.id, (None, None))
            if said is None or known != written:
                said = Doctor().examination(recorded(self._opened, run, self._metrics.rows(run.id)))
            self._heard[run.id] = (written, said)
            if len(self._heard) > MAX_DIAGNOSES:
                self._heard.popitem(last=False)
            return said


# -- answers and their tokens -------------------------------------------------------------------------------------

SHOWN_COLUMNS = (
    *("behavior_logprob", "untruncated_logprob", "old_logprob", "ref_logprob", "value"),
    *("reward", "advantage", "return", "ratio", "clipped", "entropy"),
)

EXCERPT = 400  # characters of a text in a list; its own page shows all of it

SORTS: dict[str, tuple[str, int]] = {
    "row": ("row", 1),
    "score": ("score", -1),
    "kl": ("kl", -1),
    "advantage": ("mean_advantage", 1),  # the most negative first: the answers that the policy learns to avoid
    "length": ("length", -1),
}
"""The sort orders of a list of rollouts: the field, and whether it ascends or descends."""


def rollout_row(rollout: StoredRollout) -> dict[str, Any]:
    """One row of a list, its texts shortened; `kl` is summed over the answer, `clipped` counts its clipped tokens."""
    return {
        "row": rollout.row,
        "prompt_id": rollout.prompt_id,
        "prompt_text": rollout.prompt_text[:EXCERPT],
        "completion": rollout.completion[:EXCERPT],
        "finish": rollout.finish,
        "score": rollout.score,
        "length": int(rollout.columns["response"].sum()),
        "kl": None if rollout.kl is None else float(rollout.kl.sum()),
        "mean_advantage": _mean(rollout, "advantage"),
        "clipped": int(rollout.answer("clipped").sum()) if "clipped" in rollout.columns else 0,
    }


def _mean(rollout: StoredRollout, name: str) -> float | None:
    values = rollout.answer(name) if name in rollout.columns else np.zeros(0)
    return float(values.mean()) if len(values) else None


def listed(found: Sequence[StoredRollout], *, sort: str, text: str, truncated: bool | None) -> list[dict[str, Any]]:
    """The rows that match, in the chosen order; rows without a number are last."""
    needle = text.casefold()
    chosen = [
        rollout
        for rollout in found
        if (truncated is None or (rollout.finish == "length") == truncated)
        and needle in f"{rollout.prompt_text}\n{rollout.completion}".casefold()
    ]
    field, direction = SORTS[sort]
    return sorted((rollout_row(rollout) for rollout in chosen), key=_key(field, direction))


def _key(field: str, direction: int) -> Callable[[dict[str, Any]], tuple[bool, float, int]]:
    def key(row: dict[str, Any]) -> tuple[bool, float, int]:
        value = row[field]
        if value is None or not math.isfinite(value):
            return (True, 0.0, row["row"])
        return (False, direction * value, row["row"])

    return key


def token_page(rollout: StoredRollout) -> dict[str, Any]:
    """One rollout with its columns over all tokens, prompt and answer; missing columns are absent."""
    columns = {name: _listed(rollout.columns[name]) for name in SHOWN_COLUMNS if name in rollout.columns}
    if rollout.kl is not None:
        columns["kl"] = _listed(rollout.kl)
    return {
        "step": rollout.step,
        "row": rollout.row,
        "prompt_id": rollout.prompt_id,
        "prompt_text": rollout.prompt_text,
        "completion": rollout.completion,
        "finish": rollout.finish,
        "score": rollout.score,
        "parts": dict(rollout.parts),
        "temperature": rollout.temperature,
        "final_value": rollout.final_value,
        "pieces": list(rollout.pieces),
        "response": rollout.columns["response"].tolist(),
        "columns": columns,
    }


def _listed(column: Column) -> list[Any]:
    """Plain numbers, rounded to seven decimals: finer than any drawing, and half the size to send."""
    if column.dtype == bool:
        return column.tolist()
    values = np.round(column.astype(np.float64), 7).tolist()
    return values if np.isfinite(column).all() else [value if math.isfinite(value) else None for value in values]


class PromptIndex:
    """An index of prompt ids by step and row. Each kept step is read once."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened
        self._known: dict[tuple[str, int], list[tuple[int, str]]] = {}
        self._lock = threading.Lock()

    def rows_with(self, run_id: int, steps: Sequence[int], prompt_id: str) -> list[tuple[int, int]]:
        """(step, row) of every kept answer to a prompt."""
        with self._opened.reading() as connection:
            uid = connection.execute(select(runs.c.uid).where(runs.c.id == run_id)).scalar() or ""
        with self._lock:
            for step in steps:
                if (uid, step) not in self._known:
                    self._known[uid, step] = self._look_through(run_id, step)
            return [(step, row) for step in steps for row, prompt in self._known[uid, step] if prompt == prompt_id]

    def _look_through(self, run_id: int, step: int) -> list[tuple[int, str]]:
        chosen = select(rollouts.c.place, rollouts.c.content).where(rollouts.c.run_id == run_id)
        with self._opened.reading() as connection:
            rows = connection.execute(chosen.where(rollouts.c.step == step).order_by(rollouts.c.place)).all()
        return [(place, rollout_head_of(content)["prompt_id"]) for place, content in rows]


def answers_at(opened: OpenWorkspace, run_id: int, places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """`{step, row, score, completion}` of the rollouts at these places, the answers shortened."""
    found: list[dict[str, Any]] = []
    with opened.reading() as connection:
        for step, row in places:
            chosen = select(rollouts.c.score, rollouts.c.content)
            chosen = chosen.where(rollouts.c.run_id == run_id, rollouts.c.step == step, rollouts.c.place == row)
            for score, content in connection.execute(chosen):
                head = rollout_head_of(content)
                found.append({"step": step, "row": row, "score": score, "completion": head["completion"][:EXCERPT]})
    return found
