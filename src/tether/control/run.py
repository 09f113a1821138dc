"""Runs of `tether control`: folder, hooks, progress and interruption are those of every other run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any, cast

import torch
from rich.console import Console

from tether.config.control_recipe import ControlRecipe
from tether.config.load import control_from_record
from tether.control.saved import save_policy
from tether.control.spaces import gymnasium
from tether.control.training import ControlTraining
from tether.errors import ConfigError, Stopped
from tether.progress import say
from tether.protocols import StepHook
from tether.reports.safe_text import clean
from tether.rewards import consent
from tether.rewards.agree import agree_to_run
from tether.store.checkpoints import Checkpoint
from tether.store.database.open import workspace_at
from tether.store.folder import RunFolder, is_run, recipe_record, run_path
from tether.store.header import check_own_files, protected_recipe
from tether.store.history import follow_folder
from tether.store.lineage import describe_environment
from tether.store.recorder import Pieces
from tether.train.attempt import Attempt
from tether.train.checkpointing import Checkpointer, StepRecorder
from tether.train.failures import FaultRecorder, Watchdog
from tether.train.hooks import LiveDiagnosis, MetricTrackers, RunContext
from tether.train.provenance import BITS_DEPEND_ON, ENVIRONMENT, HEADER, identify
from tether.train.resume import located, run_folder
from tether.train.run import Watch, interruptions, print_notice, progress_bar
from tether.train.training import seed_everything

PACKAGES = ("gymnasium", "mujoco")  # whose versions decide what an environment does


class ControlContext(RunContext):
    """An attempt without a language model."""

    @cached_property
    def token_text(self) -> Pieces:
        """There are no tokens."""
        return lambda tokens: ["" for _ in tokens]


class ControlProvenance(StepHook):
    """Which run this is, and the versions and the machine that its numbers depend on."""

    def begin(self, run: RunContext) -> None:
        """Identify the run."""
        self.run = run
        run.identity = identify(run)
        run.environment = describe_environment(seed=run.recipe.run.seed, device="cpu") | _versions()

    def state(self) -> dict[str, Any]:
        """The environment and the header of the run."""
        assert self.run.identity is not None
        return {ENVIRONMENT: dict(self.run.environment), HEADER: self.run.identity.header.record()}

    def check(self, checkpoint: Checkpoint) -> None:
        """Warn where what the last bits depend on has changed."""
        before, now = checkpoint.values[ENVIRONMENT], self.run.environment
        changed = [name for name in (*BITS_DEPEND_ON, *PACKAGES) if before.get(name) != now.get(name)]
        if changed:
            words = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in changed)
            self.run.warn(f"The environment changed since the run was stopped ({words}): the results may differ.")


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(ImportError):  # an environment need not be MuJoCo's
            found[name] = version(name)
    return found


def control_attempt(run: RunContext, recipe: ControlRecipe, training: ControlTraining) -> Attempt:
    """The hooks that a run without answers and without a plan has, in the order of `tether.train.attempt`."""
    provenance, every = ControlProvenance(), recipe.run.doctor_every
    hooks: list[StepHook] = [
        provenance,
        StepRecorder(),
        MetricTrackers(),
        *([LiveDiagnosis(every)] if every else []),
        Checkpointer(),
        FaultRecorder(run.path, run.warn),
        Watchdog(recipe.run.hang_timeout, run.path),
    ]

    def save(report: dict[str, Any]) -> None:
        run.folder.write("report.json", report)
        if recipe.run.save:
            save_policy(training, run.folder.model_path)

    return Attempt(run, hooks, check=provenance.check, save=save)


def train_control(
    recipe: ControlRecipe,
    *,
    stop: Callable[[], bool] = lambda: False,
    notify: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    watch: Watch | None = None,
    resume: bool = False,
) -> tuple[RunFolder, int]:
    """Train to the end, or until `stop()`; returns the folder and the iterations taken. `recipe.run.name` is set."""
    watch = watch or Watch()
    folder = RunFolder(run_path(recipe))
    if resume and folder.is_finished:
        for notice in follow_folder(workspace_at(recipe.run.directory, recipe.store.url), folder.path):
            notify(notice)
        return folder, folder.steps_taken
    torch.set_num_threads(recipe.run.threads)
    seed_everything(recipe.run.seed)
    training = ControlTraining(recipe, notify)
    workspace_at(recipe.run.directory, recipe.store.url).name_of(folder.path)
    if not resume:  # the folder appears only after everything in the recipe has been checked
        folder = RunFolder.begin(recipe, None, consent.current().root)
    run = ControlContext(cast(Any, recipe), folder, cast(Any, training), cast(Any, None), notify, resumes=resume)
    with control_attempt(run, recipe, training) as attempt:
        start = attempt.resume() if resume else 0
        watch.begin(training.total, start)

        def heartbeat(phase: str) -> None:
            attempt.heartbeat(phase)
            watch.heartbeat(phase)

        for outcome in training.steps(start, stop, heartbeat):
            attempt.after_step(outcome)
            watch.advance(outcome.step, outcome.metrics)
        if run.is_over:
            attempt.finish()
        else:
            attempt.stop()
        return folder, run.done


def run_control(recipe: ControlRecipe, *, json_output: bool, resume: bool = False) -> int:
    """Train with progress on the terminal; 0 when all iterations were taken. Raises `Stopped` when interrupted."""
    gymnasium()  # a missing extra is reported before anything is written
    recipe, console = named(recipe), Console(stderr=True)
    title = f"{recipe.algorithm} {recipe.environment.id}"
    with interruptions() as stop, progress_bar(title, "starting", json_output, console) as watch:
        folder, done = train_control(
            recipe,
            stop=stop,
            notify=lambda text: print_notice(console, clean(text), style="dim"),
            watch=watch,
            resume=resume,
        )
    place = quote(str(folder.path))
    if not folder.is_finished:
        raise Stopped(f"stopped after {done} of {recipe.iterations} iterations; go on with: tether resume {place}")
    policy = f" The policy is in {folder.model_path}." if recipe.run.save else ""
    print_notice(console, f"Done: {done} iterations.{policy} Show it: tether show {place}")
    watch.check()
    return 0


def named(recipe: ControlRecipe) -> ControlRecipe:
    """The recipe with a run name, by default the environment and the time."""
    if recipe.run.name is not None:
        return recipe
    environment = re.sub(r"[^A-Za-z0-9_.-]+", "-", recipe.environment.id)
    stamp, number = f"{environment}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        name = stamp if number == 1 else f"{stamp}-{number}"
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})
        if not run_path(recipe).exists():
            return recipe
        number += 1


def is_control_run(words: str, directory: str = "runs") -> bool:
    """Whether a run, by its path or name, is one of `tether control`."""
    from tether.store.header import kept_recipe

    places = (Path(words).expanduser(), Path(directory) / words)
    return any(is_run(place) and kept_recipe(place).get("method") == ControlRecipe.method for place in places)


def stored_control(folder: Path) -> ControlRecipe:
    """The recipe that a run started with, with the folder where the run is now."""
    record = protected_recipe(folder, say)
    try:
        return located(control_from_record(record), folder)
    except ValueError as error:
        raise ConfigError(f"{folder} holds a recipe that is damaged, or of another version: {error}") from error


def resume_control(words: str, directory: str, *, json_output: bool) -> int:
    """Resume a run to its last iteration."""
    folder = run_folder(words, directory)
    recipe = stored_control(folder)
    if not RunFolder(folder).is_finished:
        agree_to_run(recipe, folder)
        check_own_files(folder)
    return run_control(recipe, json_output=json_output, resume=True)


def start_or_resume(recipe: ControlRecipe, *, json_output: bool) -> int:
    """`--resume auto`: resume the run of this name if there is one, else start it."""
    if recipe.run.name is None:
        raise ConfigError("--resume auto needs run.name: without a name there is no telling which run is meant")
    folder = run_path(recipe)
    if not is_run(folder) or RunFolder(folder).is_free:
        return run_control(recipe, json_output=json_output)
    stored = stored_control(folder)
    before, now = recipe_record(stored), recipe_record(recipe)
    changed = [name for name in now if name not in ("run", "store") and before.get(name) != now[name]]
    changed += [
        f"run.{name}"
        for name, value in now["run"].items()
        if name not in ("directory", "name") and before["run"].get(name) != value
    ]
    if changed:
        raise ConfigError(
            f"{folder} was started with another recipe ({', '.join(changed)} differ): give it another run.name"
        )
    check_own_files(folder)
    started = stored.model_copy(update={"run": recipe.run, "store": recipe.store})
    return run_control(started, json_output=json_output, resume=True)
