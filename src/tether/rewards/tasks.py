"""From a recipe's `task` section to a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature

from tether.config.parts import TaskSettings
from tether.data.records import read_prompts
from tether.errors import ConfigError
from tether.protocols import RewardFn, Task
from tether.rewards import reasoning
from tether.rewards.match_case import MatchCase
from tether.rewards.resolve import resolve
from tether.types import Prompt

BUILT_IN = {"match-case": MatchCase}


@dataclass(frozen=True)
class RecipeTask:
    """A task whose prompts or reward the recipe may have replaced."""

    training: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    scorer: RewardFn

    def prompts(self) -> Sequence[Prompt]:
        """Prompts to train on."""
        return self.training

    def held_out(self) -> Sequence[Prompt]:
        """Prompts never trained on."""
        return self.evaluation

    def reward(self) -> RewardFn:
        """The reward."""
        return self.scorer


def build_task(settings: TaskSettings) -> Task:
    """The task named, with the recipe's own prompts and reward in place of its own where given."""
    if settings.name in BUILT_IN:
        task = _make(BUILT_IN[settings.name], settings)
    elif settings.name.startswith(reasoning.PREFIX):
        task = reasoning.ReasoningTask(settings.name.removeprefix(reasoning.PREFIX), settings.options)
    elif ":" in settings.name:
        task = _make(resolve(settings.name, "task.name"), settings)
    else:
        known = ", ".join(sorted(BUILT_IN))
        raise ValueError(
            f"task.name: {settings.name!r} is neither a built-in task ({known}), nor reasoning-gym:DATASET, nor "
            "package.module:factory"
        )
    return RecipeTask(
        training=read_prompts(settings.prompts) if settings.prompts else task.prompts(),
        evaluation=task.held_out(),
        scorer=resolve(settings.reward, "task.reward") if settings.reward else task.reward(),
    )


def _make(factory: Callable[..., Task], settings: TaskSettings) -> Task:
    """What the factory makes of the options; an option that it does not take is the recipe's mistake."""
    try:
        signature(factory).bind(**settings.options)
    except TypeError as error:
        raise ConfigError(f"task.options: {settings.name} does not take them: {error}") from None
    return factory(**settings.options)
