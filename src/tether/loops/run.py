"""Running a recipe from beginning to end: folder, progress, interruption, the saved model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from shlex import quote
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tether.config.recipes import Recipe
from tether.errors import Stopped
from tether.loops.build import load_policy
from tether.loops.planned import RunPlan
from tether.loops.session import Session
from tether.loops.state import seed_everything
from tether.loops.training import build_training
from tether.models.digest import weights_digest
from tether.models.load import resolve_device
from tether.models.precision import precision_notice, with_precision
from tether.plan.shape import Shape
from tether.plan.table import plan_text
from tether.runs.checkpoints import Checkpoint
from tether.runs.folder import RunFolder, json_line, run_path
from tether.runs.report_text import clean
from tether.runs.store.open import workspace_at
from tether.types import Rollout

SHOWN = ("score", "loss", "accuracy", "kl_ref_k3", "kl_old", "entropy", "clip_fraction", "explained_variance")


Advance = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Forked:
    """Where a fork begins: another run's checkpoint, and which run that was."""

    checkpoint: Checkpoint
    run: str  # its name in the workspace
    folder: str

    def record(self) -> dict[str, Any]:
        """What the new run's folder keeps of it."""
        return {"run": self.run, "folder": self.folder, "step": self.checkpoint.step}


@dataclass(frozen=True)
class Trained:
    """What training left behind."""

    folder: RunFolder
    steps: int
    plan: RunPlan | None = None  # where a step was taken


def run_recipe(recipe: Recipe, *, json_output: bool, resume: bool = False, forked: Forked | None = None) -> int:
    """Train as the recipe says; 0 when every step was taken. Raises `Stopped` when interrupted, after a checkpoint."""
    console = Console(stderr=True)
    with interruptions() as stop, progress_bar(recipe, json_output, console) as advance:
        trained = train_recipe(
            recipe,
            stop=stop,
            advance=advance,
            notify=lambda text: console.print(clean(text), style="dim", markup=False),
            resume=resume,
            forked=forked,
        )
    place = trained.folder.path
    if trained.plan is not None and not json_output:
        for part in plan_text(trained.plan.plan, measured=trained.plan.measured):
            console.print(part)
    if trained.steps < recipe.run.steps:
        raise Stopped(
            f"stopped after {trained.steps} of {recipe.run.steps} steps; go on with: tether resume {quote(str(place))}"
        )
    model = f" The model is in {trained.folder.model_path}." if recipe.run.save else ""
    console.print(f"Done: {trained.steps} steps.{model} Look at it: tether show {quote(str(place))}", markup=False)
    return 0


def train_recipe(
    recipe: Recipe,
    *,
    stop: Callable[[], bool],
    advance: Advance,
    notify: Callable[[str], None],
    look_at: Callable[[int, Rollout], None] = lambda step, sample: None,  # noqa: ARG005
    resume: bool = False,
    forked: Forked | None = None,
) -> Trained:
    """Train, recording each step, and save the model at the end; with `resume`, from the newest whole checkpoint on.

    `look_at` is shown one rollout of each iteration, where there are rollouts. A run that is stopped before its end
    leaves a checkpoint. `forked` begins with another run's.
    """
    recipe = named(recipe)
    if resume and (folder := RunFolder(run_path(recipe))).is_finished:
        return Trained(folder, recipe.run.steps)
    seed_everything(recipe.run.seed)
    asked, recipe = recipe, with_precision(recipe, resolve_device(recipe.model.device))
    policy = load_policy(recipe)
    loaded = weights_digest(policy.model)
    shape = Shape.of(policy.model)
    training = build_training(recipe, policy)
    for notice in (precision_notice(asked, recipe), *policy.notices, *training.notices):
        if notice is not None:
            notify(notice)
    workspace_at(recipe.run.directory, recipe.store.url).name_of(run_path(recipe))
    if forked is not None:
        training.restore(forked.checkpoint)
    # Once everything that can be wrong with the recipe has been looked at.
    origin = forked.record() if forked is not None else None
    folder = RunFolder(run_path(recipe)) if resume else RunFolder.begin(recipe, origin)
    planned = RunPlan.of(recipe, shape, training, policy)
    with Session(
        recipe, folder, training, policy, planned=planned, loaded=loaded, resumes=resume, notify=notify
    ) as session:
        start = session.resume() if resume else session.fork(forked.checkpoint) if forked is not None else 0
        for taken in training.steps(start, stop, session.doing):
            session.keep(taken)
            advance(taken.step, taken.metrics)
            if taken.result is not None:
                look_at(taken.step, taken.result.rollouts[0])
        if session.done < recipe.run.steps:
            session.stop()
        else:
            session.finish()
        return Trained(folder, session.done, planned if planned.measured.iterations else None)


def named(recipe: Recipe) -> Recipe:
    """The recipe with a name for its run: one that has none is called by its method and the time."""
    name = recipe.run.name or f"{recipe.method}-{time.strftime('%Y%m%d-%H%M%S')}"
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM asks the loop to end after the step at hand; the second ends at once.

    Ending at once needs no farewell: what is half written has no name yet, and resuming finds the last checkpoint.
    """
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            os.write(2, b"\x1b[?25h" if os.isatty(2) else b"")  # a progress bar hides the cursor
            os.write(2, b"\ntether: stopped at once; resuming goes on from the last checkpoint\n")
            os._exit(Stopped.exit_code)
        os.write(2, b"\ntether: stopping after the step at hand; once more stops at once\n")
        asked = True

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def print_json(step: int, metrics: dict[str, float]) -> None:
    """One line on standard output; a reader that went away does not end a run."""
    with suppress(BrokenPipeError):
        print(json_line(step, metrics), flush=True)


@contextmanager
def progress_bar(recipe: Recipe, json_output: bool, console: Console) -> Iterator[Advance]:
    """A bar with the few numbers that matter; or, for scripts, one JSON line a step on standard output."""
    if json_output:
        yield print_json
        return
    columns = (
        TextColumn(recipe.method),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(recipe.method, total=recipe.run.steps, numbers="")

        def advance(step: int, metrics: dict[str, float]) -> None:
            numbers = "  ".join(f"{name} {metrics[name]:.3g}" for name in SHOWN if name in metrics)
            progress.update(task, completed=step + 1, numbers=numbers)

        yield advance
