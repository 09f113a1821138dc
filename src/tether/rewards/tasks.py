"""From a recipe's `task` section to a task."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

from tether.config.code_names import BUILT_IN as BUILT_IN_CODE
from tether.config.code_names import OBJECT
from tether.config.rewards import FunctionPart
from tether.config.sections import TOY_TASK, PromptSettings, TaskSettings
from tether.data.prompts import PromptRule, hold_out, read_prompts, seen_in_training
from tether.data.sources import places_of, shown_source
from tether.errors import ConfigError, DataError, TetherError
from tether.models.tokenizer import TextModel
from tether.protocols import RewardFn, Task
from tether.rewards import reasoning
from tether.rewards.explain import explain
from tether.rewards.function import CodeReward, FunctionReward, named_reward
from tether.rewards.match_case import MatchCase
from tether.rewards.resolve import resolve
from tether.rewards.signature import read_signature
from tether.types import Prompt
from tether.user_code import apart, is_its_own

BUILT_IN = {TOY_TASK: MatchCase}


@dataclass(frozen=True)
class RecipeTask:
    """What a recipe asks, read and checked. `scorer` is None where the recipe's reward.parts are all that scores."""

    training: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    scorer: RewardFn | None
    notices: tuple[str, ...] = ()

    def prompts(self) -> Sequence[Prompt]:
        """Prompts to train on."""
        return self.training

    def held_out(self) -> Sequence[Prompt]:
        """Prompts never trained on."""
        return self.evaluation

    def reward(self) -> RewardFn | None:
        """The reward, where the task has one."""
        return self.scorer


def build_task(settings: TaskSettings, data: PromptSettings | None = None, passed: Task | None = None) -> RecipeTask:
    """The task that is named or `passed`, or the user's own prompts; with the recipe's own reward where given."""
    own = named_reward(settings.reward, "task.reward") if settings.reward else None
    if settings.prompts is not None:
        training, held_out, notices = _own_prompts(settings, data or PromptSettings())
        return RecipeTask(training, held_out, own, notices)
    training, held_out, scorer = _asked_of_task(settings, passed)
    told = (
        ()
        if settings.name
        else (f"The recipe names no task.prompts and no task.name: it trains on {TOY_TASK}, a toy.",)
    )
    return RecipeTask(training, held_out, own or scorer, told)


def prompts_without_code(settings: TaskSettings, data: PromptSettings) -> Sequence[Prompt]:
    """The training prompts, for who only looks at them: no code that the recipe names is run."""
    if settings.prompts is not None:
        return _own_prompts(settings, data)[0]
    name = settings.task_name or ""
    if ":" in name and not name.startswith(reasoning.PREFIX) and name not in BUILT_IN_CODE:
        raise ConfigError(f"task.name {name} is code, which is not run here")
    return _named(settings).prompts()


def fitted(task: RecipeTask, rule: PromptRule, model: TextModel) -> RecipeTask:
    """The task without the prompts that are too long for the model, and saying so."""
    train = rule.apply(task.training, model.tokenizer, "training prompts")
    held_out = rule.apply(task.evaluation, model.tokenizer, "held-out prompts") if task.evaluation else None
    notices = (*task.notices, *train.notices, *(held_out.notices if held_out else ()))
    return RecipeTask(train.prompts, held_out.prompts if held_out else (), task.scorer, notices)


def _own_prompts(settings: TaskSettings, data: PromptSettings) -> tuple[list[Prompt], list[Prompt], tuple[str, ...]]:
    assert settings.prompts is not None
    training = read_prompts(settings.prompts, data)
    if settings.held_out_fraction:
        return *hold_out(training, settings.held_out_fraction, settings.split_seed), ()
    source = settings.held_out
    if source is None and data.held_out_split is not None:
        if not all(place.has_splits for place in places_of(settings.prompts)):
            raise DataError(
                f"data.held_out_split is {data.held_out_split}, and {shown_source(settings.prompts)} has no splits: "
                "set task.held_out to a file, or task.held_out_fraction"
            )
        source = settings.prompts
    if source is None:
        return training, [], ()
    held_out = read_prompts(source, data, split=data.held_out_split)
    seen = seen_in_training(held_out, training)
    told = f"{seen} of the {len(held_out)} held-out prompts are training prompts too: their score is not held out."
    return training, held_out, (told,) if seen else ()


def _asked_of_task(settings: TaskSettings, passed: Task | None) -> tuple[list[Prompt], list[Prompt], RewardFn | None]:
    """A task's prompts, those held out and its reward; what its code does wrong is told as the task's fault."""
    name = settings.task_name
    try:
        with apart(), redirect_stdout(sys.stderr):
            task = _named(settings) if passed is None else passed
            training, held_out, scorer = list(task.prompts()), list(task.held_out()), task.reward()
    except TetherError:
        raise
    except BaseException as error:
        if not is_its_own(error):
            raise
        if name in BUILT_IN or isinstance(error, ValueError):
            raise
        raise DataError(f"task.name: {name} raised {explain(error)}") from error
    for prompts, what in ((training, "prompts()"), (held_out, "held_out()")):
        wrong = [prompt for prompt in prompts if not isinstance(prompt, Prompt)]
        if wrong:
            raise DataError(f"task.name: {what} of {name} gave a {type(wrong[0]).__name__}: it must give Prompts")
    if scorer is not None and not callable(scorer):
        raise DataError(f"task.name: reward() of {name} gave a {type(scorer).__name__}: it must give a function")
    return training, held_out, None if scorer is None else _task_reward(scorer)


def _task_reward(scorer: Callable[..., Any]) -> RewardFn:
    """A task's reward, called by its signature where the names of its parameters say `text` or `trl`."""
    with suppress(ConfigError):  # a function of rollouts may name its parameter as it likes
        if read_signature(scorer, "auto", "reward()", "task.name").takes != "rollouts":
            part = FunctionPart(kind="function", name="task_reward", function="object:task_reward")
            return FunctionReward(part, field="task.name: reward()", seed=0, function=scorer)
    return CodeReward(scorer, "the task's reward")


def _named(settings: TaskSettings) -> Task:
    name = settings.task_name
    assert name is not None
    if name in BUILT_IN:
        return _make(BUILT_IN[name], settings)
    if name.startswith(reasoning.PREFIX):
        return reasoning.ReasoningTask(name.removeprefix(reasoning.PREFIX), settings.options)
    if name.startswith(OBJECT):
        raise ConfigError(
            f"task.name: {name.removeprefix(OBJECT)} is a task that was passed from Python, and a recipe cannot hold "
            "it: pass it again (task=...), or name a factory of it, such as my_file.py:make_task"
        )
    if ":" in name:
        return _make(resolve(name, "task.name"), settings)
    known = ", ".join(sorted(BUILT_IN))
    raise ValueError(
        f"task.name: {name!r} is neither a built-in task ({known}), nor reasoning-gym:DATASET, nor "
        "package.module:factory; prompts of your own go into task.prompts"
    )


def _make(factory: Callable[..., Task], settings: TaskSettings) -> Task:
    """What the factory makes of the options; an option that it does not take is the recipe's mistake."""
    try:
        signature(factory).bind(**settings.options)
    except TypeError as error:
        raise ConfigError(f"task.options: {settings.name or TOY_TASK} does not take them: {error}") from None
    return factory(**settings.options)
