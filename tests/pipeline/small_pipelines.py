"""Pipelines of seconds: the tiny model, a toy task, a few steps."""

from __future__ import annotations

import json
from pathlib import Path

from tether.config.load_pipeline import load_pipeline
from tether.config.pipeline_recipe import Pipeline
from tether.pipeline.order import check_references

QUICK = {"optimizer": {"policy_lr": 3.0e-3, "critic_lr": 3.0e-3}, "checkpoint": {"every": 1}}
ON_CPU = {"path": "stage:policy", "device": "cpu"}


def collect_stage(**more: object) -> dict[str, object]:
    """Rank the answers to a few prompts."""
    stage: dict[str, object] = {
        "method": "collect",
        "model": ON_CPU,
        "answers": {"prompts": 8, "samples_per_prompt": 3, "max_new_tokens": 4},
        "reward": {"noise": 0.1},
    }
    return stage | more


def reward_stage(**more: object) -> dict[str, object]:
    """A reward model of two steps."""
    stage: dict[str, object] = {
        "method": "reward",
        "model": ON_CPU,
        "data": {"train": "stage:answers@all", "held_out": "stage:answers"},
        "reward": {"batch_size": 2},
        "run": {"steps": 2},
    }
    return stage | QUICK | more


def ppo_stage(**more: object) -> dict[str, object]:
    """PPO of two iterations on the reward model."""
    stage: dict[str, object] = {
        "method": "ppo",
        "model": ON_CPU,
        "kl": {"reference": "stage:policy@first"},
        "rollout": {"prompts_per_step": 4, "max_new_tokens": 4},
        "reward": {"parts": [{"kind": "model", "name": "proxy", "path": "stage:proxy"}]},
        "ppo": {"minibatch_size": 4},
        "run": {"steps": 2},
    }
    return stage | QUICK | more


def small(folder: Path, *flags: str, name: str = "p", rounds: int = 2, **keys: object) -> Pipeline:
    """Two rounds of ratings, reward model and PPO; `keys` replace sections of the file."""
    content: dict[str, object] = {
        "method": "pipeline",
        "name": name,
        "directory": str(folder),
        "rounds": rounds,
        "policy": "tiny-bytes",
        "task": {"name": "match-case"},
        "truth": {"prompts": 3, "samples": 2, "max_new_tokens": 4, "device": "cpu"},
        "each_round": {"answers": collect_stage(), "proxy": reward_stage(), "ppo": ppo_stage()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(
        json.dumps({key: value for key, value in (content | keys).items() if value is not None})
    )  # also YAML
    pipeline = load_pipeline(str(file), flags)
    check_references(pipeline)
    return pipeline
