"""Running a recipe from beginning to end: folder, progress, interruption, the saved model."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tether.config.recipes import Recipe, RLRecipe
from tether.errors import Stopped
from tether.loops.build import build_rl, build_supervised, load_policy
from tether.loops.rl import train_rl
from tether.loops.supervised import train_supervised
from tether.models.heads import ScalarModel
from tether.models.roles import ActorCritic
from tether.models.save import save_model
from tether.runs.folder import RunFolder, json_line
from tether.types import Rollout

SHOWN = ("score", "loss", "accuracy", "kl_ref_k3", "kl_old", "entropy", "clip_fraction", "explained_variance")


Advance = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Trained:
    """What training left behind."""

    folder: RunFolder
    steps: int


def run_recipe(recipe: Recipe, *, json_output: bool) -> int:
    """Train as the recipe says; 0 when every step was taken. Raises `Stopped` when interrupted, after saving."""
    console = Console(stderr=True)
    with interruptions() as stop, progress_bar(recipe, json_output, console) as advance:
        trained = train_recipe(recipe, stop=stop, advance=advance, notify=lambda text: console.print(text, style="dim"))
    place = trained.folder.path
    if trained.steps < recipe.run.steps:
        raise Stopped(f"stopped after {trained.steps} of {recipe.run.steps} steps; what was learned is in {place}")
    console.print(f"Done: {trained.steps} steps. Metrics and model are in {place}")
    return 0


def train_recipe(
    recipe: Recipe,
    *,
    stop: Callable[[], bool],
    advance: Advance,
    notify: Callable[[str], None],
    look_at: Callable[[int, Rollout], None] = lambda step, sample: None,  # noqa: ARG005
) -> Trained:
    """Train, recording each step in the run's folder, and save the model, however many steps were taken.

    `look_at` is shown one rollout of each iteration, where there are rollouts.
    """
    policy = load_policy(recipe)
    for notice in policy.notices:
        notify(notice)
    rl = build_rl(recipe, policy) if isinstance(recipe, RLRecipe) else None
    parts = build_supervised(recipe, policy) if rl is None else None
    for notice in getattr(rl.engine, "notices", ()) if rl is not None else ():
        notify(notice)
    folder = RunFolder(recipe)  # once everything that can be wrong with the recipe has been looked at
    steps = 0
    try:
        if isinstance(recipe, RLRecipe) and rl is not None:
            model = rl.roles.actor.policy
            for result in train_rl(rl, stop=stop):
                folder.record(result.step, result.metrics, result.experience)
                advance(result.step, result.metrics)
                look_at(result.step, result.sample)
                if recipe.evaluation.keep_best and folder.is_best(result.metrics):
                    save_model(model, policy.tokenizer, folder.best_path)
                steps += 1
        else:
            assert parts is not None
            learned = parts.learner.model
            assert isinstance(learned, ScalarModel | ActorCritic)
            model = learned if isinstance(learned, ScalarModel) else learned.policy
            for step, metrics in train_supervised(parts, stop=stop):
                folder.record(step, metrics)
                advance(step, metrics)
                steps += 1
            folder.write("report.json", parts.report(parts))
        if recipe.run.save:
            save_model(model, policy.tokenizer, folder.model_path)
    finally:
        folder.close()
    return Trained(folder, steps)


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM asks the loop to end after the step at hand; the second ends at once."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
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
