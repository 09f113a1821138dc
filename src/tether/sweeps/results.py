"""What the trials of a sweep recorded, read from the run store, and the value of each trial.

The value is the mean of the metric over the last quarter of the steps taken. This module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from tether.errors import ConfigError
from tether.store.database.open import workspace_at
from tether.store.folder import RunFolder
from tether.store.read import OpenWorkspace, RunSummary, list_runs, open_store, open_workspace, recorded
from tether.sweeps.manifest import SweepManifest, Trial

TAIL = 0.25  # the part of the steps whose mean is a trial's value
Points = Sequence[tuple[int, float]]
ReadPoints = Callable[[RunSummary], Points]  # a metric of a run by step


@dataclass(frozen=True)
class TrialResult:
    """A trial: its state, its run, and the metric by step.

    `state` is done, diverged, failed, early (stopped by the sweep), waiting, or the state of its unfinished run.
    """

    trial: Trial
    state: str
    steps: int
    points: Points = ()
    run_id: int | None = None
    reason: str = ""

    def value(self, steps: int | None = None) -> float | None:
        """The mean over the last quarter of the first `steps` steps, by default of all; None without a finite one."""
        last = self.steps if steps is None else steps
        return tail_mean(self.points, last)


def tail_mean(points: Points, steps: int) -> float | None:
    """The mean of a metric over the last quarter of `steps` steps; the last value where none was recorded there.

    A value that is not finite there counts as none at all: the trial has diverged.
    """
    taken = [(step, value) for step, value in points if step < steps]
    late = [value for step, value in taken if step >= steps * (1.0 - TAIL)] or [value for _, value in taken[-1:]]
    return math.fsum(late) / len(late) if late and all(map(math.isfinite, late)) else None


def open_results(manifest: SweepManifest) -> OpenWorkspace:
    """The store of the sweep's runs, which is created where no trial has begun."""
    workspace = workspace_at(manifest.workspace, manifest.url)
    try:
        return open_workspace(manifest.workspace, manifest.url)
    except ConfigError:
        return OpenWorkspace(workspace, open_store(workspace))


def runs_of_sweep(opened: OpenWorkspace, manifest: SweepManifest) -> dict[str, RunSummary]:
    """The runs of a sweep by the name of the trial."""
    start = f"{manifest.name}/"
    return {run.name.removeprefix(start): run for run in list_runs(opened) if run.name.startswith(start)}


def read_results(
    opened: OpenWorkspace, manifest: SweepManifest, read_points: ReadPoints | None = None
) -> list[TrialResult]:
    """Every trial, in the order in which they run. `read_points` reads the metric where a reader has a cache of it.

    Raises ConfigError where finished trials recorded other metrics than the one that judges them.
    """
    runs = runs_of_sweep(opened, manifest)
    read = read_points or (lambda run: _points(opened, manifest.metric, run))
    found = [_read_one(manifest, trial, runs.get(trial.name), read) for trial in manifest.trials()]
    finished = [result for result in found if result.state == "done"]
    if finished and not any(result.points for result in finished):
        raise ConfigError(_other_metrics(opened, manifest.metric, runs[finished[0].trial.name]))
    return found


def _points(opened: OpenWorkspace, metric: str, run: RunSummary) -> Points:
    return [(int(row["step"]), float(row[metric])) for row in recorded(opened, run).metrics if metric in row]


def _read_one(manifest: SweepManifest, trial: Trial, run: RunSummary | None, read: ReadPoints) -> TrialResult:
    end = manifest.ends.get(trial.name)
    reason = end.reason if end is not None else ""
    if run is None:
        return TrialResult(trial, end.state if end else "waiting", 0, reason=reason)
    return TrialResult(trial, _state(manifest, trial, run), run.steps_done, read(run), run.id, reason)


def _state(manifest: SweepManifest, trial: Trial, run: RunSummary) -> str:
    if RunFolder(manifest.folder / trial.name).is_finished:
        return "done"
    if trial.name in manifest.ends:
        return manifest.ends[trial.name].state
    return "early" if trial.setting in manifest.stopped and run.state != "running" else run.state


def _other_metrics(opened: OpenWorkspace, metric: str, run: RunSummary) -> str:
    """What to say where a finished run has no such metric."""
    names = sorted({name for row in recorded(opened, run).metrics for name in row} - {"step"})
    close = get_close_matches(metric, names, n=1)
    advice = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names[:12])}"
    hint = " (it needs evaluation.every)" if metric.startswith("held_out/") else ""
    return f"--metric {metric}: no trial recorded it{hint}: {advice}"
