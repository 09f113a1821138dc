"""Sampling for stages: the answers of a policy to a round's prompts, and what scores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tether.config.pipeline_recipe import AnswerSettings, ScoreSettings, TruthSettings
from tether.config.rewards import ModelPart
from tether.config.sections import ModelSettings, PromptSettings, TaskSettings
from tether.data.examples import DataOrder
from tether.data.prompts import PromptRule
from tether.errors import ConfigError
from tether.models.load import LoadedModel, load_base, load_causal_lm
from tether.models.lora import CONFIG, saved_config
from tether.models.sharing import Adapters
from tether.protocols import RewardFn, Sampling
from tether.rewards.model import RewardModelReward
from tether.rewards.parts import build_reward
from tether.rewards.tasks import RecipeTask, build_task
from tether.rollout.native import NativeEngine
from tether.seeds import derive_seed
from tether.store.find import find_model
from tether.types import Prompt, Rollout

AT_ONCE = 128  # answers between two looks whether to stop


def load_policy_of(settings: ModelSettings, seed: int) -> LoadedModel:
    """The policy that a stage samples from."""
    return load_causal_lm(
        find_model(settings.path),
        dtype=settings.dtype,
        device=settings.device,
        seed=derive_seed(seed, "model"),
        attention=settings.attention,
        quantize=settings.quantize,
    )


def sampling_of(settings: AnswerSettings) -> Sampling:
    """How a stage samples."""
    return Sampling(settings.max_new_tokens, settings.temperature, settings.top_p)


def task_with(settings: TaskSettings) -> RecipeTask:
    """The task of a stage, with its prompts and its reward."""
    return build_task(settings, PromptSettings())


def prompts_of_round(
    task: RecipeTask, settings: AnswerSettings, model: LoadedModel, seed: int, round: int
) -> list[Prompt]:
    """The prompts of a round: the next ones in an order that the seed decides, each of them once."""
    rule = PromptRule.of(PromptSettings(), model.context_length, settings.max_new_tokens)
    fitting = rule.apply(task.prompts(), model.tokenizer, "prompts").prompts
    order = DataOrder(fitting, derive_seed(seed, "collect"))
    count = min(settings.prompts, len(fitting))
    return list({prompt.id: prompt for prompt in order.take(max(round - 1, 0) * count, count)}.values())


def held_out_prompts(task: RecipeTask, count: int, model: LoadedModel, max_new_tokens: int) -> list[Prompt]:
    """The first prompts that no stage trains on."""
    prompts = list(task.held_out())
    if not prompts:
        raise ConfigError(
            "the task holds out no prompts, so nothing can be measured: set task.held_out or task.held_out_fraction"
        )
    rule = PromptRule.of(PromptSettings(), model.context_length, max_new_tokens)
    return list(rule.apply(prompts, model.tokenizer, "held-out prompts").prompts)[:count]


def sampled_groups(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    settings: AnswerSettings,
    seed: int,
    *,
    stop: Callable[[], bool],
    advance: Callable[[int], None],
) -> Iterator[list[Rollout]]:
    """The answers to one prompt after another; ends early, with fewer groups, once `stop()` is true."""
    engine = NativeEngine(model, max_num_seqs=settings.max_num_seqs)
    size = max(1, AT_ONCE // settings.samples_per_prompt)
    count = settings.samples_per_prompt
    for start in range(0, len(prompts), size):
        if stop():
            return
        few = prompts[start : start + size]
        rollouts = engine.generate(few, sampling_of(settings), samples_per_prompt=count, seed=seed)
        advance(min(start + size, len(prompts)))
        for place in range(len(few)):
            yield rollouts[place * count : (place + 1) * count]


def reward_of(
    settings: ScoreSettings | TruthSettings, task: RecipeTask, model: LoadedModel | None, seed: int
) -> RewardFn:
    """The score that the settings name."""
    alone = [
        part.model_copy(update={"shared": False}) if isinstance(part, ModelPart) else part for part in settings.parts
    ]
    if len(alone) == 1 and isinstance(alone[0], ModelPart):
        return load_reward(alone[0].path, alone[0])
    return build_reward(alone, own=task.reward(), policy=model, seed=seed, timeout=settings.timeout_seconds)


def load_reward(path: str, part: ModelPart | None = None) -> RewardModelReward:
    """A reward model by itself, whole or as adapters on their base; it reads the answers as text."""
    part = part or ModelPart(kind="model", path=path)
    folder = Path(find_model(path)).expanduser()
    if not (folder / CONFIG).is_file():
        return RewardModelReward.load(part, None)
    dtype = torch.float32 if part.dtype == "auto" else getattr(torch, part.dtype)
    base, saved = load_base(folder, dtype, torch.device("cpu")), saved_config(folder)
    targets: Any = saved.get("target_modules") or []
    sharing = Adapters(base.model, saved["r"], saved["lora_alpha"], ",".join(targets), 0)
    loaded = RewardModelReward.load(part.model_copy(update={"shared": True}), base, sharing.load_scalar)
    return replace(loaded, reads="text")


@dataclass(frozen=True)
class TextAnswer:
    """An answer of which only the text is kept."""

    prompt: Prompt
    completion: str
    ended: bool
    sample_id: int = 0

    def rollout(self) -> Rollout:
        """The answer as rewards read it; it has no tokens."""
        nothing = torch.zeros(0)
        finish = "stop" if self.ended else "length"
        return Rollout(
            self.prompt, 0, self.sample_id, nothing.long(), nothing.bool(), nothing, nothing, self.completion, finish
        )
