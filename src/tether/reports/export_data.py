"""Taking a run's model, rollouts and metrics out of the workspace. A file is whole, or not there."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tether.errors import ConfigError, StorageError, UsageError
from tether.reports.model_card import CardFacts, write_card
from tether.reports.run_options import open_for
from tether.reports.show_run import rollout_as_json
from tether.seal import check_saved, recover
from tether.store.database.schema import without_infinities
from tether.store.database.spool import is_being_recorded
from tether.store.read import RunSummary, find_run, read_run
from tether.store.recorded import RecordedRun


def export(options: argparse.Namespace) -> int:
    """Write what the options ask for, and say what was written."""
    with open_for(options) as opened:
        summary, run = find_run(opened, options.run), read_run(opened, options.run)
        wanted = _targets(options, summary, run)
        written: dict[str, str] = {}
        try:
            if model := wanted.get("model"):
                written["model"] = str(copy_model(summary, model, best=options.best))
                write_card(model, summary, run, _facts(summary, run, model, options))
            if rollouts := wanted.get("rollouts"):
                written["rollouts"] = str(write_rollouts(run, rollouts, options.step or list(run.rollout_steps)))
            if metrics := wanted.get("metrics"):
                written["metrics"] = str(write_metrics(run, metrics))
        except OSError as error:
            raise StorageError(f"cannot export to {error.filename or options.to}: {error.strerror or error}") from error
    if options.json:
        print(json.dumps(written))
    else:
        for what, where in written.items():
            print(f"{what}: {where}")
    return 0


def _targets(options: argparse.Namespace, summary: RunSummary, run: RecordedRun) -> dict[str, Path]:
    named = {name: getattr(options, name) for name in ("model", "rollouts", "metrics")}
    targets = {name: Path(value).expanduser() for name, value in named.items() if value}
    if options.to:
        folder = Path(options.to).expanduser()
        has_model = (summary.folder / ("best" if options.best else "model")).is_dir()
        everything = {"metrics": "metrics.csv"} | ({"model": "model"} if has_model else {})
        everything |= {"rollouts": "rollouts.jsonl"} if run.rollout_steps else {}
        targets = {name: folder / value for name, value in everything.items()} | targets
    if not targets:
        raise UsageError("say what to export: --model DIR, --rollouts FILE, --metrics FILE, or --to DIR for all three")
    for step in options.step or ():
        if step not in run.rollout_steps:
            raise UsageError(f"--step: the answers of step {step} were not kept")
    for name in ("rollouts", "metrics"):
        if name in targets and os.path.lexists(targets[name]) and not options.force:
            raise UsageError(
                f"--{name}: {targets[name]} exists already; name a new file, or add --force to overwrite it"
            )
    return targets


def _facts(summary: RunSummary, run: RecordedRun, folder: Path, options: argparse.Namespace) -> CardFacts:
    kind = "adapters" if (folder / "adapter_config.json").is_file() else "model"
    if summary.method == "reward":
        kind = "reward" if kind == "model" else "reward-adapters"
    return CardFacts(kind, step=best_step(run) if options.best else None, licence=options.license)


def best_step(run: RecordedRun) -> int | None:
    """The step with the best held-out score, the first of them; None where none was measured."""
    scored = [(row["held_out/score"], -row["step"]) for row in run.metrics if "held_out/score" in row]
    return int(-max(scored)[1]) if scored else None


def model_folder(summary: RunSummary, *, best: bool = False) -> Path:
    """Where a run's model is, the last or the best."""
    source = summary.folder / ("best" if best else "model")
    if not is_being_recorded(summary.folder):
        recover(source)
    if not source.is_dir():
        raise ConfigError(
            f"{summary.name} has no model in {source}: it is not finished, or had run.save set to false; "
            "--checkpoint -1 takes it from the newest checkpoint"
            if not best
            else f"{summary.name} has no {source}: it had no held-out evaluation, or never got better than its start"
        )
    check_saved(source)
    for path in (source, *source.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):  # a copy of it would hold a file from elsewhere
            raise ConfigError(
                f"{path} is a link, or no plain file, and a saved model holds plain files alone: remove it, or put the "
                "file that it stands for in its place"
            )
    return source


def copy_model(summary: RunSummary, target: Path, *, best: bool = False) -> Path:
    """Copy a run's model, or its adapters where it trained those, to a folder that does not exist yet."""
    source = model_folder(summary, best=best)
    if target.exists():
        raise UsageError(f"--model: {target} exists already; name a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copytree(source, beside)
        beside.rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def write_metrics(run: RecordedRun, target: Path) -> Path:
    """One row a step; in CSV, what was not measured or was not finite is empty."""
    kind = _kind(target, "--metrics", ("csv", "jsonl"))
    with _beside(target) as path, path.open("w", encoding="utf-8", newline="") as file:
        if kind == "jsonl":
            file.writelines(_lines(dict(row) for row in run.metrics))
        else:
            write_table(file, run.metrics)
    return target


def write_table(file: TextIO, rows: Sequence[Mapping[str, float]]) -> None:
    """Metrics as CSV, one row a step; what was not measured or was not finite is empty."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    table = csv.writer(file)
    table.writerow(csv_cell(name) for name in names)
    for row in rows:
        table.writerow(value if (value := row.get(name)) == value else None for name in names)


def csv_cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: a text that begins like one gets an apostrophe before it.

    Numbers stay numbers, negative ones too.
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # spreadsheets read the wide ones alike


def write_rollouts(run: RecordedRun, target: Path, steps: list[int]) -> Path:
    """One row a rollout, every token column a list. One step is held in memory at a time."""
    kind = _kind(target, "--rollouts", ("parquet", "jsonl"))
    write: Callable[[Path, RecordedRun, list[int]], None] = _write_parquet if kind == "parquet" else _write_jsonl
    with _beside(target) as path:
        write(path, run, steps)
    return target


def _write_jsonl(path: Path, run: RecordedRun, steps: list[int]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for step in steps:
            file.writelines(_lines(rollout_as_json(rollout) for rollout in run.rollouts(step)))


def _write_parquet(path: Path, run: RecordedRun, steps: list[int]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(
            "--rollouts: .parquet needs the package pyarrow: pip install 'tether-rl[parquet]', or write .jsonl"
        ) from None
    schema = _parquet_schema(pa, run, steps)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for step in steps:
            rows = [_for_parquet(rollout_as_json(rollout)) for rollout in run.rollouts(step)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


def _parquet_schema(pa: Any, run: RecordedRun, steps: list[int]) -> Any:
    """Types of the columns; numbers of tokens keep the precision that they were stored with."""
    first = run.rollouts(steps[0])[0] if steps else None
    kinds = {"step": pa.int64(), "sample": pa.int64(), "group_id": pa.int64(), "sample_id": pa.int64()}
    kinds |= {"score": pa.float64(), "temperature": pa.float64(), "final_value": pa.float64()}
    token_kinds = {"int32": pa.int32(), "float32": pa.float32(), "bool": pa.bool_()}
    fields = []
    for name in rollout_as_json(first) if first is not None else ():
        column = None if first is None else first.kl if name == "kl" else first.columns.get(name)
        if column is not None:
            fields.append(pa.field(name, pa.list_(token_kinds[str(column.dtype)])))
        elif name == "piece":
            fields.append(pa.field(name, pa.list_(pa.string())))
        else:
            fields.append(pa.field(name, kinds.get(name, pa.string())))
    return pa.schema(fields)


def _for_parquet(row: dict[str, Any]) -> dict[str, Any]:
    """Parts as JSON, and texts without halves of characters, which Parquet does not take."""
    row["parts"] = json.dumps(without_infinities(row["parts"]))
    row["piece"] = [_whole(piece) for piece in row["piece"]]
    return {name: _whole(value) if isinstance(value, str) else value for name, value in row.items()}


def _whole(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    return (json.dumps(without_infinities(row), allow_nan=False) + "\n" for row in rows)


def _kind(target: Path, option: str, known: tuple[str, ...]) -> str:
    kind = target.suffix.removeprefix(".").lower()
    if kind not in known:
        raise UsageError(f"{option}: {target} must end in .{' or .'.join(known)}")
    return kind


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes the target once it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield path
        path.replace(target)
    finally:
        path.unlink(missing_ok=True)
