"""Trackers, which also receive the metrics: TensorBoard, Weights & Biases, trackio, or any `Tracker` object.

Trackers run in a thread of their own, so that a slow one costs no step. A tracker that raises is disabled after one
notice, and one that hangs is abandoned at the end of the run.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.protocols import Tracker
from tether.user_code import is_its_own

MAX_WAITING = 1000  # steps
GIVEN = ": it is given the run, which has run.name, run.folder (a path) and run.config"
OPENING_SECONDS = 30.0  # time limit for a service to answer when a run starts


@dataclass(frozen=True)
class TrackedRun:
    """Facts about the run for a tracker."""

    name: str
    folder: Path
    config: Mapping[str, Any]


@dataclass(frozen=True)
class NamedTracker:
    """A tracker of the user's that `store.trackers` names: its class, or a function that makes it from the run."""

    name: str  # file.py:name
    make: Callable[[TrackedRun], Tracker]

    @property
    def field(self) -> str:
        """For errors."""
        return f"store.trackers: {self.name}"

    def check(self) -> None:
        """Raise, before a model is loaded, where it cannot make a tracker."""
        if not callable(self.make):
            raise ConfigError(f"{self.field} is a {type(self.make).__name__}: name the tracker's class")
        try:
            signature(self.make).bind(None)
        except TypeError:
            raise ConfigError(
                f"{self.field} does not take the run: give it one parameter, as in def __init__(self, run)"
            ) from None
        except ValueError:  # a callable whose parameters Python cannot tell
            pass
        if isinstance(self.make, type):
            check_tracker(self.make, self.field)

    def __call__(self, run: TrackedRun) -> Tracker:
        """The tracker of a run."""
        tracker = self.make(run)
        check_tracker(tracker, f"{self.field} gave a {type(tracker).__name__}, which")
        return tracker


def check_tracker(tracker: object, label: str) -> None:
    """Raise where a method of `tether.protocols.Tracker` is missing."""
    missing = [name for name in ("record", "close") if not callable(getattr(tracker, name, None))]
    if missing:
        raise ConfigError(f"{label} has no method {missing[0]} (tether.protocols.Tracker)")


def open_trackers(
    names: Sequence[str],
    place: TrackedRun,
    notify: Callable[[str], None],
    trackers: Sequence[Tracker | NamedTracker] = (),
) -> Trackers:
    """Open the trackers with these names, and add the `trackers` that a program passed.

    A name of the user's code is opened by its `NamedTracker` among `trackers`. An unknown name is an error; a tracker
    that cannot be opened is left out with a notice.
    """
    opened: dict[str, Tracker] = {}
    known = TRACKERS | {each.name: each for each in trackers if isinstance(each, NamedTracker)}
    for name in names:
        if name not in known:
            raise ConfigError(f"store.trackers: {name} is not known; choose from {', '.join(TRACKERS)}")
        try:
            opened[name] = known[name](place)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, ImportError) and name in TRACKERS:
                notify(f"{name} is not installed, and gets no metrics: pip install 'tether-rl[{name}]' ({error})")
            else:
                repair = "" if name in TRACKERS else GIVEN
                notify(f"{name} could not be opened, and gets no metrics ({type(error).__name__}: {error}){repair}")
    objects = [each for each in trackers if not isinstance(each, NamedTracker)]
    passed = {f"tracker {place + 1} ({type(each).__name__})": each for place, each in enumerate(objects)}
    return Trackers(opened | passed, notify)


class Trackers:
    """Several trackers behind one interface that never raises and never blocks."""

    def __init__(self, trackers: Mapping[str, Tracker], notify: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._notify = notify
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MAX_WAITING)
        self._told_full = False
        self._thread = threading.Thread(target=self._work, name="metric-trackers", daemon=True)
        self._thread.start()

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Queue one step for every tracker."""
        if not self._trackers:
            return
        try:
            self._waiting.put_nowait((step, dict(metrics)))
        except queue.Full:
            if not self._told_full:
                self._told_full = True
                self._tell("The metric trackers are too slow: they miss some steps. The run store has all of them.")

    def close(self, timeout: float = 30.0) -> None:
        """Wait until the trackers finish, for at most `timeout` seconds."""
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._tell("A metric tracker did not finish in time and was abandoned.")

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            for name, tracker in list(self._trackers.items()):
                self._guarded(name, lambda tracker=tracker, item=item: tracker.record(*item))
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, tracker.close)

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            if not is_its_own(error):
                raise
            self._trackers.pop(name, None)
            self._tell(f"{name} failed and gets no more metrics ({type(error).__name__}: {error}). Training continues.")

    def _tell(self, text: str) -> None:
        with suppress(Exception):
            self._notify(text)


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, place: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        self._writer = SummaryWriter(str(place.folder / "tensorboard"))

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run; WANDB_MODE=offline keeps it on this machine, WANDB_PROJECT names the project."""

    def __init__(self, place: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        project, mode = os.environ.get("WANDB_PROJECT", "tether"), os.environ.get("WANDB_MODE", "online")
        if mode not in ("offline", "disabled", "dryrun") and not _has_key(wandb):
            # wandb would ask for a key on the terminal, under the progress bar, and block.
            raise ConnectionError("no API key is known: run `wandb login` first, or set WANDB_MODE=offline")
        settings = wandb.Settings(init_timeout=OPENING_SECONDS)
        with redirect_stdout(sys.stderr):  # standard output is reserved for results and JSON
            self._run = wandb.init(
                project=project, name=place.name, dir=str(place.folder), config=dict(place.config), settings=settings
            )

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Log one row per step."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """Finish the run in the service."""
        self._run.finish()


def _has_key(wandb: Any) -> bool:
    """Whether credentials exist, without prompting for them."""
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # an older version without `prompt`
        return bool(wandb.api.api_key)


class Trackio:
    """A trackio run, which keeps its own database on this machine."""

    def __init__(self, place: TrackedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        with redirect_stdout(sys.stderr):  # standard output is reserved for results and JSON
            self._run = trackio.init(project="tether", name=place.name, config=dict(place.config))

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Log one row per step; trackio accepts only finite numbers."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        """Finish the run in trackio."""
        with redirect_stdout(sys.stderr):
            self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
