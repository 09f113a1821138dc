"""A model's tokenizer and limits, before its weights are loaded, and whether two models share a tokenizer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from tether.data.sources import reachable
from tether.errors import ConfigError
from tether.hub.catalog import resolve_model_path
from tether.hub.folder_check import check_folder, check_hub_copy, check_model_path
from tether.hub.tiny_model import tiny_tokenizer
from tether.models.ends import find_ends
from tether.models.load import NO_LIMIT, TINY, LoadedModel, context_length
from tether.models.lora import CONFIG as ADAPTER_CONFIG
from tether.models.lora import saved_config

TINY_CONTEXT = 256  # of models.tiny.tiny_model


@dataclass(frozen=True)
class TextModel:
    """A model as texts see it."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    end_id: int  # what ends an answer in training records

    @classmethod
    def of(cls, name: str, loaded: LoadedModel) -> TextModel:
        """Of a model that is loaded already."""
        return cls(name, loaded.tokenizer, loaded.context_length, loaded.end_id)


def read_tokenizer(path: str) -> TextModel:
    """The tokenizer and the context length of the model that `load_causal_lm` would load for this path."""
    if path == TINY:
        tiny = tiny_tokenizer()
        return TextModel(path, tiny, TINY_CONTEXT, _end_id(path, tiny))
    check_model_path(path)
    folder = Path(path).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        base = str(saved_config(folder).get("base_model_name_or_path") or "")
        if base:
            return read_tokenizer(base)
        own: PreTrainedTokenizerBase = _read(AutoTokenizer, path)
        return TextModel(path, own, NO_LIMIT, _end_id(path, own))
    found = resolve_model_path(path)
    tokenizer: PreTrainedTokenizerBase = _read(AutoTokenizer, found)
    config = _read(AutoConfig, found)
    return TextModel(path, tokenizer, context_length(config)[0], _end_id(found, tokenizer, config))


def _end_id(path: str, tokenizer: PreTrainedTokenizerBase, config: Any = None) -> int:
    """The end token that `load_causal_lm` would append to this model's training records."""
    generation = None
    if config is not None:
        with contextlib.suppress(ConfigError):  # many models have no generation_config.json
            generation = _read(GenerationConfig, path)
    ends = find_ends(tokenizer, config, generation, len(tokenizer))
    if ends is None:
        raise ConfigError(f"model.path {path!r} names no end token: set eos_token in its tokenizer_config.json")
    return ends.appended


def _read(kind: Any, path: str) -> Any:
    """From the local cache first, and only then from the network; no code of the repository is run."""
    local = Path(path).expanduser()
    name = str(local) if local.is_dir() else path
    if local.is_dir():
        check_folder(local)
    else:
        check_hub_copy(name)
    try:
        return kind.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a file that somebody made can bring any of a library's errors
        if local.is_dir() or HF_HUB_OFFLINE or not reachable(ENDPOINT):
            raise _unreadable(path, error) from None
    try:
        return kind.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: Exception) -> ConfigError:
    reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return ConfigError(f"model.path {path!r} has no tokenizer that can be read: {reason}")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved beside a reward model."""
    check_folder(folder, "reward model")
    try:
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"{folder} has no tokenizer beside the reward model: save the one it was trained with"
        ) from error
    return cast(PreTrainedTokenizerBase, loaded)


def tokenizer_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """In what two tokenizers differ, in a few words; None where ids of one are ids of the other."""
    pairs = {
        "vocabulary size": (len(ours), len(theirs)),
        "end token id": (ours.eos_token_id, theirs.eos_token_id),
        "first token id": (ours.bos_token_id, theirs.bos_token_id),
    }
    for name, (one, other) in pairs.items():
        if one != other:
            return f"{name} {other}, not {one}"
    if ours is not theirs and ours.get_vocab() != theirs.get_vocab():
        return "equally many tokens, with other ids"
    templates = [str(getattr(one, "chat_template", None) or "").strip() for one in (ours, theirs)]
    return "another chat template" if templates[0] != templates[1] else None
