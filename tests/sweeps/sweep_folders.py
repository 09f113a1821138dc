"""A sweep of numbers: its manifest, and its runs in a store, without any training."""

from __future__ import annotations

from pathlib import Path

from tether.config.load import load_recipe
from tether.store.database.open import workspace_at
from tether.store.folder import RunFolder, recipe_record
from tether.store.recorder import RunRecorder, RunStart
from tether.sweeps.manifest import SweepManifest, TrialEnd
from tether.sweeps.variation import Variation

STEPS = 8


def make_sweep(root: Path, name: str = "study", *, unfinished: int = 0, diverged: bool = False) -> SweepManifest:
    """Three clip ranges by two epochs with three seeds; clip range 0.2 is best, and two epochs beat one by 0.1."""
    recipe = load_recipe("ppo", settings={"run.steps": STEPS, "run.directory": str(root / "runs")})
    variations = (Variation("ppo.clip_range", (0.1, 0.2, 0.4)), Variation("ppo.epochs", (1, 2)))
    settings = tuple({"ppo.clip_range": clip, "ppo.epochs": epochs} for clip in (0.1, 0.2, 0.4) for epochs in (1, 2))
    manifest = SweepManifest(
        root / "runs" / name,
        recipe_record(recipe),
        "study.yaml",
        variations,
        "grid",
        (0, 1, 2),
        "score",
        "max",
        settings=settings,
        waves=(len(settings),),
    )
    trials = manifest.trials()
    for trial in trials[: len(trials) - unfinished]:
        lost = diverged and trial.setting == 5 and trial.seed == 1
        _record(manifest, trial, done=not lost)
        if lost:
            end = TrialEnd("diverged", "10 updates in a row were skipped", 4)
            manifest = SweepManifest(**{**manifest.__dict__, "ends": {trial.name: end}})
    manifest.write()
    return manifest


def value_at(values: dict, seed: int, step: int) -> float:
    """What a trial records: a rise to a level that its setting and its seed decide."""
    level = {0.1: 0.5, 0.2: 0.8, 0.4: 0.6}[values["ppo.clip_range"]] + 0.1 * (values["ppo.epochs"] - 1)
    return (level + 0.02 * (seed - 1)) * (step + 1) / STEPS


def _record(manifest: SweepManifest, trial, *, done: bool) -> None:
    workspace = workspace_at(manifest.workspace, None)
    folder = manifest.folder / trial.name
    folder.mkdir(parents=True)
    config = {"method": "ppo", "run": {"seed": trial.seed, "group": manifest.name}}
    recorder = RunRecorder(workspace, folder, RunStart("ppo", STEPS, config, {"python": "3"}, ()))
    for step in range(STEPS):
        recorder.record(step, {"score": value_at(dict(manifest.settings[trial.setting]), trial.seed, step)})
    recorder.close("done" if done else "failed")
    if done:
        RunFolder(folder).finish(STEPS)
