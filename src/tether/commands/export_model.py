"""`tether export --merge`, `--gguf` and `--push`: a run's model as a plain folder, as one file, and on the hub."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from rich.console import Console

from tether.errors import ConfigError, StorageError, UsageError
from tether.models.gguf_export import architecture_of, write_model
from tether.models.load import is_reward_model
from tether.models.save import Merged, check_merged, load_merged, write_merged
from tether.redact import redact, remember_secret
from tether.reports.export_data import CardFacts, best_step, model_folder, write_card
from tether.reports.run_table import open_for
from tether.store.read import RunSummary, find_run, read_run
from tether.store.recorded import RecordedRun
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


def check_push(repository: str) -> str:
    """The token for a push to OWNER/NAME; raises before anything is computed where a push cannot work."""
    if repository.count("/") != 1:
        raise UsageError(f"--push {repository}: name the repository as OWNER/NAME")
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"--push {repository}: this is no repository's name ({_first(error)})") from None
    if is_offline_mode():
        raise ConfigError("--push: HF_HUB_OFFLINE is set: unset it to reach the hub")
    token = get_token()
    if not token:
        raise ConfigError("--push needs a token that may write: set HF_TOKEN, or log in with `hf auth login`")
    remember_secret(token)
    return token


def push_folder(
    folder: Path, repository: str, token: str, *, private: bool, message: str, files: tuple[Path, ...] = ()
) -> str:
    """Upload the folder, and `files` beside it; a repository that is there gets a new commit. Returns its address."""
    api = HfApi(token=token)

    def push() -> str:
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
        for file in files:
            api.upload_file(
                path_or_fileobj=file, path_in_repo=file.name, repo_id=repository, commit_message=f"add {file.name}"
            )
        return str(url)

    return _in_a_sentence(push, repository, api.endpoint)


def _in_a_sentence(push: Callable[[], str], repository: str, endpoint: str) -> str:
    try:
        return push()
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status == 401:
            raise ConfigError(
                "--push: the hub does not know the token: make a new one, with write permission"
            ) from None
        if status in (403, 404, 409):
            raise ConfigError(
                f"--push {repository}: the name is taken, or the token may not write there: choose a name of your own, "
                "or a token with write permission"
            ) from None
        reason = redact(_first(error))
        raise StorageError(f"--push {repository}: the hub answered {status or 'nothing'} ({reason})") from None
    except Exception as error:
        if not _is_network(error):
            raise
        reason = redact(_first(error) or type(error).__name__)
        raise StorageError(
            f"--push: {endpoint} cannot be reached ({reason}): check the network, and try again"
        ) from None


def _is_network(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is of the connection."""
    while error is not None:
        if isinstance(error, OSError | TimeoutError) or type(error).__module__.split(".")[0] in (
            "httpx",
            "httpcore",
            "httpx2",
            "httpcore2",
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
