"""Running a recipe from beginning to end: folder, progress, interruption, the saved model."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
from tether.runs.folder import RunFolder

SHOWN = ("score", "loss", "accuracy", "kl_ref_k3", "kl_old", "entropy", "clip_fraction", "explained_variance")


def run_recipe(recipe: Recipe, *, json_output: bool) -> int:
    """Train as the recipe says; 0 when every step was taken. Raises `Stopped` when interrupted, after saving."""
    console = Console(stderr=True)
    policy = load_policy(recipe)
    for notice in policy.notices:
        console.print(f"[dim]{notice}[/dim]")
    folder = RunFolder(recipe)
    try:
        with interruptions() as stop, progress_bar(recipe, json_output, console) as advance:
            done = 0
            if isinstance(recipe, RLRecipe):
                rl = build_rl(recipe, policy)
                trained = rl.roles.actor.policy
                for result in train_rl(rl, stop=stop):
                    folder.record(result.step, result.metrics, result.experience)
                    advance(result.step, result.metrics)
                    if recipe.evaluation.keep_best and folder.is_best(result.metrics):
                        save_model(trained, policy.tokenizer, folder.best_path)
                    done += 1
            else:
                parts = build_supervised(recipe, policy)
                model = parts.learner.model
                assert isinstance(model, ScalarModel | ActorCritic)
                trained = model if isinstance(model, ScalarModel) else model.policy
                for step, metrics in train_supervised(parts, stop=stop):
                    folder.record(step, metrics)
                    advance(step, metrics)
                    done += 1
        place = save_model(trained, policy.tokenizer, folder.model_path) if recipe.run.save else folder.path
    finally:
        folder.close()
    if done < recipe.run.steps:
        raise Stopped(f"stopped after {done} of {recipe.run.steps} steps; what was learned is in {place}")
    console.print(f"Done: {done} steps. Metrics and model are in {folder.path}")
    return 0


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


@contextmanager
def progress_bar(
    recipe: Recipe, json_output: bool, console: Console
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A bar with the few numbers that matter; or, for scripts, one JSON line a step on standard output."""
    if json_output:
        yield lambda step, metrics: print(json.dumps({"step": step, **metrics}), flush=True)
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
