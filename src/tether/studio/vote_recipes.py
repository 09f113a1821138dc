"""The recipes of trainings that the page starts, made of the recipe of the run that they go on from.

What a run shares between its roles (`roles.mode`, its layers or adapters, the base model) goes on as it was: a reward
model that PPO is to share a backbone with must stand on that backbone. Learning rates suit the mode, because
a rate for a few layers ruins a whole model, and a rate for a whole model leaves a few layers where they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
