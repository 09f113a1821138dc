"""Where records come from: a file, a glob, a saved dataset folder, a dataset id, or several of them."""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tether.config.base import Paths
from tether.data.formats import READERS, FileRow, ending_of, read_rows
from tether.errors import DataError
from tether.files import require_plain

SAVED, SPLITS = "state.json", "dataset_dict.json"  # files that `save_to_disk` writes, for one dataset and for splits
REACH_SECONDS = 3.0  # wait for the hub before falling back to the local cache

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class SourcePlace:
    """One place that records are read from."""

    kind: Literal["file", "folder", "id"]
    path: str

    @property
    def has_splits(self) -> bool:
        """Whether the place has splits to choose from."""
        return self.kind == "id" or (Path(self.path) / SPLITS).is_file()


def places_of(paths: Paths) -> list[SourcePlace]:
    """The places, with globs expanded in name order."""
    named = [paths] if isinstance(paths, str) else list(paths)
    if not named:
        raise DataError("no file of records is named")
    return [place for path in named for place in _places(path)]


def read_source(paths: Paths, split: str = "train", config: str | None = None) -> Iterator[FileRow]:
    """The rows of all places, one place after another."""
    for place in places_of(paths):
        if place.kind == "file":
            yield from read_rows(place.path)
        elif place.kind == "folder":
            yield from _saved_rows(Path(place.path), split)
        else:
            yield from _id_rows(place.path, config, split)


def source_digest(paths: Paths, split: str = "train", config: str | None = None) -> str | None:
    """One digest over the bytes of everything that is read; None where they cannot be read."""
    try:
        files = [file for place in places_of(paths) for file in _files(place, split, config)]
        digests = [_sha256(file) for file in files]
    except (DataError, OSError):
        return None
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def shown_source(paths: Paths) -> str:
    """The source as one line of text."""
    return paths if isinstance(paths, str) else ", ".join(paths)


def _places(path: str) -> list[SourcePlace]:
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, or an unknown user's home
        raise DataError(f"{path:.200}: no such file ({getattr(error, 'strerror', None) or error})") from None
    if expanded.is_symlink() and not expanded.exists():
        raise DataError(f"{path}: this link is broken")
    if expanded.is_dir():
        if not any((expanded / name).is_file() for name in (SAVED, SPLITS)):
            raise DataError(f"{path}: this is a folder; name its files, such as '{path.rstrip('/')}/*.jsonl'")
        return [SourcePlace("folder", str(expanded))]
    if expanded.exists():
        return [SourcePlace("file", str(expanded))]
    if _MAGIC.search(path):
        matching = glob.glob(str(expanded), recursive=True)  # noqa: PTH207 (a pattern may begin anywhere)
        found = sorted(file for file in matching if Path(file).is_file())
        if not found:
            raise DataError(f"{path}: no file matches this pattern")
        return [SourcePlace("file", file) for file in found]
    ending = Path(path).suffix
    is_file = ending_of(path) in READERS or (ending[1:].isalpha() and len(ending) < 7) or ending == ".gz"
    return [SourcePlace("file" if is_file or not _ID.fullmatch(path) else "id", path)]


# -- a folder that `datasets` saved -------------------------------------------------------------------------------


def _saved_rows(folder: Path, split: str) -> Iterator[FileRow]:
    """One record per row, read from the folder's Arrow files; runs no code of the dataset."""
    arrow = _arrow(str(folder))
    number = 0
    for file in _saved_files(folder, split):
        try:
            with arrow.memory_map(str(file)) as source, arrow.ipc.open_stream(source) as reader:
                for batch in reader:
                    for fields in batch.to_pylist():
                        number += 1
                        yield FileRow(fields, f"{folder}, row {number}")
        except (arrow.ArrowException, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{file}, after row {number}: not an Arrow file that can be read ({reason})") from None


def _saved_files(folder: Path, split: str) -> list[Path]:
    if (folder / SPLITS).is_file():
        splits = _json(folder / SPLITS).get("splits", [])
        if split not in splits:
            raise DataError(f"{folder}: there is no split {split!r}; there are {', '.join(splits)}: set data.split")
        folder = folder / split
    named = _json(folder / SAVED).get("_data_files", [])
    return [folder / Path(str(entry["filename"])).name for entry in named]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the saved dataset is damaged ({error})") from None
    return value if isinstance(value, dict) else {}


def _arrow(path: str) -> Any:
    try:
        import pyarrow as arrow
        import pyarrow.ipc
    except ImportError:
        raise DataError(
            f"{path}: reading a saved dataset needs pyarrow, which is not installed: pip install 'tether-rl[parquet]'"
        ) from None
    return arrow


# -- a dataset by its id ------------------------------------------------------------------------------------------


def _id_rows(name: str, config: str | None, split: str) -> Iterator[FileRow]:
    for number, fields in enumerate(_load_id(name, config, split), start=1):
        yield FileRow(dict(fields), f"{name} ({split}), row {number}")


def _load_id(name: str, config: str | None, split: str) -> Any:
    """The split of a dataset on the hub, or from the local cache where the hub cannot be reached.

    The supported version of `datasets` runs no code from a dataset's repository.
    """
    try:
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise DataError(
            f"{name}: there is no such file or folder; for a dataset's id install one more package: "
            "pip install 'tether-rl[datasets]'"
        ) from None
    online = not datasets.config.HF_HUB_OFFLINE and reachable(datasets.config.HF_ENDPOINT)
    try:
        with _hub(datasets, online=online):
            return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub, the network or a damaged cache may raise anything
        reason = str(error).strip().partition("\n")[0][:200]
        if online:
            raise DataError(
                f"{name}: no file, no folder, and no dataset that can be read: {reason} (data.config is {config}, "
                f"split is {split})"
            ) from None
        raise DataError(
            f"{name}: there is no such file or folder, the hub cannot be reached, and the local cache does not hold it "
            f"(config {config}, split {split}): {reason}"
        ) from None


def reachable(endpoint: str) -> bool:
    """Whether the hub answers within REACH_SECONDS; `datasets` itself would retry for half a minute."""
    address = urlsplit(endpoint)
    proxied = any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY"))
    if proxied or not address.hostname:
        return True
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=REACH_SECONDS).close()
    except OSError:
        return False
    return True


@contextmanager
def _hub(datasets: Any, *, online: bool) -> Iterator[None]:
    """With `online` False, `datasets` and the hub client use only their caches."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not online:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


# -- digests ------------------------------------------------------------------------------------------------------


def _files(place: SourcePlace, split: str, config: str | None) -> Sequence[Path]:
    """The files that hold a place's records."""
    if place.kind == "file":
        return [Path(place.path)]
    if place.kind == "folder":
        return _saved_files(Path(place.path), split)
    return [Path(entry["filename"]) for entry in _load_id(place.path, config, split).cache_files]


def _sha256(path: Path) -> str:
    require_plain(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
