"""Checks of a model's folder before anything in it is read or allocated.

transformers joins file names from the shard index and from tokenizer_config.json to the folder unchecked: `../x` leaves
the folder, and a shard without the suffix `.safetensors` is read by `torch.load`. Both raise an error here, as do links
that leave the folder and kernels that config.json would fetch from a hub. Numbers in a config become tensor sizes and
layer counts, so a size that is a text, negative or absurd raises an error before memory is allocated.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.files import read_plain, what_else

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
            raise _rejected(what, folder, f"{file.relative_to(folder)} is a link to a place outside of it")
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
        with suppress(EntryNotFoundError, OSError, ValueError):  # a model has only some of them
            hf_hub_download(name, file)


def check_names(config: Any, where: str, folder: Path, what: str) -> None:
    """Refuse names of files outside the folder, and of kernels on a hub, anywhere in a configuration."""
    queue: list[tuple[str, Any]] = [("", config)]
    while queue:
        key, value = queue.pop()
        if isinstance(value, dict):
            queue += [(str(name), each) for name, each in value.items()]
        elif isinstance(value, list):
            queue += [(key, each) for each in value]
        elif isinstance(value, str) and key.endswith("_implementation") and "/" in value:
            raise _rejected(what, folder, f"{key} in {where} is {value!r}, which is code on a hub, and never run")
        elif isinstance(value, str) and NAMED.fullmatch(key) and key not in HARMLESS and _leaves(value, folder):
            raise _rejected(what, folder, f"{key} in {where} is {value!r}, which is not the name of a file in it")


def _check_index(file: Path, folder: Path, what: str) -> None:
    index = _read(file, folder, what)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise _rejected(what, folder, f"{file.name} has no weight_map of names to files")
    for name in sorted(set(shards.values())):
        if not _is_plain(name):
            raise _rejected(what, folder, f"{file.name} names the shard {name!r}, which is not a file in it")
        if not name.endswith(".safetensors") and not file.name.startswith("pytorch_model"):  # which is never read
            raise _rejected(what, folder, f"{file.name} names the shard {name!r}, and only .safetensors are read")


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
                raise _rejected(what, folder, f"it has more than {MAX_FILES} files")
            yield Path(place) / name


def _read(file: Path, folder: Path, what: str) -> Any:
    try:
        if not file.is_file():
            raise _rejected(what, folder, f"{file.name} is not a regular file")
        if file.stat().st_size > MAX_JSON:
            raise _rejected(what, folder, f"{file.name} is larger than {MAX_JSON // 1_000_000} MB")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("\n")[0]
        raise _rejected(what, folder, f"{file.name} is not JSON ({reason})") from error


def _rejected(what: str, folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"{what} {str(folder)!r} is not loaded: {reason}; get the model from a source you trust")


CONFIG, ADAPTERS = "config.json", "adapter_config.json"
MAX_CONFIG = 4 << 20  # bytes of a config
MAX_OTHER_JSON = 256 << 20  # bytes of any other JSON file, such as a tokenizer
MAX_LAYERS = 1_000  # building a layer costs time even where it costs no memory
MAX_ADAPTERS = 8  # length of a chain of adapters on adapters
# Whole numbers above 0, by the names that families of models give them, and the most that each may be.
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), MAX_LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "moe_intermediate_size"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), 1 << 14),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 1 << 14),
    **dict.fromkeys(("head_dim", "q_lora_rank", "kv_lora_rank"), 1 << 16),
    "vocab_size": 1 << 26,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 1 << 31),
}
POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta")


def check_model_path(path: str) -> None:
    """Raise ConfigError where `path` is a folder on this machine that no model can be read from."""
    check_chain(path)
    folder = Path(path).expanduser()
    try:
        if not folder.is_dir():
            return
        entries = [entry for entry in os.scandir(folder) if entry.name.endswith((".json", ".safetensors", ".jinja"))]
        for entry in sorted(entries, key=lambda each: each.name):
            _check_file(path, Path(entry.path))
    except OSError as error:
        raise ConfigError(f"model.path {path!r} cannot be read: {error.strerror or error}") from error
    if (folder / CONFIG).is_file():
        check_config(_mapping(folder / CONFIG), f"model.path {path!r}: {CONFIG}")


def _check_file(path: str, file: Path) -> None:
    try:
        other = what_else(file)
    except OSError as error:  # such as a link in a circle, or to nothing
        raise ConfigError(f"model.path {path!r}: {file.name} cannot be read: {error.strerror}") from error
    if other == "a folder":
        return
    if other is not None:
        raise ConfigError(f"model.path {path!r}: {file.name} is {other}, and a plain file is expected")
    if file.suffix == ".json" and file.stat().st_size > MAX_OTHER_JSON:
        raise ConfigError(f"model.path {path!r}: {file.name} is larger than {MAX_OTHER_JSON:,} bytes")


def _mapping(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        value = json.loads(read_plain(file, MAX_CONFIG))
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{file} is no JSON file that can be read ({reason})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold an object with named values, not {type(value).__name__}")
    return value


def check_config(config: Mapping[str, Any], place: str) -> None:
    """Raise where a value that becomes a size is none; sections such as `text_config` are looked into."""
    for section, values in _sections(config):
        for name, limit in SIZES.items():
            if (value := values.get(name)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                if isinstance(value, (list, dict)):  # some families give one for each layer
                    continue
                raise ConfigError(f"{place}: {section}{name} is {value!r:.60}, and must be a whole number")
            if not 0 < value <= limit:
                raise ConfigError(f"{place}: {section}{name} is {value:.60g}, and must be from 1 to {limit:,}")
        for name in POSITIVE:
            if (value := values.get(name)) is None:
                continue
            wrong = isinstance(value, bool) or not isinstance(value, (int, float))
            if wrong or not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{place}: {section}{name} is {value!r:.60}, and must be a number above 0")
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(f"{place}: model_type is {kind!r:.60}, and must be text")


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", config
    for name, value in config.items():
        if name.endswith("_config") and isinstance(value, dict):
            yield f"{name}.", value


# -- adapters -----------------------------------------------------------------------------------------------------


def check_chain(path: str) -> None:
    """Raise where adapters name themselves as the model they are for, in a circle or without an end."""
    seen: list[str] = []
    while True:
        folder = Path(path).expanduser()
        try:
            is_adapters = stat.S_ISREG((folder / ADAPTERS).stat().st_mode)
            key = str(folder.resolve())
        except (OSError, ValueError, RuntimeError):
            return
        if not is_adapters:
            return
        if key in seen:
            raise ConfigError(
                f"model.path {seen[0]!r} holds adapters whose base_model_name_or_path leads back to {key!r}: name the "
                "model that they were trained on"
            )
        seen.append(key)
        if len(seen) > MAX_ADAPTERS:
            raise ConfigError(f"model.path {seen[0]!r} holds adapters on adapters, more than {MAX_ADAPTERS} deep")
        check_adapters(folder)
        path = str(_mapping(folder / ADAPTERS).get("base_model_name_or_path") or "")
        if not path:
            return


def check_adapters(folder: Path) -> None:
    """Raise where the config of adapters is none."""
    saved, place = _mapping(folder / ADAPTERS), folder / ADAPTERS
    for name in ("r", "lora_alpha"):
        value = saved.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1 << 16:
            raise ConfigError(f"{place}: {name} is {value!r:.60}, and must be a number from 1 to 65,536")
    if not isinstance(saved["r"], int):
        raise ConfigError(f"{place}: r is {saved['r']!r:.60}, and must be a whole number")
    targets = saved.get("target_modules")
    texts = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not (isinstance(targets, str) or (texts and targets)):
        raise ConfigError(f"{place}: target_modules must be text, or a list of names of layers")
    base = saved.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{place}: base_model_name_or_path is {base!r:.60}, and must be text")
