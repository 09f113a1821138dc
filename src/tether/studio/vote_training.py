"""From votes to a reward model to a policy, and from demonstrations to a policy: the files and commands that it takes.

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

from tether.config.code_names import code_names, names_of_record
from tether.config.load import as_flags, load_recipe
from tether.errors import ConfigError, DataError, StorageError
from tether.rewards.agree import agree_to_names
from tether.store.folder import write_whole
from tether.studio.vote_recipes import ppo_recipe, reward_recipe, sft_recipe

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
    kept_aside = 0
    for prompt in by_lot:
        size = sum(_asked(record) == prompt for record in good)
        if prompt in least and kept_aside + size <= len(good) // 2:
            out.add(prompt)
            kept_aside += size
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


def write_plan(directory: Path, wish: TrainingRequest, split: Split) -> Path:
    """Write all that a reward model and PPO need; the plan's file. A setting that is wrong is told here."""

    def recipes(root: Path, data: Path) -> list[list[str]]:
        _write_lines(data / "prompts.jsonl", _prompts([*split.train, *split.held_out]))
        reward = reward_recipe(wish.config, wish.model, wish.reward_settings, _data(data, split))
        reward["reward"] = {"batch_size": min(16, len(split.train))}
        reward["run"] = _run(directory, wish, "reward", wish.reward_steps)
        model = str(root / "reward" / "model")
        policy = ppo_recipe(wish.config, wish.model, wish.ppo_settings, model, str(data / "prompts.jsonl"))
        policy["run"] = _run(directory, wish, "ppo", wish.ppo_steps)
        commands = [
            _command(root, "reward", reward, wish.reward_settings),
            _command(root, "ppo", policy, wish.ppo_settings),
        ]
        _, method, path, *flags = commands[1]
        names = code_names(load_recipe(method, path, flags))  # which come from the run that the policy goes on from
        agree_to_names(names, names_of_record(wish.config), wish.folder or root, flags)
        return commands

    return _written(directory, wish, split, ("reward", "ppo"), recipes)


def write_sft_plan(directory: Path, wish: TrainingRequest, split: Split) -> Path:
    """Write all that supervised fine-tuning on demonstrations needs; the plan's file."""

    def recipes(root: Path, data: Path) -> list[list[str]]:
        recipe = sft_recipe(wish.config, wish.model, wish.sft_settings, _data(data, split))
        recipe["sft"] = {"batch_size": min(16, len(split.train))}
        recipe["run"] = _run(directory, wish, "sft", wish.sft_steps)
        return [_command(root, "sft", recipe, wish.sft_settings)]

    return _written(directory, wish, split, ("sft",), recipes)


def _written(
    directory: Path,
    wish: TrainingRequest,
    split: Split,
    runs: Sequence[str],
    recipes: Callable[[Path, Path], list[list[str]]],
) -> Path:
    root = directory / wish.name
    data = root / "data"
    try:
        data.mkdir(parents=True, exist_ok=True)
        _write_lines(data / "train.jsonl", split.train)
        _write_lines(data / "held_out.jsonl", split.held_out)
        commands = recipes(root, data)
        for run in runs:
            (root / run).mkdir(exist_ok=True)
            write_whole(root / run / VOTES, _votes(wish, split))
        plan = data / "plan.json"
        write_whole(plan, {"commands": commands})
    except OSError as error:
        raise StorageError(f"cannot write to {root} ({error.strerror})") from error
    return plan


def _votes(wish: TrainingRequest, split: Split) -> dict[str, Any]:
    return {
        "queue": wish.queue,
        "votes": split.votes,
        "considered": list(wish.considered),
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


def _run(directory: Path, wish: TrainingRequest, run: str, steps: int) -> dict[str, Any]:
    return {"directory": str(directory), "name": f"{wish.name}/{run}", "steps": steps}


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
