"""From votes to a reward model to a policy, and from demonstrations to a policy: files, recipes, commands.

The recipes are derived from the recipe of the source run. `roles.mode`, its layers or adapters and the base model stay
the same, because a reward model that shares a backbone with PPO must be trained on that backbone. Learning rates depend
on the mode: a rate for a few layers ruins a whole model, and a rate for a whole model barely changes a few layers.

Everything is written before a training starts: the records, the prompts, a recipe for each run, and beside each run
`votes.json`, the ids of the votes that it trains on. A record is one item with all its answers as they were sampled,
so answers that were ranked together are trained on together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from tether.config.allowed_code import code_names, names_of_record
from tether.config.load import as_flags, load_recipe
from tether.errors import ConfigError, DataError, StorageError
from tether.rewards.agree import agree_to_names
from tether.store.folder import write_whole

# -- recipes ------------------------------------------------------------------------------------------------------

RATES = {"separate": 1e-5, "lora": 1e-4, "shared_backbone": 5e-4}
"""Learning rates by `roles.mode`, for SFT, reward models and critics: all weights, adapters, the top layers."""
POLICY_RATES = {"separate": 3e-6, "lora": 1e-4, "shared_backbone": 4e-4}
"""Learning rates of a PPO policy, if the source run has none."""

ROLES = ("mode", "lora_rank", "lora_alpha", "lora_targets", "trainable_layers", "offload_reference")
OPTIMIZER = ("betas", "epsilon", "weight_decay", "max_grad_norm", "micro_batch_tokens", "master_weights", "state")
RL_SECTIONS = ("rollout", "kl", "evaluation", "ppo", "ptx")
TEMPLATE = ("chat_template_kwargs",)  # keys of `data` that affect how prompts are rendered
RL_METHODS = ("ppo", "reinforce", "rloo", "grpo", "trpo")

Config = Mapping[str, Any]


def reward_recipe(config: Config, model: str, settings: Config, data: Config) -> dict[str, Any]:
    """A reward model from the source run's model, in its mode."""
    return _supervised(config, model, settings, data, "critic_lr")


def sft_recipe(config: Config, model: str, settings: Config, data: Config) -> dict[str, Any]:
    """Supervised fine-tuning of the source run's model, in its mode."""
    return _supervised(config, model, settings, data, "policy_lr")


def _supervised(config: Config, model: str, settings: Config, data: Config, rate: str) -> dict[str, Any]:
    roles = _kept(config, "roles", ROLES)
    optimizer = _kept(config, "optimizer", OPTIMIZER)
    optimizer |= {rate: RATES[_mode(roles, settings)], "schedule": "linear", "warmup": 0.1}
    records = {**_kept(config, "data", TEMPLATE), **data}
    return {"model": _model(config, model), "roles": roles, "optimizer": optimizer, "data": records}


def ppo_recipe(config: Config, model: str, settings: Config, reward_model: str, prompts: str) -> dict[str, Any]:
    """PPO against the reward model, otherwise with the source run's settings.

    Its prompts are those of the source run, which has more than were judged; without a source run, the judged ones. The
    source run's other reward parts stay. The new reward model replaces its reward model, or else the task's own reward.
    """
    roles = _section(config, "roles")
    mode = _mode(roles, settings)
    recipe: dict[str, Any] = {"model": _model(config, model), "roles": roles}
    recipe |= {name: _section(config, name) for name in RL_SECTIONS if config.get(name)}
    if config.get("task"):
        recipe |= {name: _section(config, name) for name in ("task", "data") if config.get(name)}
    else:
        template = _kept(config, "data", TEMPLATE)
        recipe |= {"task": {"prompts": prompts}} | ({"data": template} if template else {})
    recipe["optimizer"] = _rl_optimizer(config, mode)
    if roles.get("critic_init"):  # it named the old reward model
        roles["critic_init"] = reward_model
    part = {"kind": "model", "path": reward_model} | ({} if mode == "separate" else {"shared": True})
    reward = _section(config, "reward") if config.get("method") in (None, *RL_METHODS) else {}
    reward["parts"] = _parts(reward.get("parts", ()), part)
    return recipe | {"reward": reward}


def _parts(before: Sequence[Mapping[str, Any]], part: dict[str, Any]) -> list[dict[str, Any]]:
    """The reward parts with the new model in place of the first old one, or added at the front."""
    models = [place for place, one in enumerate(before) if one.get("kind") in ("model", "remote")]
    if not models:
        return [part, *(dict(one) for one in before)]
    old = before[models[0]]
    names = (
        ("name", "weight", "dtype", "device", "micro_batch_tokens") if old["kind"] == "model" else ("name", "weight")
    )
    kept = {name: old[name] for name in names if old.get(name) is not None}
    return [
        kept | part if place == models[0] else dict(one)
        for place, one in enumerate(before)
        if place == models[0] or place not in models
    ]


def _rl_optimizer(config: Config, mode: str) -> dict[str, Any]:
    """The source run's optimizer if it trained by RL in this mode; a missing critic rate comes from the mode."""
    if config.get("method") in (None, "ppo", "trpo") and config.get("optimizer"):
        return _section(config, "optimizer")
    if config.get("method") in RL_METHODS:
        return _section(config, "optimizer") | {"critic_lr": RATES[mode]}
    return _kept(config, "optimizer", OPTIMIZER) | {"policy_lr": POLICY_RATES[mode], "critic_lr": RATES[mode]}


def _mode(roles: Config, settings: Config) -> str:
    """The mode of a recipe, with the user's settings applied."""
    mode = settings.get("roles.mode", roles.get("mode", "separate"))
    return mode if mode in RATES else "separate"


def _model(config: Config, model: str) -> dict[str, Any]:
    """The source run's `model` section with another path; automatic settings stay automatic."""
    kept = {name: value for name, value in _section(config, "model").items() if value != "auto"}
    return kept | {"path": model}


def _section(config: Config, name: str) -> dict[str, Any]:
    section = config.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def _kept(config: Config, name: str, keys: Sequence[str]) -> dict[str, Any]:
    section = _section(config, name)
    return {key: section[key] for key in keys if key in section}


# -- records ------------------------------------------------------------------------------------------------------

VOTES = "votes.json"
MIN_RECORDS = 4

Record = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingRequest:
    """A training that a person requested. `config` is the recipe of the source run, if there is one."""

    name: str
    queue: int
    model: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    folder: Path | None = None  # of that run
    reward_steps: int = 60
    ppo_steps: int = 40
    sft_steps: int = 60
    considered: Sequence[int] = ()  # all votes, including ties and skips
    reward_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ppo_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sft_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Split:
    """Training records and held-out records."""

    train: Sequence[Record]
    held_out: Sequence[Record]

    @property
    def votes(self) -> list[int]:
        """The ids of the votes in the training records."""
        return sorted({vote for record in self.train for vote in record["votes"]})


def decided_pairs(records: Sequence[Record]) -> int:
    """Number of pairs of answers that the rankings decide."""
    return sum(one != other for record in records for one, other in combinations(record.get("ranks", ()), 2))


def split_records(records: Sequence[Record], fraction: float, what: str = "items have a clear choice") -> Split:
    """Split by a hash of the prompt: a held-out prompt stays held out as votes grow, and no prompt is in both parts."""
    good = [record for record in records if _can_be_learned(record)]
    if len(good) < MIN_RECORDS:
        raise DataError(f"{len(good)} {what}, and training needs {MIN_RECORDS} or more: judge more items")
    by_lot = sorted({_asked(record) for record in good}, key=_lot)
    least = {prompt for prompt in by_lot if _lot(prompt) < fraction}
    if fraction and not least:
        least = set(by_lot[:1])
    out: set[str] = set()
    held_out = 0
    for prompt in by_lot:
        size = sum(_asked(record) == prompt for record in good)
        if prompt in least and held_out + size <= len(good) // 2:
            out.add(prompt)
            held_out += size
    return Split(
        [record for record in good if _asked(record) not in out], [record for record in good if _asked(record) in out]
    )


def _asked(record: Record) -> str:
    """A key that identifies a record's prompt."""
    return json.dumps(record["prompt"] if "prompt" in record else record["messages"][:-1])


def _lot(prompt: str) -> float:
    return int.from_bytes(hashlib.sha256(f"held-out:{prompt}".encode()).digest()[:4]) / 2**32


def _can_be_learned(record: Record) -> bool:
    """Whether all texts are non-empty and valid Unicode, as training requires."""
    texts = list(record.get("answers", ()))
    if "messages" in record:
        texts.append(record["messages"][-1]["content"])
    prompt = record.get("prompt", record.get("messages", [])[:-1])
    asked = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    return all(text.strip() for text in texts) and any(text.strip() for text in asked) and _are_whole([*texts, *asked])


def _are_whole(texts: Sequence[str]) -> bool:
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- plans --------------------------------------------------------------------------------------------------------


def write_plan(directory: Path, wanted: TrainingRequest, split: Split) -> Path:
    """Write the files for a reward model and PPO; returns the plan's file. Wrong settings raise here."""

    def recipes(root: Path, data: Path) -> list[list[str]]:
        _write_lines(data / "prompts.jsonl", _prompts([*split.train, *split.held_out]))
        reward = reward_recipe(wanted.config, wanted.model, wanted.reward_settings, _data(data, split))
        reward["reward"] = {"batch_size": min(16, len(split.train))}
        reward["run"] = _run(directory, wanted, "reward", wanted.reward_steps)
        model = str(root / "reward" / "model")
        policy = ppo_recipe(wanted.config, wanted.model, wanted.ppo_settings, model, str(data / "prompts.jsonl"))
        policy["run"] = _run(directory, wanted, "ppo", wanted.ppo_steps)
        commands = [
            _command(root, "reward", reward, wanted.reward_settings),
            _command(root, "ppo", policy, wanted.ppo_settings),
        ]
        _, method, path, *flags = commands[1]
        names = code_names(load_recipe(method, path, flags))  # which come from the run that the policy goes on from
        agree_to_names(names, names_of_record(wanted.config), wanted.folder or root, flags)
        return commands

    return _written(directory, wanted, split, ("reward", "ppo"), recipes)


def write_sft_plan(directory: Path, wanted: TrainingRequest, split: Split) -> Path:
    """Write the files for supervised fine-tuning on demonstrations; returns the plan's file."""

    def recipes(root: Path, data: Path) -> list[list[str]]:
        recipe = sft_recipe(wanted.config, wanted.model, wanted.sft_settings, _data(data, split))
        recipe["sft"] = {"batch_size": min(16, len(split.train))}
        recipe["run"] = _run(directory, wanted, "sft", wanted.sft_steps)
        return [_command(root, "sft", recipe, wanted.sft_settings)]

    return _written(directory, wanted, split, ("sft",), recipes)


def _written(
    directory: Path,
    wanted: TrainingRequest,
    split: Split,
    runs: Sequence[str],
    recipes: Callable[[Path, Path], list[list[str]]],
) -> Path:
    root = directory / wanted.name
    data = root / "data"
    try:
        data.mkdir(parents=True, exist_ok=True)
        _write_lines(data / "train.jsonl", split.train)
        _write_lines(data / "held_out.jsonl", split.held_out)
        commands = recipes(root, data)
        for run in runs:
            (root / run).mkdir(exist_ok=True)
            write_whole(root / run / VOTES, _votes(wanted, split))
        plan = data / "plan.json"
        write_whole(plan, {"commands": commands})
    except OSError as error:
        raise StorageError(f"cannot write to {root} ({error.strerror})") from error
    return plan


def _votes(wanted: TrainingRequest, split: Split) -> dict[str, Any]:
    return {
        "queue": wanted.queue,
        "votes": split.votes,
        "considered": list(wanted.considered),
        "examples": len(split.train),
        "pairs": decided_pairs(split.train),
        "held_out_examples": len(split.held_out),
        "held_out_pairs": decided_pairs(split.held_out),
        "held_out_votes": sorted({vote for record in split.held_out for vote in record["votes"]}),
    }


def _data(data: Path, split: Split) -> dict[str, Any]:
    """The `data` section. Rows of sampled tokens are not cut: the limit is at least the longest of them."""
    longest = max((_longest(record) for record in [*split.train, *split.held_out]), default=0)
    section: dict[str, Any] = {"train": str(data / "train.jsonl")}
    if split.held_out:
        section["held_out"] = str(data / "held_out.jsonl")
    return section | ({"max_length": longest} if longest > DEFAULT_LENGTH else {})


DEFAULT_LENGTH = 1024  # default of data.max_length


def _longest(record: Record) -> int:
    ids = record.get("token_ids", ())
    return len(record.get("prompt_token_ids", ())) + max(map(len, ids), default=0)


def _run(directory: Path, wanted: TrainingRequest, run: str, steps: int) -> dict[str, Any]:
    return {"directory": str(directory), "name": f"{wanted.name}/{run}", "steps": steps}


def _command(root: Path, method: str, recipe: dict[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """`train METHOD RECIPE --key=value ...`, checked by parsing it as the command line will."""
    path = root / "data" / f"{method}.yaml"
    path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    flags = as_flags(settings)
    read = load_recipe(method, str(path), flags)
    if [read.run.directory, read.run.name, read.store.url] != [recipe["run"]["directory"], recipe["run"]["name"], None]:
        raise ConfigError("settings: Studio sets run.directory, run.name and store.url; leave them out")
    return ["train", method, str(path.absolute()), *flags]


def _prompts(records: Sequence[Record]) -> list[Record]:
    """The distinct prompts."""
    found = {_asked(record): record for record in records}
    kept = ("prompt", "tools")
    return [
        {"id": str(place)} | {name: record[name] for name in kept if name in record}
        for place, record in enumerate(found.values())
    ]


def _write_lines(path: Path, records: Sequence[Record]) -> None:
    path.write_text("".join(json.dumps(dict(record)) + "\n" for record in records), encoding="utf-8")
