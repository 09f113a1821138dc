"""Progress of stages on the terminal, and training one stage as an ordinary run. The demo uses both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tether.config.recipes import Recipe
from tether.progress import PlainProgress
from tether.store.folder import is_run
from tether.train.run import Trained, train_recipe
from tether.types import Rollout

Advance = Callable[[int, str], None]
Show = Callable[[str, int], Advance]
"""Starts the progress of a stage, by its title and number of steps."""


@contextmanager
def stage_progress(console: Console) -> Iterator[Show]:
    """One progress bar per stage, with a few numbers; plain lines where the output is not a terminal."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda title, total: PlainProgress(title, total).advance
        return
    columns = (
        TextColumn("{task.description:<30}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console) as progress:

        def show(title: str, total: int) -> Advance:
            task = progress.add_task(title, total=total, numbers="")
            return lambda done, numbers: progress.update(task, completed=done, numbers=numbers)

        yield show


def notify_once(console: Console) -> Callable[[str], None]:
    """Print each notice once: every stage loads the same tokenizer and would repeat its notice."""
    known: set[str] = set()

    def notify(text: str) -> None:
        if text not in known:
            known.add(text)
            console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    return notify


def train_stage(
    settings: Recipe,
    folder: Path,
    advance: Advance,
    shown: Mapping[str, str],
    *,
    stop: Callable[[], bool],
    notify: Callable[[str], None],
    on_sample: Callable[[int, Rollout], None] = lambda step, sample: None,  # noqa: ARG005
) -> Trained:
    """Train a stage as a run in `folder`, or resume it there. `shown` names the metrics beside the progress."""

    def step(index: int, metrics: dict[str, float]) -> None:
        numbers = (f"{label} {metrics[name]:.3g}" for name, label in shown.items() if name in metrics)
        advance(index + 1, "  ".join(numbers))

    trained = train_recipe(settings, stop=stop, advance=step, notify=notify, on_sample=on_sample, resume=is_run(folder))
    if trained.finished:
        advance(trained.total, "")
    return trained
