"""What a stage that samples answers works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from tether.errors import Stopped
from tether.files import read_plain_json, sealed, unsealed
from tether.pipeline.order import PipelineStep
from tether.pipeline.stage_progress import Advance, Show
from tether.store.folder import write_whole

DONE = "done.json"  # in a stage's folder: its figures, written last


@dataclass(frozen=True)
class StageContext:
    """A step of a pipeline, its folder, and how it tells of its progress."""

    step: PipelineStep
    folder: Path
    root: Path
    seed: int  # the pipeline's
    title: str
    show: Show
    stop: Callable[[], bool]
    notify: Callable[[str], None]

    @property
    def round_seed(self) -> int:
        """The seed of this round."""
        return self.seed + self.step.round

    def progress(self, total: int, what: str = "") -> Advance:
        """Start the progress of a part of the stage."""
        return self.show(f"{self.title}{f', {what}' if what else ''}", total)

    def stopped(self, why: str = "stopped") -> Stopped:
        """The error that ends the pipeline here and says how to resume it."""
        return Stopped(f"{why} in stage {self.step.folder}; resume with: {resume_words(self.root)}")

    def finish(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Note that the stage is complete, with its figures."""
        write_whole(self.folder / DONE, sealed(figures))
        return figures

    def figures(self) -> dict[str, Any] | None:
        """The figures of the stage if it is complete."""
        try:
            found = unsealed(read_plain_json(self.folder / DONE))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return dict(found)


def resume_words(root: Path) -> str:
    """The command that resumes a pipeline."""
    return f"tether resume {quote(str(root))}"
