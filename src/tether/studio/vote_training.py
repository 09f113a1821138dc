"""From votes to a reward model to a policy, and from demonstrations to a policy: files, recipes, commands.

The recipes of trainings that the page starts, made of the recipe of the run that they go on from.

What a run shares between its roles (`roles.mode`, its layers or adapters, the base model) goes on as it was: a reward
model that PPO is to share a backbone with must stand on that backbone. Learning rates suit the mode, because
a rate for a few layers ruins a whole model, and a rate for a whole model leaves a few layers where they were.

From votes to a reward model to a policy, and from demonstrations to a policy: the files and commands that it takes.

Everything that a training needs is written before it starts: the records, the prompts, a recipe for each run, and
beside each run `votes.json`, the ids of the very votes that it learns from. A record is an item as it was sampled, with
all its answers: what was ranked together is learned together.
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

RATES = {"separate": 1e-5, "lora": 1e-4, "shared_backbone": 5e-4}
"""By `roles.mode`, of SFT, reward models and critics: all weights, adapters, the top layers."""
POLICY_RATES = {"separate": 3e-6, "lora": 1e-4, "shared_backbone": 4e-4}
"""The same for a policy in PPO, where the source run has none to go on with."""

ROLES = ("mode", "lora_rank", "lora_alpha", "lora_targets", "trainable_layers", "offload_reference")
OPTIMIZER = ("betas", "epsilon", "weight_decay", "max_grad_norm", "micro_batch_tokens", "master_weights", "state")
RL_SECTIONS = ("rollout", "kl", "evaluation", "ppo", "ptx")
TEMPLATE = ("chat_template_kwargs",)  # of `data`: what the prompts were rendered with
RL_METHODS = ("ppo", "reinforce", "rloo", "grpo", "trpo")

Config = Mapping[str, Any]


def reward_recipe(config: Config, model: str, settings: Config, data: Config) -> dict[str, Any]:
    """A reward model on the source run's model, in its mode."""
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
    """PPO against the reward model, otherwise as the source run did it.

    Its prompts are those of the source run, which are more than were judged; without one, those that were judged. The
    source run's other reward parts stay. The reward model takes the place of its reward model, or else of the task's
    own reward.
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
    if roles.get("critic_init"):  # it started as the reward model of before
        roles["critic_init"] = reward_model
    part = {"kind": "model", "path": reward_model} | ({} if mode == "separate" else {"shared": True})
    reward = _section(config, "reward") if config.get("method") in (None, *RL_METHODS) else {}
    reward["parts"] = _parts(reward.get("parts", ()), part)
    return recipe | {"reward": reward}


def _parts(before: Sequence[Mapping[str, Any]], part: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of before, with the new reward model where the first of theirs stood, or first of all."""
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
    """The source run's where it trained by RL, which was made for this mode; a critic that it had not, by the mode."""
    if config.get("method") in (None, "ppo", "trpo") and config.get("optimizer"):
        return _section(config, "optimizer")
    if config.get("method") in RL_METHODS:
        return _section(config, "optimizer") | {"critic_lr": RATES[mode]}
    return _kept(config, "optimizer", OPTIMIZER) | {"policy_lr": POLICY_RATES[mode], "critic_lr": RATES[mode]}


def _mode(roles: Config, settings: Config) -> str:
    """The mode that a recipe has, with what the person set on top of it."""
    mode = settings.get("roles.mode", roles.get("mode", "separate"))
    return mode if mode in RATES else "separate"


def _model(config: Config, model: str) -> dict[str, Any]:
    """The source run's `model` section with another path; what it left to Tether is left to Tether again."""
    kept = {name: value for name, value in _section(config, "model").items() if value != "auto"}
    return kept | {"path": model}


def _section(config: Config, name: str) -> dict[str, Any]:
    section = config.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def _kept(config: Config, name: str, keys: Sequence[str]) -> dict[str, Any]:
    section = _section(config, name)
    return {key: section[key] for key in keys if key in section}


VOTES = "votes.json"
MIN_RECORDS = 4

Record = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingRequest:
    """What a person asked for. `config` is the recipe of the run that the policy goes on from, where there is one."""

    name: str
    queue: int
    model: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    folder: Path | None = None  # of that run
    reward_steps: int = 60
    ppo_steps: int = 40
    sft_steps: int = 60
    considered: Sequence[int] = ()  # every vote that there was, ties and skips too
    reward_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ppo_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sft_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Split:
    """Records to learn from, and records to be measured on."""

    train: Sequence[Record]
    held_out: Sequence[Record]

    @property
    def votes(self) -> list[int]:
        """The votes that are learned from."""
        return sorted({vote for record in self.train for vote in record["votes"]})


def decided_pairs(records: Sequence[Record]) -> int:
    """How many pairs of answers rankings tell apart."""
    return sum(one != other for record in records for one, other in combinations(record.get("ranks", ()), 2))


def split_records(records: Sequence[Record], fraction: float, what: str = "items have a clear choice") -> Split:
    """By a hash of the prompt: what was held out once stays held out as votes grow, and no prompt is in both parts."""
    good = [record for record in records if _can_be_learned(record)]
    if len(good) < MIN_RECORDS:
        raise DataError(f"{len(good)} {what}, and training needs {MIN_RECORDS} or more: go on judging")
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
    """What identifies a record's prompt."""
    return json.dumps(record["prompt"] if "prompt" in record else record["messages"][:-1])


def _lot(prompt: str) -> float:
    return int.from_bytes(hashlib.sha256(f"held-out:{prompt}".encode()).digest()[:4]) / 2**32


def _can_be_learned(record: Record) -> bool:
    """Texts that are not empty and made of whole characters, as training asks for."""
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
    """Write all that a reward model and PPO need; the plan's file. A setting that is wrong is told here."""

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
    """Write all that supervised fine-tuning on demonstrations needs; the plan's file."""

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


DEFAULT_LENGTH = 1024  # of data.max_length


def _longest(record: Record) -> int:
    ids = record.get("token_ids", ())
    return len(record.get("prompt_token_ids", ())) + max(map(len, ids), default=0)


def _run(directory: Path, wanted: TrainingRequest, run: str, steps: int) -> dict[str, Any]:
    return {"directory": str(directory), "name": f"{wanted.name}/{run}", "steps": steps}


def _command(root: Path, method: str, recipe: dict[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """`train METHOD RECIPE --key=value ...`, tried by reading it as the command line will."""
    path = root / "data" / f"{method}.yaml"
    path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    flags = as_flags(settings)
    read = load_recipe(method, str(path), flags)
    if [read.run.directory, read.run.name, read.store.url] != [recipe["run"]["directory"], recipe["run"]["name"], None]:
        raise ConfigError("settings: the page says where a run goes; leave run.directory, run.name and store.url out")
    return ["train", method, str(path.absolute()), *flags]


def _prompts(records: Sequence[Record]) -> list[Record]:
    """Each prompt once."""
    found = {_asked(record): record for record in records}
    kept = ("prompt", "tools")
    return [
        {"id": str(place)} | {name: record[name] for name in kept if name in record}
        for place, record in enumerate(found.values())
    ]


def _write_lines(path: Path, records: Sequence[Record]) -> None:
    path.write_text("".join(json.dumps(dict(record)) + "\n" for record in records), encoding="utf-8")
