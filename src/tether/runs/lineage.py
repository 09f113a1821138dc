"""What a run is made from, read off its resolved recipe: models, reward models, the critic's start, data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.runs.folder import is_run
from tether.runs.store.open import Workspace
from tether.runs.store.records import Source


def sources_of(config: Mapping[str, Any], workspace: Workspace) -> list[Source]:
    """The models and files that a recipe names; a model that a run of this workspace trained leads to that run."""
    models = [
        Source(role, path, run=_run_at(Path(path), workspace), sha256=_weights(Path(path), role))
        for role, path in _models(config)
    ]
    files = [Source(role, path, sha256=_sha256(Path(path))) for role, path in _files(config)]
    return models + files


def _models(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if path := config.get("model", {}).get("path"):
        yield "model", path
    if path := config.get("roles", {}).get("critic_from"):
        yield "critic", path
    for part in config.get("reward", {}).get("parts", ()):
        if part.get("kind") == "model" and part.get("path"):
            yield "reward", part["path"]


def _files(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    data = config.get("data", {})
    named = {"data": data.get("train"), "held_out": data.get("held_out")}
    named["prompts"] = config.get("task", {}).get("prompts")
    named["ptx"] = config.get("ptx", {}).get("data")
    named["centre"] = config.get("reward", {}).get("centre_on")
    for role, path in named.items():
        if isinstance(path, str) and path:
            yield role, path


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
    files = sorted(folder.glob("*.safetensors")) if role != "model" and folder.is_dir() else []
    digests = [f"{file.name} {_sha256(file)}" for file in files]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else None


def _sha256(path: Path) -> str | None:
    """The digest of a file's bytes; None where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
