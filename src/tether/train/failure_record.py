"""Keeping what made an update fail, so that a person can look at it afterwards."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.errors import StorageError
from tether.files import read_plain_json
from tether.learner.gradients import Fault, NonfiniteTensor
from tether.protocols import StepHook
from tether.train.hooks import RunContext
from tether.types import (
    EvaluatedBatch,
    Experience,
    PairBatch,
    RankedBatch,
    Sequences,
    TokenBatch,
    columns_of,
)

FOLDER = "faults"
MAX_DUMPS = 16  # a run that fails at every step would otherwise fill the disk
STAGES = {
    stage.__name__: stage for stage in (Sequences, TokenBatch, EvaluatedBatch, Experience, PairBatch, RankedBatch)
}


class FaultRecorder(StepHook):
    """Writes each skipped update to `faults/step-000123-0/` of the run's folder, up to `MAX_DUMPS` in a run.

    It is the `on_fault` of a learner. An error while writing is reported to `notify` and does not end the run.
    """

    def __init__(self, run_folder: Path, notify: Callable[[str], None] = lambda text: None) -> None:  # noqa: ARG005
        self.folder = run_folder / FOLDER
        self.notify = notify
        self.step = 0

    def begin(self, run: RunContext) -> None:
        """Receive the faults of the learner."""
        self._run = run
        run.training.learner.on_fault = self

    def heartbeat(self, phase: str) -> None:  # noqa: ARG002
        """Name dumps by the step that is being taken."""
        self.step = self._run.done

    def __call__(self, fault: Fault) -> None:
        """Write it, unless there are enough."""
        try:
            kept = len(list(self.folder.glob("step-*")))
            if kept >= MAX_DUMPS:
                return
            place = write_fault(self.folder, self.step, fault)
            more = "" if kept + 1 < MAX_DUMPS else "; no more are kept in this run"
            self.notify(f"step {self.step}: an update was skipped ({fault.reason}); its batch is in {place}{more}")
        except Exception as error:  # whatever it is, it must not end a run that the skipped update did not end
            self.notify(f"step {self.step}: an update was skipped ({fault.reason}); its batch was not kept ({error})")


def write_fault(folder: Path, step: int, fault: Fault) -> Path:
    """A folder for one fault: `fault.json`, and each batch as safetensors. It appears whole or not at all."""
    number = 0
    while (folder / f"step-{step:06d}-{number}").exists():
        number += 1
    place = folder / f"step-{step:06d}-{number}"
    unfinished = folder / f".{place.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for index, batch in enumerate(fault.batches):
        columns = {name: column for name, column in columns_of(batch).items() if isinstance(column, Tensor)}
        save_file(
            {name: column.detach().to("cpu", copy=True).contiguous() for name, column in columns.items()},
            unfinished / batch_file(index),
        )
    content = {
        "step": step,
        "reason": fault.reason,
        "findings": [asdict(finding) for finding in fault.findings],
        "norms": {name: norm if math.isfinite(norm) else str(norm) for name, norm in fault.norms.items()},
        "micro_batch_tokens": fault.micro_batch_tokens,
        "batches": [
            {"file": batch_file(index), "stage": stage_of(batch), "temperature": batch.temperature}
            for index, batch in enumerate(fault.batches)
        ],
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    (unfinished / "fault.json").write_text(text, encoding="utf-8")
    unfinished.rename(place)
    return place


def batch_file(index: int) -> str:
    """What a fault's batch is called."""
    return f"batch-{index}.safetensors"


def stage_of(batch: Sequences) -> str:
    """The stage that a batch is read back as: its own type, or the nearest above it that this file knows."""
    return next(kind.__name__ for kind in type(batch).__mro__ if kind.__name__ in STAGES)


@dataclass(frozen=True)
class RecordedFault:
    """A fault read back: the fault as the learner saw it, and the step at which it did."""

    step: int
    fault: Fault


def recorded_faults(run_folder: Path) -> list[Path]:
    """The folders of a run's faults, in order."""
    return sorted((run_folder / FOLDER).glob("step-*"))


def read_fault(place: Path) -> RecordedFault:
    """A fault as it was written: batches of the same types with the same bits."""
    try:
        content: dict[str, Any] = read_plain_json(place / "fault.json")
        batches = tuple(
            _rebuilt(entry["stage"], load_file(place / batch_file(index)), entry["temperature"])
            for index, entry in enumerate(content["batches"])
        )
        findings = tuple(
            NonfiniteTensor(**{**entry, "places": tuple(tuple(spot) for spot in entry["places"])})
            for entry in content["findings"]
        )
        norms = {name: float(norm) for name, norm in content["norms"].items()}
        fault = Fault(content["reason"], findings, batches, norms, content["micro_batch_tokens"])
        return RecordedFault(content["step"], fault)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StorageError(f"{place} is not a fault that can be read: {type(error).__name__}: {error}") from error


def _rebuilt(stage: str, columns: dict[str, torch.Tensor], temperature: float) -> Sequences:
    """The batch; a column that the stage has and the file has not was None."""
    kind = STAGES[stage]
    content: dict[str, Any] = {field.name: columns.get(field.name) for field in fields(kind)}
    content["temperature"] = temperature
    return kind(**content)
