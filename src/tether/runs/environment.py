"""What a run was made with: versions, machine, seed, and the state of the user's own project."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tether import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy")


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
    """The commit that the folder is at and whether it has changes; empty where it is in no repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"git_commit": commit, "git_dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None where there is no git, no repository, or no answer within seconds."""
    try:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
