"""The demo's prompts as a task, with the true rule as its check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from tether.demo.rule import rule_reward
from tether.protocols import RewardFn
from tether.types import Message, Prompt

# What the demonstrations say too. Without a system message the embedded model's template writes one of 16 tokens.
SYSTEM = Message(role="system", content="Be brief.")


def data_file(name: str) -> Path:
    """A data file that is shipped with the package."""
    return Path(str(files("tether.demo") / "data" / name))


def read_prompts(name: str) -> list[Prompt]:
    """The prompts of a shipped file, with their keywords."""
    records = [json.loads(line) for line in data_file(name).read_text(encoding="utf-8").splitlines()]
    return [
        Prompt(
            id=record["id"],
            messages=(SYSTEM, Message(role="user", content=record["prompt"])),
            meta={name: record[name] for name in ("keywords", "expected", "topic")},
        )
        for record in records
    ]


class DemoTask:
    """Everyday questions; the check is the true rule."""

    def prompts(self) -> Sequence[Prompt]:
        """The prompts that pairs and PPO are sampled from."""
        return read_prompts("prompts.jsonl")

    def held_out(self) -> Sequence[Prompt]:
        """Prompts that no stage trains on."""
        return read_prompts("held_out.jsonl")

    def reward(self) -> RewardFn:
        """The true rule."""
        return rule_reward
