"""The folder of a run: its resolved recipe, its checkpoints and its final model."""

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
from tether.config.control_recipe import ControlRecipe
from tether.errors import ConfigError, StorageError
from tether.files import read_plain_json, sealed, unsealed
from tether.redact import redact_url, secret_in

RECIPE = "recipe.json"  # a folder with this file is a run
HEADER = "run.json"  # the recipe with a digest: see tether.store.header
FINISHED = "finished.json"
FORKED = "forked.json"  # the origin of a forked run; written before the recipe
UNSTARTED = "no-step-yet.json"  # exists until the first step is complete: a run that died before it frees its name
LAUNCH = "launch.json"  # the launcher that started a run, so that it resumes its own run when it starts ranks again
PIPELINE = "pipeline.json"  # a folder with this file is a pipeline, with one folder for each stage
DEMO = "demo.json"  # a folder with this file is a demo, with one run for each stage


def json_line(step: int, metrics: dict[str, float]) -> str:
    """One step as strict JSON; a number that is not finite becomes null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **finite}, allow_nan=False)


def is_run(folder: Path) -> bool:
    """Whether this folder contains a run."""
    try:
        return (folder / RECIPE).is_file() or (folder / HEADER).is_file()
    except OSError:  # such as a name that is too long
        return False


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically: after a crash it is complete or absent."""
    write_text_whole(path, json.dumps(content, indent=2) + "\n")


def write_text_whole(path: Path, text: str) -> None:
    """The same for any text."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)  # writing would follow a symbolic link
    with unfinished.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the file names of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run_path(recipe: Recipe | ControlRecipe) -> Path:
    """The folder of a recipe's run; the recipe must have a name."""
    assert recipe.run.name is not None
    return Path(recipe.run.directory) / recipe.run.name


class RunFolder:
    """`recipe.json`, `checkpoints/` and `model/` of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def begin(
        cls,
        recipe: Recipe | ControlRecipe,
        origin: dict[str, Any] | None = None,
        root: Path | None = None,
        launch: str = "",
    ) -> RunFolder:
        """Create the folder of a new run; a folder that already holds a run is refused. `origin` describes a fork.

        `root` is the folder that the user ran from; the default is the working folder. `launch` is the id of a launcher
        that starts ranks again. The folder of a run that
        completed no step is used again, unless a process is still training it.
        """
        from tether.store.header import RunHeader

        folder = cls(run_path(recipe))
        if is_run(folder.path) and not folder.is_free:
            raise ConfigError(
                f"run.name: {folder.path} already holds a run; choose another name, remove it, or resume it: "
                f"tether resume {folder.path}"
            )
        folder.check_empty()
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / FORKED).unlink(missing_ok=True)
            shutil.rmtree(folder.checkpoints, ignore_errors=True)  # left by a fork that died before its first step
            folder.write(UNSTARTED, {"steps": 0})
            folder.write(FORKED, origin or {})
            (folder.path / LAUNCH).unlink(missing_ok=True)
            folder.write(LAUNCH, {"launch": launch} if launch else {})
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
        """Raise if a new run here would overwrite files that are not Tether's, or lie outside its workspace."""
        if ".." in self.path.parts[-1:]:
            raise ConfigError(f"run.name: {self.path} is not the name of a folder in its workspace: give it a name")
        if (self.path / UNSTARTED).is_file():  # everything here belongs to a run that completed no step
            return
        for place in (self.checkpoints, self.model_path, self.best_path):
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                if place.is_symlink() or any(place.iterdir()):
                    raise ConfigError(
                        f"run.name: {place} exists already, and a run of this name would overwrite it: choose "
                        "another run.name or run.directory, or move it away"
                    )

    @property
    def is_free(self) -> bool:
        """Whether the run here completed no step and no process is training it."""
        from tether.store.database.journal import is_being_recorded

        return (self.path / UNSTARTED).is_file() and not is_being_recorded(self.path)

    def note_first_step(self) -> None:
        """Mark that the run completed its first step, so that its folder is not used again."""
        with suppress(OSError):
            (self.path / UNSTARTED).unlink(missing_ok=True)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write `content` as JSON; an empty one is not written."""
        if content:
            write_whole(self.path / name, content)

    @property
    def model_path(self) -> Path:
        """The folder of the trained model."""
        return self.path / "model"

    @property
    def best_path(self) -> Path:
        """The folder of the model with the best held-out score."""
        return self.path / "best"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def origin(self) -> dict[str, Any] | None:
        """The origin of a forked run; None for any other run."""
        from tether.store.header import read_header

        header = read_header(self.path)
        if header is not None:
            return dict(header.forked) or None
        file = self.path / FORKED
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    @property
    def launch(self) -> str:
        """The id of the launcher that started the run; empty where it starts nothing again."""
        try:
            return str(read_plain_json(self.path / LAUNCH)["launch"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    @property
    def is_finished(self) -> bool:
        """Whether all steps are complete and the final files are written."""
        return self._finished() is not None

    @property
    def finish_is_damaged(self) -> bool:
        """Whether `FINISHED` exists but is damaged; the run then counts as unfinished."""
        return self._finished() is None and (self.path / FINISHED).exists()

    @property
    def steps_taken(self) -> int:
        """Number of steps of a finished run."""
        steps = self._finished()
        assert steps is not None
        return steps

    def finish(self, steps: int) -> None:
        """Write `FINISHED`: the run is complete."""
        write_whole(self.path / FINISHED, sealed({"steps": steps}))

    def _finished(self) -> int | None:
        """The steps in `FINISHED`; None if it is damaged or missing. One without a digest is of an older version."""
        try:
            content = read_plain_json(self.path / FINISHED)
            if not (self.path / HEADER).exists() and isinstance(content, dict) and set(content) == {"steps"}:
                return int(content["steps"])
            return int(unsealed(content)["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def recipe_record(recipe: Recipe | ControlRecipe) -> dict[str, Any]:
    """A recipe as it is stored: every key resolved, and the method.

    A password in `store.url` is left out: PGPASSWORD or ~/.pgpass supplies it on resume. A secret in any other key
    raises ConfigError, because the run could not be resumed without it.
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
