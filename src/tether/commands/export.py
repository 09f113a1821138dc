"""`tether export`: write a run's model, rollouts and metrics for other tools; merge, convert or push the model."""

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
from typing import TYPE_CHECKING, Any

from tether.commands.options import CommandParser, add_run_option
from tether.errors import ConfigError, StorageError, UsageError
from tether.progress import working

if TYPE_CHECKING:
    from tether.models.save import Merged
    from tether.store.read import RunSummary
    from tether.store.recorded import RecordedRun

SUMMARY = "Export a run's model, rollouts or metrics for other tools."
EPILOG = """examples:
  tether export ppo --model my-model               the trained model, or its adapters, with the tokenizer
  tether export ppo --rollouts rollouts.parquet    one row a rollout, a list a token column
  tether export ppo --metrics metrics.csv          one row a step
  tether export ppo --to exported                  all three
  tether export ppo --merge --to my-model          one plain transformers folder, adapters merged, with a model card
  tether export ppo --gguf ppo.gguf --type q8_0    one file for llama.cpp and tools based on it
  tether export ppo --push me/my-model --private   the merged folder on the Hugging Face hub, with your HF_TOKEN
"""

MERGED = "merged"  # in the run's folder, where no other is named
STORED = ("float32", "bfloat16", "float16")


def export_command(words: list[str]) -> int:
    """Write what the options ask for, and print where."""
    options = export_parser().parse_args(words)
    if options.private and not options.push:
        raise UsageError("--private goes with --push OWNER/NAME")
    with working(f"exporting {options.run}", announce=False, quiet=options.json, spinner=False):
        if options.merge or options.gguf or options.push:
            return _run_merged(options)
        if options.checkpoint is not None:
            from tether.train.resume import export_checkpoint

            return export_checkpoint(options)
        from tether.reports.export_data import export

        return export(options)


def export_parser() -> CommandParser:
    """All options of `tether export`."""
    parser = CommandParser("export", SUMMARY, EPILOG)
    add_run_option(parser)
    parser.add_argument(
        "--to",
        metavar="DIR",
        help="everything in the run: model/, rollouts.jsonl, metrics.csv; with --merge or --push, the merged model",
    )
    parser.add_argument("--model", metavar="DIR", help="copy the model (or adapters) to this new folder")
    parser.add_argument("--best", action="store_true", help="the model with the best held-out score, not the last")
    parser.add_argument(
        "--checkpoint",
        type=int,
        metavar="N",
        help="the model after N steps; -1 is the newest checkpoint",
    )
    _add_merged_options(parser)
    parser.add_argument("--rollouts", metavar="FILE", help=".parquet or .jsonl")
    parser.add_argument("--step", type=int, action="append", metavar="N", help="only rollouts of this step; repeatable")
    parser.add_argument("--metrics", metavar="FILE", help=".csv or .jsonl")
    parser.add_argument("--force", action="store_true", help="overwrite the files of --rollouts and --metrics")
    return parser


def _add_merged_options(parser: argparse.ArgumentParser) -> None:
    merged = parser.add_argument_group("the merged model")
    merged.add_argument(
        "--merge",
        action="store_true",
        help="write a plain transformers folder (adapters merged), loaded back and compared; by default merged/ in the "
        "run's folder",
    )
    merged.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the folder's weights (default: the run's)"
    )
    merged.add_argument("--gguf", metavar="FILE", help="write a GGUF file: llama, mistral, qwen2 and qwen3 models")
    merged.add_argument(
        "--type", choices=("f32", "f16", "q8_0"), default="f16", help="how the GGUF file stores matrices (f16)"
    )
    merged.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="push the merged folder to the Hugging Face hub, with HF_TOKEN or your login",
    )
    merged.add_argument("--private", action="store_true", help="with --push: a new repository is private")
    merged.add_argument("--license", metavar="ID", help="for the model card, such as apache-2.0 (the base model's)")


def _run_merged(options: argparse.Namespace) -> int:
    if options.rollouts or options.metrics or options.step:
        raise UsageError("--merge, --gguf and --push export only the model: export the rest by a second command")
    return print_written(export_model(options), options.json)


# -- the merged model


@dataclass(frozen=True)
class ExportSource:
    """A saved model, and the step whose metrics belong to it (None: the last)."""

    folder: Path
    step: int | None


def export_model(options: argparse.Namespace) -> dict[str, Any]:
    """Write what the options ask for; return the paths written and the results of the checks."""
    from rich.console import Console

    from tether.hub.push import check_push, push_folder
    from tether.models.gguf_export import architecture_of
    from tether.models.load import is_reward_model
    from tether.models.save import load_merged
    from tether.reports.run_table import open_for
    from tether.store.read import find_run, read_run

    token = check_push(options.push) if options.push else ""
    with open_for(options) as opened:
        summary, run = find_run(opened, options.run), read_run(opened, options.run)
        if summary.method == "control":
            raise UsageError(f"{summary.name} is a run of `tether control`: --model DIR exports its policy as it is")
        target, gguf = _targets(options, summary)
        console = Console(stderr=True, quiet=options.json)
        with _saved(options, summary, run) as source, tempfile.TemporaryDirectory() as scratch:
            if gguf is not None and is_reward_model(source.folder):
                raise UsageError("--gguf: GGUF cannot hold a reward model's score: export it with --merge")
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
    """Print what was written, and how much the copy differs from the run's model."""
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
    """The folder of the model to export: the last, the best, or a checkpoint's, written to a temporary folder."""
    from tether.reports.export_data import best_step, model_folder
    from tether.train.resume import checkpoint_model

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
    from tether.models.save import check_merged, write_merged
    from tether.reports.export_data import CardFacts, write_card

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
    from tether.models.gguf_export import write_model

    found = write_model(merged.model, path, type_, summary.name)
    check = {"type": type_, "tensors": found.tensors, "bytes": found.size, "largest": found.largest}
    return {"gguf": str(path), "gguf_check": check}
