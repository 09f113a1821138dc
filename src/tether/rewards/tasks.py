"""From a recipe's `task` section to a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tether.config.parts import TaskSettings
from tether.data.records import read_prompts
from tether.protocols import RewardFn, Task
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
        task: Task = BUILT_IN[settings.name]()
    elif ":" in settings.name:
        task = resolve(settings.name, "task.name")()
    else:
        known = ", ".join(sorted(BUILT_IN))
        raise ValueError(
            f"task.name: {settings.name!r} is neither a built-in task ({known}) nor package.module:factory"
        )
    return RecipeTask(
        training=read_prompts(settings.prompts) if settings.prompts else task.prompts(),
        evaluation=task.held_out(),
        scorer=resolve(settings.reward, "task.reward") if settings.reward else task.reward(),
    )
