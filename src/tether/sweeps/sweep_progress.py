"""Progress of a sweep: a bar on a terminal, plain lines elsewhere, and with --json one line a trial."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tether.errors import silence
from tether.progress import PlainProgress, say
from tether.sweeps.manifest import SweepManifest, Trial
from tether.sweeps.prepare import total_steps
from tether.sweeps.variation import in_words


class SweepProgress:
    """Steps of all trials together. Use it in a `with` statement."""

    def __init__(self, manifest: SweepManifest, *, json_output: bool) -> None:
        self._json = json_output
        self._console = Console(stderr=True)
        self._total = total_steps(manifest.base)
        self._steps: dict[str, int] = {}
        self._trials = 0
        self._bar: Progress | None = None
        self._plain: PlainProgress | None = None
        self._task: Any = None
        self._title = f"sweep {manifest.name}"
        self._shape(manifest)

    def __enter__(self) -> SweepProgress:
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._json:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=32),
                MofNCompleteColumn(),
                TextColumn("steps"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._trials * self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def resize(self, manifest: SweepManifest) -> None:
        """The sweep has more settings, or fewer that go on."""
        self._shape(manifest)
        self._show()

    def _shape(self, manifest: SweepManifest) -> None:
        many = max(len(manifest.settings), manifest.budget or 0) - len(manifest.stopped)
        self._trials = many * len(manifest.seeds)

    def advance(self, trial: Trial, steps: int) -> None:
        """A trial has taken this many steps."""
        self._steps[trial.name] = steps
        self._show()

    def ended(self, manifest: SweepManifest, trial: Trial, state: str, reason: str = "") -> None:
        """A trial has ended, or waits at its rung."""
        values = manifest.settings[trial.setting]
        if state in ("diverged", "failed"):
            self._steps[trial.name] = self._total
            self.say(f"Trial {trial.name} ({in_words(values)}) {state}: {reason}")
        if self._json:
            line = {"trial": trial.name, "state": state, "seed": trial.seed, "values": dict(values), "reason": reason}
            try:
                print(json.dumps(line), flush=True)
            except OSError:  # the reader has left, or the disk is full: the store holds everything
                silence(sys.stdout)
        self._show()

    def say(self, text: str) -> None:
        """A sentence above the bar, or on a line."""
        if self._bar is None:
            say(text)
            return
        with suppress(OSError):
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        done, total = sum(self._steps.values()), self._trials * self._total
        if self._bar is not None:
            self._bar.update(self._task, total=total, completed=done)
        elif not self._json:
            self._plain = self._plain or PlainProgress(self._title, total, done)
            self._plain.total = total
            self._plain.advance(done, "steps")
