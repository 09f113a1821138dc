"""A run's folder: its resolved recipe, its checkpoints, and the model it ends with."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from tether.config import Recipe
from tether.errors import ConfigError, StorageError

RECIPE = "recipe.json"  # what makes a folder a run's
FINISHED = "finished.json"
FORKED = "forked.json"  # what a run branched off from; there before the recipe is
DEMO = "demo.json"  # what makes a folder a demo's, with a run for each stage in it


def json_line(step: int, metrics: dict[str, float]) -> str:
    """One step as strict JSON, in which a number that is not finite is null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **finite}, allow_nan=False)


def is_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    try:
        return (folder / RECIPE).is_file()
    except OSError:  # such as a name that is too long to be one
        return False


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """A JSON file that is there as a whole or not at all, whenever the machine stops."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
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
    def begin(cls, recipe: Recipe, origin: dict[str, Any] | None = None) -> RunFolder:
        """A new run's folder; one that holds a run already is refused. `origin` says what it branched off from."""
        folder = cls(run_path(recipe))
        if is_run(folder.path):
            raise ConfigError(
                f"run.name: {folder.path} already holds a run; choose another name, remove it, or go on with it: "
                f"tether resume {folder.path}"
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder.path / FORKED).unlink(missing_ok=True)
            folder.write(FORKED, origin or {})
            write_whole(folder.path / RECIPE, recipe_record(recipe))
        except OSError as error:
            raise StorageError(f"run.directory: cannot write to {folder.path} ({error.strerror})") from error
        return folder

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
        file = self.path / FORKED
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    @property
    def is_finished(self) -> bool:
        """Whether every step was taken and all that follows them is written."""
        return (self.path / FINISHED).is_file()

    def finish(self, steps: int) -> None:
        """Note that nothing is left to do."""
        write_whole(self.path / FINISHED, {"steps": steps})


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """A recipe as it is kept: every key resolved, and its method. A password in `store.url` is not kept."""
    record = {"method": recipe.method, **recipe.model_dump(mode="json")}
    if recipe.store.url is not None:
        record["store"]["url"] = without_password(recipe.store.url)
    return record


def without_password(url: str) -> str:
    """A database's URL without its password: PGPASSWORD or ~/.pgpass can give it when the run goes on."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1@", url)
