"""Looking at a model's folder before anything is read or allocated for it.

What a config says becomes sizes of tensors and numbers of layers. A size that is a text, negative or absurd is refused
here, in a sentence, before a library stumbles over it or memory is asked for.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tether.errors import ConfigError
from tether.plain_file import read_plain, what_else

CONFIG, ADAPTERS = "config.json", "adapter_config.json"
MAX_CONFIG = 4 << 20  # bytes of a config
MAX_JSON = 256 << 20  # bytes of any other JSON file, such as a tokenizer
MAX_LAYERS = 1_000  # building a layer costs time even where it costs no memory
MAX_ADAPTERS = 8  # adapters that stand on adapters that stand on ...
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
    if file.suffix == ".json" and file.stat().st_size > MAX_JSON:
        raise ConfigError(f"model.path {path!r}: {file.name} is larger than {MAX_JSON:,} bytes")


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
        for name, most in SIZES.items():
            if (value := values.get(name)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                if isinstance(value, (list, dict)):  # some families give one for each layer
                    continue
                raise ConfigError(f"{place}: {section}{name} is {value!r:.60}, and must be a whole number")
            if not 0 < value <= most:
                raise ConfigError(f"{place}: {section}{name} is {value:.60g}, and must be from 1 to {most:,}")
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
