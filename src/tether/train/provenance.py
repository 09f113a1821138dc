"""What a run depends on, and whether it changed: weights, config, tokenizer, chat template, data, other models' files.

Every checkpoint keeps digests of them, and a run resumes only where they are the same. Config values and the tokenizer
count too: they change what is computed while every weight stays the same.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from tether.config.allowed_code import code_names
from tether.config.recipes import Recipe
from tether.data.records import tokenizer_digest
from tether.errors import ConfigError
from tether.files import file_digest, read_plain_json
from tether.models.load import LoadedModel
from tether.models.save import weights_digest
from tether.protocols import StepHook
from tether.rewards.agree import locate
from tether.rewards.consent import current
from tether.store.checkpoints import Checkpoint
from tether.store.database.records import RecordSource
from tether.store.folder import RunFolder
from tether.store.header import RunHeader, flat, origin_trouble, read_header
from tether.store.history import Identity, runs_by_id, take_over
from tether.store.lineage import describe_environment, models_of, sources_of
from tether.train.hooks import RunContext

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
BITS_DEPEND_ON = ("torch", "threads", "processor", "device")  # keys of the environment
# Keys of a checkpoint's values; checkpoints of earlier versions have them too.
SOURCES, MODELS, ENVIRONMENT, HEADER = "stands_on", "ground", "environment", "run"


class Provenance(StepHook):
    """Finds out which run this is and what it depends on; refuses to resume where that changed."""

    def __init__(self, loaded: dict[str, Any]) -> None:
        self.loaded = loaded  # `model_digests` of the policy before training changes it

    def begin(self, run: RunContext) -> None:
        """Identify the run, and digest what it depends on."""
        self.run = run
        run.identity = identify(run)
        run.sources = [*fork_source(run.folder), *sources_of(run.config, run.workspace)]
        run.environment = environment_of(run.policy, run.recipe.run.seed)
        self.models = self.loaded | {"models": other_models(list(models_of(run.config)))}
        self.sources = {
            "model": self.loaded["weights"],
            **{f"{source.role} {source.source}": source.sha256 for source in run.sources if source.sha256 is not None},
        }

    def state(self) -> dict[str, Any]:
        """The digests, the environment and the header of the run."""
        run = self.run
        assert run.identity is not None
        return {
            SOURCES: self.sources,
            ENVIRONMENT: dict(run.environment),
            MODELS: self.models,
            HEADER: run.identity.header.record(),
        }

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise ConfigError where models or data changed; warn where the environment may change the last bits."""
        run, path = self.run, self.run.path
        if changed := model_changes(checkpoint, self.models, run.environment):
            raise ConfigError(
                f"{', '.join(changed)} changed since the run {path} began, so it cannot be resumed: "
                "put the old one back, or start a new run"
            )
        self._check_sources(checkpoint)
        before = checkpoint.values[ENVIRONMENT]
        changed = [name for name in BITS_DEPEND_ON if before.get(name) != run.environment.get(name)]
        if changed:
            words = ", ".join(f"{name} {before.get(name)} -> {run.environment.get(name)}" for name in changed)
            run.warn(f"The environment changed since the run was stopped ({words}): the last bits may differ.")
        if "device" in changed:
            run.warn(f"The run was started in {run.recipe.model.dtype} and continues in it.")

    def _check_sources(self, checkpoint: Checkpoint) -> None:
        run, path = self.run, self.run.path
        before = checkpoint.values[SOURCES]
        changed = [role for role, digest in before.items() if self.sources.get(role) != digest]
        if not changed:
            return
        models = [role for role in changed if role.partition(" ")[0] in ("critic", "reward", "reference")]
        repair = "or start a new run"
        if not models:  # records and prompts: where they were repaired, what was learned so far is still good
            more = f" --run.steps {2 * checkpoint.step}" if checkpoint.step >= run.total else ""
            repair = f"or continue with the new one as a fork: tether fork {quote(str(path))}{more}"
        raise ConfigError(
            f"what the recipe names as {changed[0]} changed since the run {path} began, so it cannot "
            f"be resumed: put the old one back, {repair}"
        )


def identify(run: RunContext) -> Identity:
    """The run by its own id. A resumed run brings its records along, and may find that its folder is a copy."""
    path, notices = run.path, list[str]()
    found = read_header(path, notices.append)
    header = found or RunHeader(secrets.token_hex(8), run.config, run.folder.origin or {})
    if not run.resumes:
        return Identity(header, runs_by_id(run.workspace.directory, path))
    identity = take_over(run.workspace, path, header, is_new=found is None)
    if found is not None and (problem := origin_trouble(path, found)):
        notices.append(problem)
    if notices or identity.header != found:  # damaged, a copy, or of an earlier version that wrote none
        with run.storing("run.json"):
            identity.header.write(path)
    return Identity(identity.header, identity.moved, (*notices, *identity.told))


def fork_source(folder: RunFolder) -> list[RecordSource]:
    """The run that this one is a fork of, where it is one."""
    if (origin := folder.origin) is None:
        return []
    return [RecordSource("fork", f"{origin['folder']}, step {origin['step']}", run=origin["run"])]


def environment_of(policy: LoadedModel, seed: int) -> dict[str, Any]:
    """Versions, device and threads, and a digest of the tokenizer."""
    environment = describe_environment(seed=seed, device=str(policy.model.device))
    return environment | {"tokenizer": tokenizer_digest(policy.tokenizer)}


def model_digests(policy: LoadedModel) -> dict[str, Any]:
    """The policy as it was loaded: digests of its weights, buffers and tokenizer, and its config."""
    config = flat(_plain(policy.model.config.to_dict()))
    return {
        "weights": weights_digest(policy.model),
        "buffers": _buffers(policy),
        "config": {name: value for name, value in config.items() if name.partition(".")[0] not in IGNORED},
        "tokenizer": dict(_tokenizer(policy)),
    }


def _plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))


def _buffers(policy: LoadedModel) -> str:
    digest = hashlib.sha256()
    for name, buffer in policy.model.named_buffers():
        digest.update(f"{name} {buffer.dtype} {tuple(buffer.shape)}".encode())
        digest.update(buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tokenizer(policy: LoadedModel) -> Iterator[tuple[str, Any]]:
    """Each part of the tokenizer with a digest or a short value."""
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
    """Digests of the small files of each other model in a recipe (critic, reward), and of the base of its adapters."""
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
    """A digest of the content for JSON, of the bytes for any other file."""
    if path.suffix == ".json":
        try:
            return _digest(read_plain_json(path))
        except (OSError, ValueError):
            pass
    return file_digest(path)


def _base(folder: Path) -> Path | None:
    """The folder of the base model of saved adapters."""
    try:
        base = read_plain_json(folder / "adapter_config.json").get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(base) if base and Path(base).is_dir() else None


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


def model_changes(checkpoint: Checkpoint, now: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """What of the models changed since a checkpoint, in words; `now` is of `model_digests` and `other_models`."""
    then = checkpoint.values[ENVIRONMENT]
    if (before := checkpoint.values.get(MODELS)) is not None:
        same = all(then.get(name) == environment.get(name) for name in ("transformers", "tokenizers"))
        return changes(before, now, same_version=same)
    weights = checkpoint.values[SOURCES]["model"] != now["weights"]  # an earlier version kept these alone
    tokens = "tokenizer" in then and then["tokenizer"] != environment["tokenizer"]
    return [
        *(["the model's weights"] if weights else []),
        *(["the tokenizer's vocabulary or chat template"] if tokens else []),
    ]


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, same_version: bool) -> list[str]:
    """What differs, in words; keys that only one version of transformers has are ignored."""
    found: list[str] = []
    if before["weights"] != now["weights"]:
        found.append("the model's weights")
    elif same_version and before["buffers"] != now["buffers"] and before["config"] == now["config"]:
        found.append("the model's buffers")
    if config := _config_changes(before["config"], now["config"], same_version):
        found.append(f"the model's config ({config})")
    for part, value in before["tokenizer"].items():
        # Another version may serialise a part differently, but not the vocabulary or the template.
        if (same_version or part in ("vocabulary", "chat template", "special tokens")) and now["tokenizer"].get(
            part
        ) != value:
            found.append("the chat template" if part == "chat template" else f"the tokenizer's {part}")
    if "reference" in before and now.get("reference", before["reference"]) != before["reference"]:
        found.append("the weights of kl.reference")
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
