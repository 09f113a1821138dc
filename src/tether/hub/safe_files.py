"""Looking through a model's folder before transformers does: no path leaves it, and no weights but safetensors.

transformers joins the names in an index of shards, and some in tokenizer_config.json, to the folder as they stand:
`../x` leaves it, and a shard that is not called `.safetensors` is read by `torch.load`. Both are refused here, as are
links that leave the folder and kernels that config.json would have fetched from a hub.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tether.errors import ConfigError

MAX_JSON = 200_000_000  # bytes of a file that is read here; the largest tokenizer.json is a tenth of this
MAX_FILES = 20_000
INDEX = re.compile(r".*\.index(\..*)?\.json")
NAMED = re.compile(r".*_files?|transformers_weights")  # keys whose values transformers opens
HARMLESS = ("special_tokens_map_file",)  # which older releases wrote with the path on the maker's machine; never opened
CHECKED = ("config.json", "tokenizer_config.json", "generation_config.json", "adapter_config.json")
CHECKED += ("special_tokens_map.json", "processor_config.json", "preprocessor_config.json", "chat_template.json")


def check_folder(folder: Path, what: str = "model.path") -> None:
    """Raise ConfigError where something in the folder leads out of it, or is not safetensors where weights must be."""
    root = _boundary(folder)
    for file in _files(folder, what):
        if file.is_symlink() and not _stays(file, root):
            raise _refused(what, folder, f"{file.relative_to(folder)} is a link to a place outside of it")
        if file.parent == folder and file.suffix == ".json":
            if INDEX.fullmatch(file.name):
                _check_index(file, folder, what)
            elif file.name in CHECKED:
                check_names(_read(file, folder, what), f"{file.name}", folder, what)


def check_hub_copy(name: str, what: str = "model.path") -> None:
    """The same for the files of a Hugging Face id that are in the local cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in (*CHECKED, "model.safetensors.index.json"):
        try:
            found = try_to_load_from_cache(name, file)
        except (HFValidationError, OSError):
            return
        if isinstance(found, str):
            check_folder(Path(found).parent, what)
            return


def fetch_hub_names(name: str) -> None:
    """Fetch the small files that name others, so that they can be looked through before the weights are fetched."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for file in (*CHECKED, "model.safetensors.index.json"):
        with suppress(EntryNotFoundError, OSError, ValueError):  # a model has only some; loading says what is missing
            hf_hub_download(name, file)


def check_names(config: Any, where: str, folder: Path, what: str) -> None:
    """Refuse names of files outside the folder, and of kernels on a hub, anywhere in a configuration."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(name), each) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [(key, each) for each in value]
        elif isinstance(value, str) and key.endswith("_implementation") and "/" in value:
            raise _refused(what, folder, f"{key} in {where} is {value!r}, which is code on a hub, and never run")
        elif isinstance(value, str) and NAMED.fullmatch(key) and key not in HARMLESS and _leaves(value, folder):
            raise _refused(what, folder, f"{key} in {where} is {value!r}, which is not the name of a file in it")


def _check_index(file: Path, folder: Path, what: str) -> None:
    index = _read(file, folder, what)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise _refused(what, folder, f"{file.name} has no weight_map of names to files")
    for name in sorted(set(shards.values())):
        if not _is_plain(name):
            raise _refused(what, folder, f"{file.name} names the shard {name!r}, which is not a file in it")
        if not name.endswith(".safetensors") and not file.name.startswith("pytorch_model"):  # which is never read
            raise _refused(what, folder, f"{file.name} names the shard {name!r}, and only .safetensors are read")


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return bool(name) and name not in (".", "..") and not any(sign in name for sign in "/\\\0")


def _leaves(name: str, folder: Path) -> bool:
    """Whether a name leads out of the folder to something; a path of the maker's machine that is not here does not."""
    try:
        return not _is_plain(name) and (".." in re.split(r"[/\\\\]", name) or (folder / name).exists())
    except (OSError, ValueError):
        return True


def _boundary(folder: Path) -> Path:
    """What links may lead to: the folder, or the whole of a hub's copy, whose files are links to its blobs."""
    place = folder.resolve()
    return place.parent.parent if place.parent.name == "snapshots" else place


def _stays(file: Path, root: Path) -> bool:
    try:
        return file.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # it leads nowhere, or round in a circle
        return False


def _files(folder: Path, what: str) -> Iterator[Path]:
    count = 0
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            count += 1
            if count > MAX_FILES:
                raise _refused(what, folder, f"it has more than {MAX_FILES} files")
            yield Path(place) / name


def _read(file: Path, folder: Path, what: str) -> Any:
    try:
        if not file.is_file():
            raise _refused(what, folder, f"{file.name} is no regular file")
        if file.stat().st_size > MAX_JSON:
            raise _refused(what, folder, f"{file.name} is larger than {MAX_JSON // 1_000_000} MB")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
        raise _refused(what, folder, f"{file.name} is not JSON ({reason})") from error


def _refused(what: str, folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"{what} {str(folder)!r} is not loaded: {reason}; get the model anew from somebody you trust")
