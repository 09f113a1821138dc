"""What a run leaves when it fails: the batch of each skipped update, and the stacks of a process that hangs."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.errors import Stalled, StorageError
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
from tether.user_code import end_process

FOLDER = "faults"
MAX_DUMPS = 16  # so that a run that fails at every step does not fill the disk
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
        """Write the fault, unless the run has `MAX_DUMPS`."""
        try:
            kept = len(list(self.folder.glob("step-*")))
            if kept >= MAX_DUMPS:
                return
            place = write_fault(self.folder, self.step, fault)
            more = "" if kept + 1 < MAX_DUMPS else "; no more are kept in this run"
            self.notify(f"step {self.step}: an update was skipped ({fault.reason}); its batch is in {place}{more}")
        except Exception as error:  # an error of the dump must not end the run
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
    """The file name of a batch."""
    return f"batch-{index}.safetensors"


def stage_of(batch: Sequences) -> str:
    """The stage that a batch is read back as: its own type, or its nearest base class in `STAGES`."""
    return next(kind.__name__ for kind in type(batch).__mro__ if kind.__name__ in STAGES)


@dataclass(frozen=True)
class RecordedFault:
    """A fault that was read back, and its step."""

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


GRACE = 5.0  # seconds that writing the traces may take: a disk that hangs is one more way to stall


class Watchdog(StepHook):
    """Ends the process when there is no heartbeat for `seconds`; with 0 seconds it does nothing.

    On expiry it writes the last phase and the stacks of all threads to `stall-<time>.txt` in the run's folder and to
    standard error. Then the process exits with the code of `Stalled`, at once and without cleaning up, because the main
    thread is stuck.

    Code that never releases the GIL stops the watching thread too. For that case the C timer of `faulthandler` prints
    the stacks to standard error and exits with code 1, two graces later.
    """

    def __init__(self, seconds: float, folder: Path | None = None, *, grace: float = GRACE) -> None:
        self.seconds = seconds
        self.folder = None if folder is None else folder.absolute()
        self.grace = grace
        self._phase = "start"
        self._last_beat = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tether-watchdog", daemon=True)

    def begin(self, run: Any = None) -> None:  # noqa: ARG002
        """Start to watch."""
        if self.seconds > 0:
            self.heartbeat(self._phase)
            self._thread.start()

    def __enter__(self) -> Watchdog:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Stop watching."""
        self._over.set()
        if self.seconds > 0:
            faulthandler.cancel_dump_traceback_later()
            self._thread.join()

    def heartbeat(self, phase: str) -> None:
        """Note progress; `phase` is what starts, such as `rollout, step 12`."""
        self._phase = phase
        self._last_beat = time.monotonic()
        if self.seconds > 0:
            with suppress(OSError, ValueError, RuntimeError):  # standard error may be closed, or not a file at all
                faulthandler.dump_traceback_later(self.seconds + 2 * self.grace, exit=True)

    def _watch(self) -> None:
        while True:
            left = self._last_beat + self.seconds - time.monotonic()
            if left <= 0.0:
                break
            if self._over.wait(left):
                return
        timer = threading.Timer(self.grace, end_process, (Stalled.exit_code,))
        timer.daemon = True
        timer.start()
        with suppress(Exception):  # nothing may keep a process alive that is known to be stuck
            self._dump_stacks()
        end_process(Stalled.exit_code)

    def _dump_stacks(self) -> None:
        words = (
            f"no progress for {self.seconds:g} seconds (run.hang_timeout); last: {self._phase}. The stacks of all "
            f"threads follow; the run ends with exit code {Stalled.exit_code}.\n"
        )
        with suppress(OSError):
            if self.folder is not None:
                path = self.folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
                with path.open("w", encoding="utf-8") as file:
                    _dump(file, words)
                    os.fsync(file.fileno())
        _dump(sys.stderr, f"tether: {words}")


def _dump(file: TextIO, words: str) -> None:
    file.write(words)
    file.flush()
    faulthandler.dump_traceback(file=file, all_threads=True)
