"""Run a sweep to its end, or until it is stopped: waves of settings, each to its rungs, then the report.

A sweep resumes by doing the same again: settings are in the manifest or drawn again from the same results, trials that
reached their step are skipped, and the others continue from their checkpoints.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from tether.config.load import change_settings
from tether.config.sweep_settings import SAMPLED
from tether.errors import ConfigError, DataError, Diverged, Stopped, StorageError, UsageError
from tether.files import sealed
from tether.rewards import consent
from tether.store.folder import RunFolder, recipe_record, write_whole
from tether.sweeps.design import WAVE, differing, draw_settings
from tether.sweeps.manifest import PruneDecision, SweepManifest, Trial, TrialEnd, is_sweep
from tether.sweeps.prepare import begin_folder, total_steps
from tether.sweeps.pruning import hopeless, rung_steps
from tether.sweeps.ranking import RankedSetting, judge_settings
from tether.sweeps.results import TrialResult, open_results, read_results, runs_of_sweep
from tether.sweeps.room import Room, room_for
from tether.sweeps.sweep_progress import SweepProgress
from tether.sweeps.sweep_table import TABLE
from tether.sweeps.trial_pool import LOGS, TrialPool, TrialReply
from tether.sweeps.trial_process import TrialRequest
from tether.sweeps.variation import in_words, value_in
from tether.train.run import interruptions, print_notice

ENDED = ("done", "diverged", "early", "failed")
MAX_FIRST_FAILURES = 3  # failures without a single trial that ended well, after which the sweep stops


@dataclass
class SweepRun:
    """A sweep while it runs."""

    manifest: SweepManifest
    room: Room
    stop: Callable[[], bool]
    progress: SweepProgress
    failed: list[TrialReply] = field(default_factory=list[TrialReply])
    ended_well: int = 0
    fatal: TrialReply | None = None

    @property
    def total(self) -> int:
        """Steps of a trial, as far as the recipe says."""
        return total_steps(self.manifest.base)


def run_sweep(manifest: SweepManifest, *, jobs: int | None = None, json_output: bool = False) -> SweepManifest:
    """Run what is left of a sweep and write its table and its report; returns the manifest at the end.

    Raises Stopped when interrupted, after the running trials wrote their checkpoints.
    """
    console = Console(stderr=True)
    known = len(manifest.settings) or manifest.budget or 0
    room = room_for(manifest.base, jobs, known * len(manifest.seeds))
    if not is_sweep(manifest.folder):
        manifest = replace(manifest, threads=room.threads)  # kept: the number of threads decides the last bits
        begin_folder(manifest)
    else:
        manifest.write()  # with the seeds and the budget that were added
    print_notice(console, f"{_sweep_in_words(manifest)}; {room.reason}.", style="dim")
    with interruptions() as stop, SweepProgress(manifest, json_output=json_output) as progress:
        run = SweepRun(manifest, room, stop, progress)
        _run_waves(run)
    return _close(run, console)


def _sweep_in_words(manifest: SweepManifest) -> str:
    many = manifest.budget if manifest.sampler in SAMPLED else len(manifest.settings)
    return f"Sweep {manifest.name}: {many} settings ({manifest.sampler}) with {len(manifest.seeds)} seeds each"


# -- waves and rungs ----------------------------------------------------------------------------------------------


def _run_waves(run: SweepRun) -> None:
    wave = 0
    while _next_wave(run, wave):
        first = run.manifest.waves[wave - 1] if wave else 0
        members = range(first, run.manifest.waves[wave])
        for step in [*(rung_steps(run.total) if run.manifest.prune else []), None]:
            alive = [number for number in members if number not in run.manifest.stopped]
            if not _run_trials(run, alive, step):
                return
            if step is not None:
                _decide(run, wave, members, step)
        wave += 1


def _next_wave(run: SweepRun, wave: int) -> bool:
    """Whether there is another wave; the settings of a sampler are drawn and written first."""
    manifest = run.manifest
    if wave < len(manifest.waves):
        return True
    drawn = len(manifest.settings)
    if manifest.sampler not in SAMPLED or drawn >= (manifest.budget or 0):
        return False
    values = _values_so_far(manifest) if drawn and manifest.sampler == "tpe" else [0.0] * drawn
    sign = -1.0 if manifest.direction == "min" else 1.0
    found = draw_settings(
        manifest.base,
        manifest.variations,
        manifest.sampler,
        manifest.settings,
        lambda place: None if values[place] is None else sign * float(values[place] or 0.0),
        min(WAVE, (manifest.budget or 0) - drawn),
        manifest.base.run.seed,
    )
    if not found:
        return False
    settings = (*manifest.settings, *found)
    run.manifest = manifest.changed(settings=settings, waves=(*manifest.waves, len(settings)))
    run.progress.resize(run.manifest)
    return True


def _values_so_far(manifest: SweepManifest) -> list[float | None]:
    """The mean of each setting over its seeds; of one that was stopped early, over the steps that it took."""
    with open_results(manifest) as opened:
        results = read_results(opened, manifest)
    found: list[float | None] = []
    for number in range(len(manifest.settings)):
        mine = [result for result in results if result.trial.setting == number]
        values = [result.value() for result in mine if result.state in ("done", "early")]
        known = [value for value in values if value is not None]
        found.append(sum(known) / len(known) if known and len(known) == len(mine) else None)
    return found


def _decide(run: SweepRun, wave: int, members: Sequence[int], step: int) -> None:
    """Stop the hopeless settings of a wave; a decision that is in the manifest stays."""
    manifest = run.manifest
    if any(each.wave == wave and each.step == step for each in manifest.decisions):
        return
    with open_results(manifest) as opened:
        results = read_results(opened, manifest)
    reached = [number for number in range(max(members) + 1) if _reached(manifest, number, step)]
    values = {
        number: [_value_at(result, step) for result in results if result.trial.setting == number] for number in reached
    }
    alive = [number for number in members if number not in manifest.stopped]
    middle, stopped = hopeless(values, alive, manifest.direction, kept=_own_settings(manifest))
    decision = PruneDecision(wave, step, middle, stopped)
    run.manifest = manifest.changed(decisions=(*manifest.decisions, decision))
    for number in stopped:
        words = differing(manifest.settings[number], {}) or in_words(manifest.settings[number])
        run.progress.say(f"Stopped after {step} steps, below the median: {words}")
    run.progress.resize(run.manifest)


def _reached(manifest: SweepManifest, number: int, step: int) -> bool:
    return manifest.stopped.get(number, step) >= step


def _value_at(result: TrialResult, step: int) -> float | None:
    return None if result.state == "diverged" and result.steps < step else result.value(step)


def _own_settings(manifest: SweepManifest) -> frozenset[int]:
    """The settings that are the recipe itself."""
    base = manifest.base
    own = {variation.key: value_in(base, variation.key) for variation in manifest.variations}
    return frozenset(number for number, values in enumerate(manifest.settings) if dict(values) == own)


# -- trials -------------------------------------------------------------------------------------------------------


def _run_trials(run: SweepRun, settings: Sequence[int], step: int | None) -> bool:
    """Run the trials of these settings to a step, or to the end; returns whether all got there, or failed for good."""
    manifest = run.manifest
    for name in [name for name, end in manifest.ends.items() if end.state == "failed"]:
        if not any(reply.trial.name == name for reply in run.failed):  # in an earlier attempt: tried again
            run.manifest = manifest = manifest.changed(
                ends={each: end for each, end in manifest.ends.items() if each != name}
            )
    trials = [trial for trial in manifest.trials(range(len(manifest.settings))) if trial.setting in settings]
    left = _unfinished(manifest, trials, step)
    for trial in trials:
        if trial not in left:
            run.progress.advance(trial, run.total if step is None else step)
    pool = TrialPool(manifest.folder, run.room.jobs, run.stop, run.progress.advance)
    going = pool.run(
        left, lambda trial: trial_request(run.manifest, trial, step), lambda reply: _ended(run, reply, step)
    )
    if not going and run.fatal is None and not run.stop():
        raise Stopped(f"a trial was stopped from outside; {_how_to_resume(manifest)}")
    return going


def _unfinished(manifest: SweepManifest, trials: Sequence[Trial], step: int | None) -> list[Trial]:
    """The trials that did not reach the step."""
    with open_results(manifest) as opened:
        runs = runs_of_sweep(opened, manifest)
    left: list[Trial] = []
    for trial in trials:
        run = runs.get(trial.name)
        there = step is not None and run is not None and run.steps_done >= step
        if not (there or trial.name in manifest.ends or RunFolder(manifest.folder / trial.name).is_finished):
            left.append(trial)
    return left


def trial_request(manifest: SweepManifest, trial: Trial, step: int | None) -> TrialRequest:
    """What the process of a trial is asked: the recipe with its setting, its seed, its name and its group."""
    values = manifest.settings[trial.setting]
    base = manifest.base
    words = f"{in_words(values)}, seed {trial.seed}"
    note = f"{base.run.note}\n{words}" if base.run.note else words
    placed = {
        "run.name": manifest.run_name(trial),
        "run.directory": str(manifest.workspace),
        "run.seed": trial.seed,
        "run.group": manifest.name,
        "run.note": note,
    }
    recipe = change_settings(base, [], {**values, **placed})
    allowed = list(consent.current().given)
    return TrialRequest(recipe_record(recipe), step, allowed, str(manifest.folder), manifest.threads)


def _ended(run: SweepRun, reply: TrialReply, step: int | None) -> bool:
    """Note what became of a trial; returns whether the sweep goes on."""
    trial = reply.trial
    if reply.ended == "done" or (reply.ended == "paused" and step is not None and reply.steps >= step):
        run.ended_well += 1
        run.progress.ended(run.manifest, trial, "done" if reply.ended == "done" else "paused")
        return True
    if reply.ended == "paused":  # asked to stop, by the sweep or from outside
        return False
    asked = run.stop() or run.fatal is not None
    if asked and reply.exit_code in (Stopped.exit_code, -signal.SIGTERM):  # before it could handle the signal
        return False
    rejected = reply.exit_code == UsageError.exit_code and not run.ended_well
    if rejected or reply.exit_code == StorageError.exit_code:  # every other trial would end so too
        run.fatal = run.fatal or reply
        return False
    state = "diverged" if reply.exit_code == Diverged.exit_code else "failed"
    end = TrialEnd(state, reply.reason, reply.exit_code)
    run.manifest = run.manifest.changed(ends={**run.manifest.ends, trial.name: end})
    run.progress.ended(run.manifest, trial, state, reply.reason)
    if state == "failed":
        run.failed.append(reply)
        if not run.ended_well and len(run.failed) >= MAX_FIRST_FAILURES:
            run.fatal = reply
            return False
    return True


# -- the end ------------------------------------------------------------------------------------------------------


def _how_to_resume(manifest: SweepManifest) -> str:
    place = "" if str(manifest.workspace) == "runs" else f" --workspace {quote(str(manifest.workspace))}"
    return f"go on with: tether sweep --resume {quote(manifest.name)}{place}"


def _close(run: SweepRun, console: Console) -> SweepManifest:
    """Write the table and the report, and raise what ended the sweep early."""
    manifest, fatal = run.manifest, run.fatal
    results, report = write_results(manifest)
    print_notice(console, f"Report: {report}")
    ended = sum(result.state in ENDED for result in results)
    if fatal is not None:
        kind = {UsageError.exit_code: ConfigError, StorageError.exit_code: StorageError}.get(fatal.exit_code, DataError)
        values = in_words(manifest.settings[fatal.trial.setting])
        raise kind(
            f"trial {fatal.trial.name} ({values}): {fatal.reason}; the sweep stopped, and nothing is lost: repair it, "
            f"then {_how_to_resume(manifest)}"
        )
    if run.stop():
        raise Stopped(f"stopped after {ended} of {len(results)} trials; {_how_to_resume(manifest)}")
    if run.failed:
        names = ", ".join(reply.trial.name for reply in run.failed[:5])
        raise DataError(
            f"{len(run.failed)} of {len(results)} trials failed ({names}): {run.failed[0].reason}. Logs are in "
            f"{manifest.folder / LOGS}; to try them again, {_how_to_resume(manifest)}"
        )
    return manifest


def write_results(manifest: SweepManifest) -> tuple[list[TrialResult], Path]:
    """Write the table and the report of what there is so far; returns the trials and the page."""
    from tether.sweeps.sweep_report import write_sweep_report

    with open_results(manifest) as opened:
        results = read_results(opened, manifest)
    judged = judge_settings(manifest, results)
    write_whole(manifest.folder / TABLE, sealed(table_of(manifest, judged)))
    return results, write_sweep_report(manifest, judged, results)


def table_of(manifest: SweepManifest, judged: Sequence[RankedSetting]) -> dict[str, Any]:
    """The table as plain data: the same for the same trials, however often the sweep was interrupted."""
    return {
        "name": manifest.name,
        "metric": manifest.metric,
        "direction": manifest.direction,
        "seeds": list(manifest.seeds),
        "settings": [each.as_json() for each in judged],
    }
