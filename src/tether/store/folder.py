"""A run's folder: its resolved recipe, its checkpoints, and the model it ends with."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from tether.config import Recipe
from tether.config.allowed_code import SEAL, code_names, seal_record
from tether.errors import ConfigError, StorageError
from tether.files import read_plain_json, sealed, unsealed
from tether.redact import redact_url, secret_in

RECIPE = "recipe.json"  # what makes a folder a run's
HEADER = "run.json"  # the same, sealed: see tether.store.header
FINISHED = "finished.json"
FORKED = "forked.json"  # what a run branched off from; there before the recipe is
UNSTARTED = "no-step-yet.json"  # there until the first step is taken: a run that died before it does not keep its name
DEMO = "demo.json"  # what makes a folder a demo's, with a run for each stage in it


def json_line(step: int, metrics: dict[str, float]) -> str:
    """One step as strict JSON, in which a number that is not finite is null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **finite}, allow_nan=False)


def is_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    try:
        return (folder / RECIPE).is_file() or (folder / HEADER).is_file()
    except OSError:  # such as a name that is too long to be one
        return False


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """A JSON file that is there as a whole or not at all, whenever the machine stops."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # a link there would be written through
    with unfinished.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run_path(recipe: Recipe) -> Path:
    """Where the run of a recipe with a name is."""
    assert recipe.run.name is not None
    return Path(recipe.run.directory) / recipe.run.name


class RunFolder:
    """`recipe.json`, `checkpoints/` and `model/` of one run, new or gone on with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def begin(cls, recipe: Recipe, origin: dict[str, Any] | None = None, root: Path | None = None) -> RunFolder:
        """A new run's folder; one that holds a run already is refused. `origin` says what it branched off from.

        `root` is the folder that the user ran from, by default the working folder.

        A run that took no step, and that no process is at, is none: its folder is used again.
        """
        from tether.store.header import RunHeader

        folder = cls(run_path(recipe))
        if is_run(folder.path) and not folder.is_free:
            raise ConfigError(
                f"run.name: {folder.path} already holds a run; choose another name, remove it, or go on with it: "
                f"tether resume {folder.path}"
            )
        folder.check_empty()
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / FORKED).unlink(missing_ok=True)
            shutil.rmtree(folder.checkpoints, ignore_errors=True)  # of a fork that died before its first step
            folder.write(UNSTARTED, {"steps": 0})
            folder.write(FORKED, origin or {})
            (folder.path / SEAL).unlink(missing_ok=True)
            folder.write(SEAL, seal_record(code_names(recipe), (root or Path.cwd()).resolve()))
            (folder.path / FINISHED).unlink(missing_ok=True)
            record = recipe_record(recipe)
            RunHeader(secrets.token_hex(8), record, origin or {}).write(folder.path)
            write_whole(folder.path / RECIPE, record)
        except OSError as error:
            raise StorageError(f"run.directory: cannot write to {folder.path} ({error.strerror})") from error
        return folder

    def check_empty(self) -> None:
        """Raise where a run that begins here would remove what no run of Tether wrote, or lie outside its workspace."""
        if ".." in self.path.parts[-1:]:
            raise ConfigError(f"run.name: {self.path} is not the name of a folder in its workspace: give it a name")
        if (self.path / UNSTARTED).is_file():  # all that is here is of a run which took no step
            return
        for place in (self.checkpoints, self.model_path, self.best_path):
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                if place.is_symlink() or any(place.iterdir()):
                    raise ConfigError(
                        f"run.name: {place} is there already, and a run of this name would write over it: choose "
                        "another run.name or run.directory, or move it away"
                    )

    @property
    def is_free(self) -> bool:
        """Whether the run here took no step and nobody is about to."""
        from tether.store.database.journal import is_being_recorded

        return (self.path / UNSTARTED).is_file() and not is_being_recorded(self.path)

    def note_first_step(self) -> None:
        """From now on the folder is this run's."""
        with suppress(OSError):
            (self.path / UNSTARTED).unlink(missing_ok=True)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Keep something as JSON; nothing is written where there is nothing to keep."""
        if content:
            write_whole(self.path / name, content)

    @property
    def model_path(self) -> Path:
        """Where the trained model goes."""
        return self.path / "model"

    @property
    def best_path(self) -> Path:
        """Where the model with the best held-out score goes."""
        return self.path / "best"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    @property
    def origin(self) -> dict[str, Any] | None:
        """What it branched off from; None for a run that began at its beginning."""
        from tether.store.header import read_header

        header = read_header(self.path)
        if header is not None:
            return dict(header.forked) or None
        file = self.path / FORKED
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    @property
    def is_finished(self) -> bool:
        """Whether every step was taken and all that follows them is written."""
        return self._finished() is not None

    @property
    def finish_is_damaged(self) -> bool:
        """Whether there is a note that all is done, and it is not what was written: it counts for nothing."""
        return self._finished() is None and (self.path / FINISHED).exists()

    @property
    def steps_taken(self) -> int:
        """Of a run that is finished."""
        steps = self._finished()
        assert steps is not None
        return steps

    def finish(self, steps: int) -> None:
        """Note that nothing is left to do."""
        write_whole(self.path / FINISHED, sealed({"steps": steps}))

    def _finished(self) -> int | None:
        """The steps that a whole note says; one without a digest counts for a run of a Tether that wrote none."""
        try:
            content = read_plain_json(self.path / FINISHED)
            if not (self.path / HEADER).exists() and isinstance(content, dict) and set(content) == {"steps"}:
                return int(content["steps"])
            return int(unsealed(content)["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """A recipe as it is kept: every key resolved, and its method.

    A password in `store.url` is not kept: PGPASSWORD or ~/.pgpass can give it when the run goes on. A secret elsewhere
    cannot be left out, for the run would go on without it, and is refused.
    """
    record = {"method": recipe.method, **recipe.model_dump(mode="json")}
    if recipe.store.url is not None:
        record["store"]["url"] = redact_url(recipe.store.url)
    if (key := secret_in(record)) is not None:
        raise ConfigError(
            f"{key} holds a secret, and recipes are saved with the run: name an environment variable instead, and read "
            "the secret from it"
        )
    return record
