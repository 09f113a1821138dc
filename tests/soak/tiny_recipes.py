"""Runs that take a moment: every method on the tiny model, with everything on that has state."""

from __future__ import annotations

import json
from pathlib import Path

from tether.config.load import load_recipe
from tether.config.recipes import Recipe

WORDS = ("red", "green", "blue", "gold")
RATES = ("--optimizer.policy_lr", "3e-3", "--optimizer.critic_lr", "3e-3")
MOVING_RATES = (*RATES, "--optimizer.schedule", "cosine", "--optimizer.warmup", "0.2")
ROLLOUTS = (
    *MOVING_RATES,
    *("--rollout.prompts_per_step", "4", "--rollout.samples_per_prompt", "2", "--rollout.max_new_tokens", "4"),
    *("--kl.controller", "adaptive", "--kl.target", "0.05"),
    *("--evaluation.every", "4", "--evaluation.prompts", "4"),
)
METHODS: dict[str, tuple[str, ...]] = {
    "sft": (*MOVING_RATES, "--sft.batch_size", "3"),  # 8 records: an epoch ends in the middle of a batch
    "reward": (*MOVING_RATES, "--reward.batch_size", "3"),
    "dpo": (*MOVING_RATES, "--dpo.batch_size", "3"),
    "ppo": (*ROLLOUTS, "--ppo.epochs", "2", "--ppo.minibatch_size", "4"),
    "grpo": ROLLOUTS,
    "rloo": ROLLOUTS,
    "reinforce": ROLLOUTS,
    "trpo": (*ROLLOUTS, "--trpo.cg_iterations", "2"),
}
TOP = ("--roles.mode", "shared_backbone", "--roles.trainable_layers", "1")


def tiny(method: str, workspace: Path, *flags: str, name: str = "run") -> Recipe:
    """The recipe of a run called `name` in `workspace`, which is made, with records to learn from."""
    workspace.mkdir(parents=True, exist_ok=True)
    own = [*METHODS[method]]
    if method in ("sft", "reward", "dpo"):
        file = demonstrations(workspace.parent) if method == "sft" else rankings(workspace.parent)
        own += ["--data.train", str(file), "--data.held_out", str(file)]
    place = ("--run.directory", str(workspace), "--run.name", name, "--model.device", "cpu")
    return load_recipe(method, None, [*own, *place, *flags])


def demonstrations(folder: Path) -> Path:
    """Eight questions with answers."""
    asked = [{"prompt": f"say {word}:", "completion": word * count} for word in WORDS for count in (1, 2)]
    return _write(folder / "demonstrations.jsonl", asked)


def rankings(folder: Path) -> Path:
    """Eight rankings of two to four answers."""
    pairs = [{"prompt": f"{word}:", "chosen": "yes!", "rejected": "no."} for word in WORDS]
    ranked = [{"prompt": f"{word}?", "answers": ["yes!", "yes", "no", "no."], "ranks": [0, 1, 2, 2]} for word in WORDS]
    return _write(folder / "rankings.jsonl", pairs + ranked)


def _write(file: Path, records: list[dict[str, object]]) -> Path:
    if not file.exists():
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def prompts(folder: Path) -> Path:
    """Six things to be asked."""
    asked = [{"prompt": f"{word}:", "answer": case} for word in ("red", "blue", "gold") for case in ("lower", "UPPER")]
    return _write(folder / "prompts.jsonl", asked)
