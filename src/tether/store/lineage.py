"""The lineage of a run: the models and data in its recipe, and the versions, machine, seed and commit."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tether import __version__
from tether.config.base import Paths
from tether.config.kl_settings import START
from tether.data.sources import shown_source, source_digest
from tether.errors import ConfigError
from tether.files import require_plain
from tether.store.database.open import Workspace
from tether.store.database.records import RecordSource
from tether.store.folder import is_run

MAX_INDEX = 500_000_000  # bytes of a repository's index
PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy")


# -- versions, machine and commit ---------------------------------------------------------------------------------


def describe_environment(*, seed: int, device: str) -> dict[str, Any]:
    """Everything that could make the same recipe give another result."""
    found: dict[str, Any] = {
        "tether": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "device": device,
        "seed": seed,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
    return found | git_state(Path.cwd())


def git_state(folder: Path) -> dict[str, Any]:
    """The commit of a folder's repository, and whether it has changes; empty if it is in no repository.

    A repository's own configuration can name programs that git runs (file monitors, filters, hooks, ssh). So the commit
    is read from its file, and git is run in a folder of ours with our own configuration.
    """
    for top in (folder, *folder.parents):
        try:
            git = _git_folder(top)
            if git is None:
                continue
            common = _common_folder(git)
            commit = _commit(git, common)
            return {"git_commit": commit, "git_dirty": _is_dirty(top, git, common, commit)} if commit else {}
        except (OSError, ValueError):
            return {}
    return {}


def _git_folder(top: Path) -> Path | None:
    """The git folder of a working tree; `.git` is a file in a linked worktree and in a submodule."""
    place = top / ".git"
    if place.is_dir():
        return place
    if not place.is_file():
        return None
    kind, _, path = _line(place).partition(": ")
    return top / path if kind == "gitdir" else None


def _common_folder(git: Path) -> Path:
    """The folder of objects and branches, which a linked worktree shares."""
    file = git / "commondir"
    return git / _line(file) if file.is_file() else git


def _commit(git: Path, common: Path) -> str | None:
    head = _line(git / "HEAD")
    if not head.startswith("ref: "):
        return _hash(head)
    name = head.removeprefix("ref: ")
    if not name.startswith("refs/") or ".." in name:
        return None
    for place in (git, common):
        if (place / name).is_file():
            return _hash(_line(place / name))
    packed = common / "packed-refs"
    if not packed.is_file():
        return None
    with packed.open(encoding="utf-8", errors="replace") as lines:
        return next((_hash(line.split()[0]) for line in lines if line.rstrip("\n").endswith(f" {name}")), None)


def _hash(text: str) -> str | None:
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def _line(file: Path) -> str:
    if not file.is_file():  # reading a named pipe would block
        raise ValueError(f"{file} is not a file")
    with file.open(encoding="utf-8", errors="replace") as opened:
        return opened.readline(4096).strip()


def _is_dirty(top: Path, git: Path, common: Path, commit: str) -> bool | None:
    """Whether a tracked file was changed; None if git does not answer within the time limit."""
    try:
        index = git / "index"
        if not index.is_file() or index.stat().st_size > MAX_INDEX:
            return None
        ours = Path(tempfile.mkdtemp(prefix="tether-git-"))
        try:
            _fill(ours, commit, index)
            return _has_changes(top, ours, common / "objects")
        finally:
            for made in sorted(ours.rglob("*"), reverse=True):
                made.rmdir() if made.is_dir() and not made.is_symlink() else made.unlink()
            ours.rmdir()
    except (OSError, subprocess.SubprocessError):
        return None


def _fill(ours: Path, commit: str, index: Path) -> None:
    """Make a folder a repository at this commit, with this index and an empty configuration."""
    version, extension = (1, "[extensions]\nobjectFormat = sha256\n") if len(commit) == 64 else (0, "")
    config = f"[core]\nrepositoryformatversion = {version}\nbare = false\n{extension}"
    (ours / "refs").mkdir()
    (ours / "objects").mkdir()
    (ours / "HEAD").write_text(f"{commit}\n", encoding="utf-8")
    (ours / "config").write_text(config, encoding="utf-8")
    (ours / "index").write_bytes(index.read_bytes())


def _has_changes(top: Path, ours: Path, objects: Path) -> bool | None:
    given = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    given |= {"GIT_DIR": str(ours), "GIT_WORK_TREE": str(top), "GIT_OBJECT_DIRECTORY": str(objects)}
    given |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1"}
    given |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all"]
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 5, "check": False}
    done = subprocess.run(command, cwd=top, env=given, **quiet)  # noqa: S603 (only constants)
    return bool(done.stdout.strip()) if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# -- models and data of a recipe ----------------------------------------------------------------------------------


def sources_of(config: Mapping[str, Any], workspace: Workspace) -> list[RecordSource]:
    """The models and files of a recipe; a model trained by a run of this workspace is linked to that run."""
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
    """(role, path) of every model in a recipe."""
    if path := config.get("model", {}).get("path"):
        yield "model", path
    if path := config.get("roles", {}).get("critic_init"):
        yield "critic", path
    if (path := config.get("kl", {}).get("reference", START)) != START:
        yield "reference", path
    for part in config.get("reward", {}).get("parts", ()):
        if part.get("kind") == "model" and part.get("path"):
            yield "reward", part["path"]


def _files(config: Mapping[str, Any]) -> Iterator[tuple[str, Paths, str, str | None]]:
    """(role, path, split, configuration) of all records that a recipe reads."""
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
    """The run that a model's folder belongs to: the folder itself, or the parent of `model/` or `best/`."""
    for folder in (path, path.parent):
        if is_run(folder):
            try:
                return workspace.name_of(folder)
            except ConfigError:  # a run of another workspace
                return None
    return None


def _weights(folder: Path, role: str) -> str | None:
    """One digest over a model's weight files; None for the policy, whose weights are digested after loading."""
    if (folder / "model").is_dir():  # the folder of a run
        folder = folder / "model"
    files = sorted(folder.glob("*.safetensors")) if role != "model" and folder.is_dir() else []
    digests = [f"{file.name} {_sha256(file)}" for file in files]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else None


def _sha256(path: Path) -> str | None:
    """The digest of a file's bytes; None if it cannot be read."""
    try:
        require_plain(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
