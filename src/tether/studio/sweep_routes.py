"""The routes that read sweeps: the list, and one sweep with its settings, effects, curves and trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Path as FromPath
from fastapi import Request

from tether.errors import ConfigError
from tether.store.read import RunSummary
from tether.studio.context import Studio, studio_of
from tether.studio.replies import Refused, Reply, api_router
from tether.sweeps.manifest import SweepManifest, find_sweeps, read_manifest
from tether.sweeps.ranking import KeyEffect, RankedSetting, best_of, judge_settings, main_effects, ranked
from tether.sweeps.results import Points, TrialResult, read_results
from tether.sweeps.student_t import MeanInterval
from tether.sweeps.sweep_pictures import setting_curve
from tether.sweeps.sweep_report import own_values
from tether.sweeps.sweep_table import state_in_words
from tether.sweeps.variation import in_words, shown

router = api_router()

MAX_CURVES = 12  # of the best settings, and the recipe's own
Name = Annotated[str, FromPath(max_length=200)]


@router.get("/sweeps")
def all_sweeps(request: Request) -> Any:
    """Every sweep of the workspace, the most recently written first."""
    studio = studio_of(request)
    return Reply({"sweeps": [_listed(studio, folder) for folder in find_sweeps(studio.opened.workspace.directory)]})


@router.get("/sweeps/{name}")
def one_sweep(request: Request, name: Name) -> Any:
    """A sweep: its settings with the best first, the effect of each key, curves, and the run of each trial."""
    studio = studio_of(request)
    # Only a folder that is in the list: a name from a request is never joined to a path.
    folder = next((each for each in find_sweeps(studio.opened.workspace.directory) if each.name == name), None)
    if folder is None:
        raise Refused(404, f"there is no sweep {name} in this workspace")
    manifest = read_manifest(folder)
    results = _results(studio, manifest)
    judged = judge_settings(manifest, results)
    own = own_values(manifest)
    order = ranked(judged, manifest.direction)
    return Reply(
        _summary(manifest, judged, results)
        | {
            "metric": manifest.metric,
            "direction": manifest.direction,
            "seeds": list(manifest.seeds),
            "own": {key: shown(value) for key, value in own.items()},
            "settings": [_setting_row(manifest, each, results) for each in order],
            "effects": [_effect_row(effect) for effect in main_effects(manifest, judged, own)],
            "curves": _curves(order, results, own),
        }
    )


def _listed(studio: Studio, folder: Path) -> dict[str, Any]:
    try:
        manifest = read_manifest(folder)
        results = _results(studio, manifest)
        return _summary(manifest, judge_settings(manifest, results), results)
    except ConfigError as error:  # one that is damaged hides no other
        return {"name": folder.name, "error": str(error)}


def _results(studio: Studio, manifest: SweepManifest) -> list[TrialResult]:
    def points(run: RunSummary) -> Points:
        found = studio.metrics.series(run.id, [manifest.metric]).get(manifest.metric)
        return list(zip(found.steps.tolist(), found.values.tolist(), strict=True)) if found is not None else []

    return read_results(studio.opened, manifest, points)


def _summary(
    manifest: SweepManifest, judged: Sequence[RankedSetting], results: Sequence[TrialResult]
) -> dict[str, Any]:
    best = best_of(judged, manifest.direction)
    planned = max(len(manifest.settings), manifest.budget or 0) * len(manifest.seeds)
    states = Counter(result.state for result in results)
    return {
        "name": manifest.name,
        "method": manifest.recipe["method"],
        "sampler": manifest.sampler,
        "keys": [variation.key for variation in manifest.variations],
        "trials": planned,
        "ended": sum(states[state] for state in ("done", "diverged", "failed", "early")),
        "states": dict(states),
        "best": None if best is None else {"words": in_words(best.values), "interval": _interval(best.interval)},
        "written": (manifest.folder / "sweep.json").stat().st_mtime,
    }


def _interval(interval: MeanInterval | None) -> dict[str, Any] | None:
    return interval.as_json() if interval is not None else None


def _setting_row(manifest: SweepManifest, each: RankedSetting, results: Sequence[TrialResult]) -> dict[str, Any]:
    runs = [
        {"seed": result.trial.seed, "run": result.run_id, "state": result.state, "value": result.value()}
        for result in results
        if result.trial.setting == each.number
    ]
    return {
        "setting": each.number,
        "values": {key: shown(value) for key, value in each.values.items()},
        "interval": _interval(each.interval),
        "behind": _interval(each.behind),
        "chance": each.chance,
        "rests_on": state_in_words(manifest, each),
        "runs": runs,
    }


def _effect_row(effect: KeyEffect) -> dict[str, Any]:
    best = effect.best
    return {
        "key": effect.key,
        "own": shown(effect.own),
        "values": [
            {
                "value": shown(each.values[effect.key]),
                "interval": _interval(each.interval),
                "chance": each.chance,
                "diverged": each.diverged,
                "best": each is best,
            }
            for each in effect.values
        ],
    }


def _curves(
    order: Sequence[RankedSetting], results: Sequence[TrialResult], own: dict[str, Any]
) -> list[dict[str, Any]]:
    """The curves of the best settings and of the recipe itself."""
    chosen = [*order[:MAX_CURVES], *(each for each in order[MAX_CURVES:] if dict(each.values) == own)]
    found: list[dict[str, Any]] = []
    for each in chosen:
        points = setting_curve(results, each.number)
        found.append(
            {
                "setting": each.number,
                "steps": [step for step, _ in points],
                "mean": [interval.mean for _, interval in points],
                "low": [interval.low for _, interval in points],
                "high": [interval.high for _, interval in points],
            }
        )
    return found
