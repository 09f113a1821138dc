"""`tether export --merge`, `--gguf` and `--push`: a run's model as a plain folder, as one file, and on the hub."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tether.errors import ConfigError, StorageError, UsageError
from tether.models.gguf_export import architecture_of, write_model
from tether.models.load import is_reward_model
from tether.models.save import Merged, check_merged, load_merged, write_merged
from tether.reports.export_data import CardFacts, best_step, model_folder, write_card
from tether.reports.run_table import open_for
from tether.store.read import RunSummary, find_run, read_run
from tether.store.recorded import RecordedRun
from tether.train.hub_push import check_push, push_folder
from tether.train.resume import checkpoint_model

MERGED = "merged"  # in the run's folder, where no other is named
STORED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportSource:
    """A run's model as it was saved, and the step whose metrics are its own (None: the last)."""

    folder: Path
    step: int | None


def export_model(options: argparse.Namespace) -> dict[str, Any]:
    """Write what the options ask for; returns what was written and how it was checked."""
    token = check_push(options.push) if options.push else ""
    with open_for(options) as opened:
        summary, run = find_run(opened, options.run), read_run(opened, options.run)
        target, gguf = _targets(options, summary)
        console = Console(stderr=True, quiet=options.json)
        with _saved(options, summary, run) as source, tempfile.TemporaryDirectory() as scratch:
            if gguf is not None and is_reward_model(source.folder):
                raise UsageError("--gguf: a reward model's score has no place in GGUF: export it with --merge")
            console.print("[dim]loading and merging[/dim]")
            merged = load_merged(source.folder)
            if gguf is not None:
                architecture_of(merged.model.model.config)
            written: dict[str, Any] = {}
            try:
                if gguf is not None:  # before the weights are rounded to what the folder stores
                    console.print(f"[dim]writing {gguf.name}[/dim]")
                    written |= _write_gguf(merged, gguf, options.type, summary)
                folder = target or Path(scratch) / MERGED
                if target is not None or options.push:
                    console.print("[dim]writing the folder, and loading it back[/dim]")
                    written |= _write_folder(merged, folder, options, summary, run, source)
            except OSError as error:
                where = error.filename or target or gguf
                raise StorageError(f"cannot export to {where}: {error.strerror or error}") from error
            if target is None:
                written.pop("model", None)
            if options.push:
                console.print(f"[dim]pushing to {options.push}[/dim]")
                files = () if gguf is None else (gguf,)
                message = f"{summary.method}, {summary.steps_done} steps, by Tether"
                written["pushed"] = push_folder(
                    folder, options.push, token, private=options.private, message=message, files=files
                )
    return written


def print_written(written: dict[str, Any], json_output: bool) -> int:
    """Say what was written, and how far the copy is from the run's model."""
    if json_output:
        print(json.dumps(written))
        return 0
    for name in ("model", "gguf", "pushed", "rollouts", "metrics"):
        if name in written:
            print(f"{name}: {written[name]}")
    if check := written.get("check"):
        print(
            f"loaded back by transformers: outputs differ by {check['largest']:.2g} at most "
            f"(limit {check['limit']:.2g})",
            file=sys.stderr,
        )
    if check := written.get("gguf_check"):
        print(
            f"read back: {check['tensors']} tensors in {check['type']}, weights differ by {check['largest']:.2g} at "
            "most",
            file=sys.stderr,
        )
    return 0


def _targets(options: argparse.Namespace, summary: RunSummary) -> tuple[Path | None, Path | None]:
    """The folder and the GGUF file to write; either may be None."""
    if options.to and options.model:
        raise UsageError("--to and --model both name the folder of the model here: give one of them")
    if options.best and options.checkpoint is not None:
        raise UsageError("--best and --checkpoint name two models: give one of them")
    named = options.to or options.model
    target = Path(named).expanduser() if named else summary.folder / MERGED if options.merge else None
    if target is not None and target.exists():
        raise UsageError(f"{target} exists already: name a new folder with --to")
    gguf = Path(options.gguf).expanduser() if options.gguf else None
    if gguf is not None and gguf.suffix.lower() != ".gguf":
        raise UsageError(f"--gguf: {gguf} must end in .gguf")
    if gguf is not None and gguf.exists():
        raise UsageError(f"--gguf: {gguf} exists already: name a new file")
    return target, gguf


@contextmanager
def _saved(options: argparse.Namespace, summary: RunSummary, run: RecordedRun) -> Iterator[ExportSource]:
    """The folder of the model that is meant: the last, the best, or a checkpoint's, which is written out for it."""
    if options.checkpoint is None:
        yield ExportSource(model_folder(summary, best=options.best), best_step(run) if options.best else None)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        step = checkpoint_model(summary.folder, options.checkpoint, folder)
        yield ExportSource(folder, step - 1)


def _write_folder(
    merged: Merged,
    folder: Path,
    options: argparse.Namespace,
    summary: RunSummary,
    run: RecordedRun,
    source: ExportSource,
) -> dict[str, Any]:
    dtype = options.dtype or str(summary.config.get("model", {}).get("dtype", "float32"))
    if dtype not in STORED:
        raise ConfigError(f"the run's model.dtype is {dtype}: choose what to store with --dtype {'|'.join(STORED)}")
    write_merged(merged, folder, dtype)
    try:
        checked = check_merged(merged, folder, dtype)
        kind = "model" if merged.scalar is None else "reward"
        facts = CardFacts(kind, dtype, source.step, options.license, options.push)
        write_card(folder, summary, run, facts)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return {"model": str(folder), "check": asdict(checked)}


def _write_gguf(merged: Merged, path: Path, type_: str, summary: RunSummary) -> dict[str, Any]:
    found = write_model(merged.model, path, type_, summary.name)
    check = {"type": type_, "tensors": found.tensors, "bytes": found.size, "largest": found.largest}
    return {"gguf": str(path), "gguf_check": check}
