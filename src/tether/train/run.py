"""Running a recipe from beginning to end: folder, progress, interruption, the saved model."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from shlex import quote
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tether.config.recipes import Recipe
from tether.errors import ConfigError, Stopped, StorageError, silence
from tether.learner.ranks import current_ranks
from tether.models.load import LoadedModel, resolve_device
from tether.models.precision import precision_notice, with_precision
from tether.plan.plan import free_memory
from tether.plan.table import plan_text
from tether.plan.workload import Shape
from tether.progress import PlainProgress, numbers_of, say
from tether.reports.safe_text import clean
from tether.rewards import consent
from tether.rewards.pool import close_workers
from tether.store.checkpoints import Checkpoint
from tether.store.database.open import workspace_at
from tether.store.folder import FINISHED, RunFolder, json_line, run_path
from tether.store.history import follow_folder
from tether.train.attempt import training_attempt
from tether.train.build import load_policy
from tether.train.engines import close_pools
from tether.train.hooks import RunContext
from tether.train.inputs import read_before_loading
from tether.train.objects import Objects, check_objects, with_named_code
from tether.train.provenance import code_digests, model_digests
from tether.train.run_plan import RunPlan, check_room, check_weights
from tether.train.training import Training, build_training, seed_everything
from tether.types import Rollout
from tether.user_code import end_process, exits_told

Advance = Callable[[int, dict[str, float]], None]
Begin = Callable[[int, int], None]


@dataclass(frozen=True)
class Forked:
    """The checkpoint that a fork starts from, and the run that wrote it."""

    checkpoint: Checkpoint
    run: str  # its name in the workspace
    folder: str

    def record(self) -> dict[str, Any]:
        """The record of it in the folder of the new run."""
        return {"run": self.run, "folder": self.folder, "step": self.checkpoint.step}


@dataclass(frozen=True)
class Trained:
    """The result of training."""

    folder: RunFolder
    steps: int
    total: int  # steps that the recipe comes to
    finished: bool  # all were taken, or evaluation.patience ended it
    plan: RunPlan | None = None  # where a step was taken
    ended: str = ""  # why there are fewer steps than in all, where it is finished


class Watch:
    """Shows the progress of a run; this one shows nothing."""

    def check(self) -> None:
        """Raise, after the run, where progress could not be written."""

    def begin(self, total: int, done: int) -> None:
        """Start at `done` of `total` steps."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step."""

    def heartbeat(self, words: str) -> None:
        """Show that a phase of a step starts."""


def run_recipe(recipe: Recipe, *, json_output: bool, resume: bool = False, forked: Forked | None = None) -> int:
    """Train as the recipe says; 0 when every step was taken. Raises `Stopped` when interrupted, after a checkpoint."""
    console = Console(stderr=True)
    with (
        interruptions() as stop,
        progress_bar(recipe.method, f"loading {recipe.model.path}", json_output, console) as watch,
    ):
        trained = train_watched(recipe, watch, console, stop=stop, resume=resume, forked=forked)
    place = trained.folder.path
    if trained.plan is not None and not json_output:
        with suppress(OSError, SystemExit):  # as in `print_notice`
            for part in plan_text(trained.plan.plan, measured=trained.plan.measured):
                Console(stderr=True, width=None if console.is_terminal else 160).print(part)
    if not trained.finished:
        raise Stopped(
            f"stopped after {trained.steps} of {trained.total} steps; go on with: tether resume {quote(str(place))}"
        )
    model = f" The model is in {trained.folder.model_path}." if recipe.run.save else ""
    best = f" The best is in {trained.folder.best_path}." if trained.folder.best_path.is_dir() else ""
    early = f" of {trained.total}: {trained.ended}" if trained.ended else ""
    summary = f"Done: {trained.steps} steps{early}.{model}{best} Show it: tether show {quote(str(place))}"
    print_notice(console, summary)
    watch.check()
    return 0


def train_watched(
    recipe: Recipe,
    watch: Watch,
    console: Console,
    *,
    stop: Callable[[], bool],
    resume: bool = False,
    forked: Forked | None = None,
    objects: Objects | None = None,
) -> Trained:
    """Train, with progress on `watch` and notices on the console."""
    return train_recipe(
        recipe,
        stop=stop,
        advance=watch.advance,
        begin=watch.begin,
        heartbeat=watch.heartbeat,
        notify=lambda text: print_notice(console, clean(text), style="dim"),
        resume=resume,
        forked=forked,
        objects=objects,
    )


def print_notice(console: Console, text: str, style: str | None = None) -> None:
    """Print a sentence on one line; a closed pipe or a full disk does not end the run."""
    if console.quiet:
        return
    if not console.is_terminal:
        say(text)
        return
    with suppress(OSError, SystemExit):  # rich leaves by SystemExit where a pipe is closed
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def train_recipe(
    recipe: Recipe,
    *,
    stop: Callable[[], bool],
    advance: Advance,
    notify: Callable[[str], None],
    on_sample: Callable[[int, Rollout], None] = lambda step, sample: None,  # noqa: ARG005
    begin: Begin = lambda total, done: None,  # noqa: ARG005
    heartbeat: Callable[[str], None] = lambda words: None,  # noqa: ARG005
    resume: bool = False,
    forked: Forked | None = None,
    objects: Objects | None = None,
) -> Trained:
    """Train, recording each step, and save the model at the end; with `resume`, from the newest whole checkpoint on.

    `on_sample` gets one rollout of each iteration that samples; `begin` gets the number of steps and of steps taken.
    A run that is stopped before its end leaves a checkpoint. `forked` starts from the checkpoint of another run.
    `objects` replace what the recipe names.
    """
    try:
        with exits_told():
            return _train(
                recipe, stop, advance, notify, on_sample, begin, heartbeat, resume, forked, objects or Objects()
            )
    finally:
        close_workers()  # of reward functions that run in processes of their own
        close_pools()  # of rollout workers


def _train(
    recipe: Recipe,
    stop: Callable[[], bool],
    advance: Advance,
    notify: Callable[[str], None],
    on_sample: Callable[[int, Rollout], None],
    begin: Begin,
    heartbeat: Callable[[str], None],
    resume: bool,
    forked: Forked | None,
    objects: Objects,
) -> Trained:
    recipe = named(recipe)
    if resume and (folder := RunFolder(run_path(recipe))).is_finished:
        for notice in follow_folder(workspace_at(recipe.run.directory, recipe.store.url), folder.path):
            notify(notice)
        return Trained(folder, folder.steps_taken, recipe.run.steps, finished=True)
    if resume and RunFolder(run_path(recipe)).finish_is_damaged:
        notify(f"{run_path(recipe) / FINISHED} is damaged: the work after the last step is done again.")
    ready = _prepare(recipe, notify, resume, forked, objects)
    recipe, training, ranks = ready.recipe, ready.training, current_ranks()
    # The folder appears only after everything in the recipe has been checked.
    origin = forked.record() if forked is not None else None
    folder = (
        RunFolder(run_path(recipe)) if resume else RunFolder.begin(recipe, origin, consent.current().root, ranks.launch)
    )
    run = RunContext(recipe, folder, training, ready.policy, notify, resumes=resume)
    with training_attempt(run, ready.planned, ready.loaded, ready.objects) as attempt:
        start = 0
        if resume:
            start = attempt.resume()
        elif forked is not None:
            start = attempt.fork(forked.checkpoint, ready.unusable)
        if ranks.fault:
            attempt.note_restart(ranks.fault, ranks.count)
        ranks.begin(training, start)
        begin(training.total, start)

        def next_phase(words: str) -> None:
            attempt.heartbeat(words)
            heartbeat(words)

        for outcome in training.steps(start, ranks.asking(stop), next_phase) if not run.ended_early else ():
            attempt.after_step(outcome)
            advance(outcome.step, outcome.metrics)
            if outcome.rollouts:
                on_sample(outcome.step, outcome.rollouts[0])
            if run.ended_early:
                break
        if run.is_over:
            attempt.finish()
        else:
            attempt.stop()
        ended = run.ended_early if run.done < training.total else ""
        shown = ready.planned if ready.planned.measured.iterations else None
        return Trained(folder, run.done, training.total, run.is_over, shown, ended)


@dataclass(frozen=True)
class _Ready:
    """All that a run needs before it has a folder. The recipe's precision and number of steps are settled."""

    recipe: Recipe
    policy: LoadedModel
    training: Training
    planned: RunPlan
    loaded: dict[str, Any]  # digests of what was loaded
    objects: Objects
    unusable: Sequence[str]  # what a fork cannot use of its checkpoint


def _prepare(
    recipe: Recipe, notify: Callable[[str], None], resume: bool, forked: Forked | None, objects: Objects
) -> _Ready:
    """Check and load everything that the recipe names."""
    if forked is None:
        check_objects(recipe, objects, run_path(recipe))
    else:
        check_objects(recipe, objects, forked.folder, "fork")
    seed_everything(recipe.run.seed)
    asked, recipe = recipe, with_precision(recipe, resolve_device(recipe.model.device))
    objects = with_named_code(recipe, objects)
    own_loader = objects.own_loader()
    inputs = read_before_loading(recipe, objects.task, own_loader=own_loader is not None)
    if own_loader is None:
        check_weights(recipe)
    policy = load_policy(recipe, verify=not resume, loader=own_loader)
    loaded = model_digests(policy) | {"code": code_digests(recipe)}
    shape = Shape.of(policy.model)
    training = current_ranks().join(build_training(recipe, policy, inputs, objects), recipe)
    loaded |= training.digests
    recipe = lasting(recipe, training.total)
    if forked is not None and forked.checkpoint.step >= training.total:
        raise ConfigError(
            f"the run has {training.total} steps, and step {forked.checkpoint.step} is not before the last: raise "
            "run.steps or run.epochs"
        )
    first = inputs.notices if inputs is not None else ()
    for notice in dict.fromkeys((*first, precision_notice(asked, recipe), *policy.notices, *training.notices)):
        if notice is not None:
            notify(notice)
    workspace_at(recipe.run.directory, recipe.store.url).name_of(run_path(recipe))
    unusable = training.restore(forked.checkpoint) if forked is not None else ()
    planned = RunPlan.of(recipe, shape, training, policy)
    check_room(recipe, planned.plan, training, free_memory(policy.model.device), notify)
    return _Ready(recipe, policy, training, planned, loaded, objects, unusable)


def lasting(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with the number of steps of its epochs."""
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"steps": steps})})


def named(recipe: Recipe) -> Recipe:
    """The recipe with a run name, by default its method and the time."""
    if recipe.run.name is not None:
        return recipe
    stamp = f"{recipe.method}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        name = stamp if number == 1 else f"{stamp}-{number}"  # a small run takes less than a second
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})
        if not run_path(recipe).exists():
            break
    return recipe


def end_at_once() -> NoReturn:
    """End the process. Half-written files have no final name yet, so resuming finds the last checkpoint."""
    os.write(2, b"\x1b[?25h" if os.isatty(2) else b"")  # a progress bar hides the cursor
    os.write(2, b"\ntether: stopped at once; resuming goes on from the last checkpoint\n")
    end_process(Stopped.exit_code)


@contextmanager
def interruptions(at_once: Callable[[], NoReturn] = end_at_once) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM ends the loop after the current step; the second calls `at_once`.

    Python lets only the main thread handle signals; in another thread nothing is asked.
    """
    asked = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            at_once()
        os.write(2, b"\ntether: stopping after the step at hand; once more stops at once\n")
        asked = True

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class JsonLines(Watch):
    """One JSON line a step on standard output; a closed pipe or a full disk does not end the run."""

    def __init__(self) -> None:
        self.lost: OSError | None = None  # why the first line that is missing could not be written

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step."""
        try:
            print(json_line(step, metrics), flush=True)
        except BrokenPipeError:
            silence(sys.stdout)
        except OSError as error:
            self.lost = self.lost or error

    def check(self) -> None:
        """Raise StorageError where lines are missing; the run itself is complete."""
        if self.lost is not None:
            silence(sys.stdout)
            raise StorageError(
                f"not every step's line of JSON could be written to standard output ({self.lost.strerror}): the run "
                "goes on without, and its store holds all metrics"
            )


class PlainLines(Watch):
    """A line every few seconds on standard error, where it is no terminal."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.lines: PlainProgress | None = None

    def begin(self, total: int, done: int) -> None:
        """Start at `done` of `total` steps."""
        self.lines = PlainProgress(self.title, total, done)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step."""
        if self.lines is not None:
            self.lines.advance(step + 1, numbers_of(metrics))

    def heartbeat(self, words: str) -> None:
        """Show that a phase of a step starts."""
        if self.lines is not None:
            self.lines.doing(words)


class Bar(Watch):
    """A bar with the few numbers that matter, for a terminal."""

    def __init__(self, title: str, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=None, numbers="")

    def begin(self, total: int, done: int) -> None:
        """Start at `done` of `total` steps."""
        self.progress.update(self.task, total=total, completed=done)

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Show a step."""
        self.progress.update(self.task, completed=step + 1, numbers=numbers_of(metrics))


@contextmanager
def progress_bar(title: str, begins: str, json_output: bool, console: Console) -> Iterator[Watch]:
    """JSON for scripts, a bar on a terminal or in a notebook, plain lines in a file."""
    if json_output:
        yield JsonLines()
        return
    if console.quiet:
        yield Watch()
        return
    in_notebook = console.is_jupyter and find_spec("ipywidgets") is not None  # without it rich shows no bar there
    if not in_notebook and (not console.is_terminal or console.is_dumb_terminal):
        say(f"{title}: {begins}")
        yield PlainLines(title)
        return
    columns = (
        TextColumn(title, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield Bar(title, progress)
