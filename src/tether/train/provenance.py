"""What a run stands on, and what of it changed: weights, config, tokenizer, chat template, files of other models.

A checkpoint keeps it; a run goes on only where it is the same. Config values and the tokenizer change what is computed
while every weight stays as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tether.config.allowed_code import code_names
from tether.config.recipes import Recipe
from tether.files import file_digest, read_plain_json
from tether.models.load import LoadedModel
from tether.models.save import weights_digest
from tether.rewards.agree import locate
from tether.rewards.consent import current
from tether.store.header import flat

IGNORED = {
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"),
    *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "return_dict", "output_attentions"),
}
"""Of a config: what names a file or a version, or what a recipe decides."""
TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")
MODEL_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("chat_template.json", "scalar_head.json", "tokenizer.model", "spiece.model"),
)
MAX_NAMED = 4
COMPARED = ("algorithm", "rollout.engine", "model.loader")  # keys of code that a resumed run must find unchanged


def ground_of(policy: LoadedModel) -> dict[str, Any]:
    """What the policy is, as it was loaded: its weights and buffers, its config, its tokenizer."""
    config = flat(_plain(policy.model.config.to_dict()))
    return {
        "weights": weights_digest(policy.model),
        "buffers": _buffers(policy),
        "config": {name: value for name, value in config.items() if name.partition(".")[0] not in IGNORED},
        "tokenizer": dict(_tokenizer(policy)),
    }


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


def _buffers(policy: LoadedModel) -> str:
    digest = hashlib.sha256()
    for name, buffer in policy.model.named_buffers():
        digest.update(f"{name} {buffer.dtype} {tuple(buffer.shape)}".encode())
        digest.update(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tokenizer(policy: LoadedModel) -> Iterator[tuple[str, Any]]:
    """The tokenizer part by part, each with a digest or a short value."""
    tokenizer: Any = policy.tokenizer
    yield "vocabulary", _digest(sorted(tokenizer.get_vocab().items()))
    yield "chat template", _digest(getattr(tokenizer, "chat_template", None))
    yield "special tokens", [policy.end_id, *policy.other_end_ids, policy.pad_id, tokenizer.bos_token_id]
    yield "context length", policy.context_length
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        yield "merges", _digest(parts.get("model", {}).get("merges"))
        for name in TOKENIZER_PARTS:
            yield name.replace("_", "-"), _digest(parts.get(name))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def other_models(models: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """The small files of each other model that a recipe names (critic, reward), and of what its adapters stand on."""
    found: dict[str, dict[str, str]] = {}
    for role, path in models:
        folder = Path(path).expanduser()
        folder = folder / "model" if (folder / "model").is_dir() else folder
        if role != "model" and folder.is_dir():
            found[f"{role} {path}"] = _files(folder)
            if (base := _base(folder)) is not None:
                weights = {file.name: file_digest(file) for file in sorted(base.glob("*.safetensors"))}
                found[f"{role} {path}, its base {base}"] = _files(base) | weights
    return found


def _files(folder: Path) -> dict[str, str]:
    return {name: _file(folder / name) for name in MODEL_FILES if (folder / name).is_file()}


def _file(path: Path) -> str:
    """JSON by what it says, everything else by its bytes."""
    if path.suffix == ".json":
        try:
            return _digest(read_plain_json(path))
        except (OSError, ValueError):
            pass
    return file_digest(path)


def _base(folder: Path) -> Path | None:
    """The folder of the model that saved adapters stand on."""
    try:
        said = read_plain_json(folder / "adapter_config.json").get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(said) if said and Path(said).is_dir() else None


def code_digests(recipe: Recipe) -> dict[str, str]:
    """By key and name: the SHA-256 of the user's code in `COMPARED` keys, and of what it imports beside it.

    Trackers and doctor rules leave the weights as they are, and a reward may be corrected before a run is resumed. A
    package that was allowed by its name has no digest.
    """
    found: dict[str, str] = {}
    for name in code_names(recipe):
        if name.field in COMPARED:
            place = name.reference.rpartition(":")[0]
            code = locate(place, name.field, current().root, current().allowed)
            found |= {f"{name.field} {name.reference}": code.digest} if code.digest else {}
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, same_version: bool) -> list[str]:
    """What differs, in words; keys that only one version of transformers knows are passed over."""
    found: list[str] = []
    if before["weights"] != now["weights"]:
        found.append("the model's weights")
    elif same_version and before["buffers"] != now["buffers"] and before["config"] == now["config"]:
        found.append("the model's buffers")
    if told := _config_changes(before["config"], now["config"], same_version):
        found.append(f"the model's config ({told})")
    for part, said in before["tokenizer"].items():
        # A serialised part may be spelt anew by another version; the vocabulary and the template may not.
        if (same_version or part in ("vocabulary", "chat template", "special tokens")) and now["tokenizer"].get(
            part
        ) != said:
            found.append("the chat template" if part == "chat template" else f"the tokenizer's {part}")
    for name, files in before.get("models", {}).items():
        there = now.get("models", {}).get(name, {})
        if names := sorted(file for file in {**files, **there} if files.get(file) != there.get(file)):
            found.append(f"what the recipe names as {name} ({', '.join(names[:MAX_NAMED])})")
    if (code := now.get("code")) is not None:  # not asked where a model is only taken out of a checkpoint
        changed = [name for name, digest in before.get("code", {}).items() if code.get(name) != digest]
        found += [f"the code that the recipe names as {name}" for name in changed]
    return found


def _config_changes(before: Mapping[str, Any], now: Mapping[str, Any], same_version: bool) -> str:
    keys = [key for key in {**before, **now} if same_version or (key in before and key in now)]
    changed = [key for key in keys if before.get(key) != now.get(key)]
    words = [f"{key} is {json.dumps(now.get(key))}, was {json.dumps(before.get(key))}" for key in changed[:MAX_NAMED]]
    return ", ".join(words) + (f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else "")
