"""From votes to a reward model to a policy: the files and the two commands that it takes.

Everything that a training needs is written before it starts: the pairs, the prompts, a recipe for each run, and beside
each run `votes.json`, the ids of the very votes that it learns from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.config.load import load_recipe
from tether.errors import DataError, StorageError
from tether.runs.folder import write_whole

VOTES = "votes.json"
FEWEST_PAIRS = 4
POLICY_SECTIONS = ("model", "roles", "optimizer", "task", "rollout", "kl", "ppo")
REWARD_SECTIONS = ("model", "optimizer")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingWish:
    """What a person asked for. `config` is the recipe of the run that the policy goes on from, where there is one."""

    name: str
    queue: int
    model: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reward_steps: int = 60
    ppo_steps: int = 40
    considered: Sequence[int] = ()  # every vote that there was, ties and skips too
    reward_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ppo_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Split:
    """Pairs to learn from, and pairs to be measured on."""

    train: Sequence[Record]
    held_out: Sequence[Record]

    @property
    def votes(self) -> list[int]:
        """The votes that are learned from."""
        return sorted({vote for record in self.train for vote in record["votes"]})


def split_pairs(records: Sequence[Record], fraction: float) -> Split:
    """By a hash of the item, so that an item that was held out once stays held out as votes grow."""
    good = [record for record in records if _can_be_learned(record)]
    if len(good) < FEWEST_PAIRS:
        raise DataError(
            f"{len(good)} pairs have a clear choice, and a reward model needs {FEWEST_PAIRS} or more: vote on"
        )
    by_lot = sorted(good, key=lambda record: _lot(record["item"]))
    least = [record for record in by_lot if _lot(record["item"]) < fraction] or (by_lot[:1] if fraction else [])
    out = {record["item"] for record in least[: len(good) // 2]}
    return Split(
        [record for record in good if record["item"] not in out], [record for record in good if record["item"] in out]
    )


def _lot(item: int) -> float:
    return int.from_bytes(hashlib.sha256(f"held-out:{item}".encode()).digest()[:4]) / 2**32


def _can_be_learned(record: Record) -> bool:
    """Texts that are not empty and made of whole characters, as training asks for."""
    texts = [record["chosen"], record["rejected"]]
    prompt = record["prompt"]
    texts += [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    return all(text.strip() and _is_whole(text) for text in texts)


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_plan(directory: Path, wish: TrainingWish, split: Split) -> Path:
    """Write all that the training needs; the plan's file. A setting that is wrong is told here."""
    root = directory / wish.name
    data = root / "data"
    try:
        data.mkdir(parents=True, exist_ok=True)
        _write_lines(data / "train.jsonl", split.train)
        _write_lines(data / "held_out.jsonl", split.held_out)
        _write_lines(data / "prompts.jsonl", _prompts([*split.train, *split.held_out]))
        commands = [
            _command(root, "reward", _reward_recipe(directory, data, wish, split), wish.reward_settings),
            _command(root, "ppo", _ppo_recipe(directory, root, data, wish), wish.ppo_settings),
        ]
        for run in ("reward", "ppo"):
            (root / run).mkdir(exist_ok=True)
            write_whole(root / run / VOTES, _votes(wish, split))
        plan = data / "plan.json"
        write_whole(plan, {"commands": commands})
    except OSError as error:
        raise StorageError(f"cannot write to {root} ({error.strerror})") from error
    return plan


def _votes(wish: TrainingWish, split: Split) -> dict[str, Any]:
    return {
        "queue": wish.queue,
        "votes": split.votes,
        "considered": list(wish.considered),
        "pairs": len(split.train),
        "held_out_pairs": len(split.held_out),
        "held_out_votes": sorted({vote for record in split.held_out for vote in record["votes"]}),
    }


def _reward_recipe(directory: Path, data: Path, wish: TrainingWish, split: Split) -> dict[str, Any]:
    recipe = _sections(wish, REWARD_SECTIONS)
    recipe["data"] = {"train": str(data / "train.jsonl")}
    if split.held_out:
        recipe["data"]["held_out"] = str(data / "held_out.jsonl")
    recipe["reward"] = {"batch_size": min(16, len(split.train))}
    recipe["run"] = {"directory": str(directory), "name": f"{wish.name}/reward", "steps": wish.reward_steps}
    return recipe


def _ppo_recipe(directory: Path, root: Path, data: Path, wish: TrainingWish) -> dict[str, Any]:
    """The prompts are those of the run before, which are more than were voted on; else those of the votes."""
    recipe = _sections(wish, POLICY_SECTIONS)
    if "task" not in recipe:
        recipe["task"] = {"prompts": str(data / "prompts.jsonl")}
    recipe["reward"] = {"parts": [{"kind": "model", "path": str(root / "reward" / "model")}]}
    recipe["run"] = {"directory": str(directory), "name": f"{wish.name}/ppo", "steps": wish.ppo_steps}
    return recipe


def _sections(wish: TrainingWish, names: Sequence[str]) -> dict[str, Any]:
    """The run before's own settings, of those sections that both know, and the model."""
    sections = {name: dict(wish.config[name]) for name in names if isinstance(wish.config.get(name), Mapping)}
    return sections | {"model": sections.get("model", {}) | {"path": wish.model}}


def _command(root: Path, method: str, recipe: dict[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """`train METHOD RECIPE --key value ...`, tried by reading it as the command line will."""
    path = root / "data" / f"{method}.yaml"
    path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    flags = [word for key, value in settings.items() for word in (f"--{key}", _word(value))]
    load_recipe(method, str(path), flags)
    return ["train", method, str(path), *flags]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _prompts(records: Sequence[Record]) -> list[Record]:
    """Each prompt once."""
    found = {json.dumps(record["prompt"]): record["prompt"] for record in records}
    return [{"id": str(place), "prompt": prompt} for place, prompt in enumerate(found.values())]


def _write_lines(path: Path, records: Sequence[Record]) -> None:
    path.write_text("".join(json.dumps(dict(record)) + "\n" for record in records), encoding="utf-8")
