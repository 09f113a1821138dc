"""What a run is made from, read off its resolved recipe: models, reward models, the critic's start, data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tether.config.reading import Paths
from tether.data.sources import shown_source, source_digest
from tether.errors import ConfigError
from tether.plain_file import require_plain
from tether.store.database.open import Workspace
from tether.store.database.records import RecordSource
from tether.store.folder import is_run


def sources_of(config: Mapping[str, Any], workspace: Workspace) -> list[RecordSource]:
    """The models and files that a recipe names; a model that a run of this workspace trained leads to that run."""
    models = [
        RecordSource(role, path, run=_run_at(Path(path), workspace), sha256=_weights(Path(path), role))
        for role, path in models_of(config)
    ]
    files = [
        RecordSource(role, shown_source(paths), sha256=source_digest(paths, split, subset))
        for role, paths, split, subset in _files(config)
    ]
    return models + files


def models_of(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(role, path) of every model that a recipe names."""
    if path := config.get("model", {}).get("path"):
        yield "model", path
    if path := config.get("roles", {}).get("critic_init"):
        yield "critic", path
    for part in config.get("reward", {}).get("parts", ()):
        if part.get("kind") == "model" and part.get("path"):
            yield "reward", part["path"]


def _files(config: Mapping[str, Any]) -> Iterator[tuple[str, Paths, str, str | None]]:
    """(role, where it is, its split, its configuration) of all records that a recipe reads."""
    data, task = config.get("data", {}), config.get("task", {})
    split, other, subset = data.get("split", "train"), data.get("held_out_split"), data.get("config")
    main = data.get("train") or task.get("prompts")
    held_out = data.get("held_out") or task.get("held_out") or (main if other else None)
    named: dict[str, tuple[Any, str, str | None]] = {
        "data": (data.get("train"), split, subset),
        "prompts": (task.get("prompts"), split, subset),
        "held_out": (held_out, other or split, subset),
        "ptx": (config.get("ptx", {}).get("data"), "train", None),
        "centre": (config.get("reward", {}).get("center_on"), "train", None),
    }
    for role, (paths, part, name) in named.items():
        if paths:
            yield role, paths if isinstance(paths, str) else tuple(paths), part, name


def _run_at(path: Path, workspace: Workspace) -> str | None:
    """The run that a model's folder belongs to: the folder itself, or the one that it is `model/` or `best/` of."""
    for folder in (path, path.parent):
        if is_run(folder):
            try:
                return workspace.name_of(folder)
            except ConfigError:  # a run, of another workspace
                return None
    return None


def _weights(folder: Path, role: str) -> str | None:
    """One digest over a model's files of weights; None for the policy, whose weights are looked at once loaded."""
    if (folder / "model").is_dir():  # a run's own folder
        folder = folder / "model"
    files = sorted(folder.glob("*.safetensors")) if role != "model" and folder.is_dir() else []
    digests = [f"{file.name} {_sha256(file)}" for file in files]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else None


def _sha256(path: Path) -> str | None:
    """The digest of a file's bytes; None where it cannot be read."""
    try:
        require_plain(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
