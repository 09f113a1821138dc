"""Tasks: prompts with a reward, from a recipe's `task` section.

`MatchCase` is small enough for a two-layer model trained from scratch: answer with characters of the requested kind.
`ReasoningTask` generates questions and checks answers with the `reasoning-gym` package: set
`task.name: reasoning-gym:chain_sum`; `task.options` holds the settings below and any of the data set's own.

Item i of a data set with seed s depends on s + i alone, so neighboring seeds share all but one of their items. Training
therefore uses s + i below 2^31 and held-out items use s + i from 2^31 on: the two never overlap. Easy data sets have
few questions, and the same one can come from two seeds; `unseen_questions: true` removes every held-out question from
training.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import Any

from pydantic import Field, ValidationError

from tether.config.allowed_code import BUILT_IN as BUILT_IN_CODE
from tether.config.allowed_code import OBJECT
from tether.config.base import Count, Option, Positive, Settings
from tether.config.rewards import Extract, FunctionPart
from tether.config.sections import TOY_TASK, PromptSettings, TaskSettings
from tether.data.prompts import PromptRule, hold_out, read_prompts, seen_in_training
from tether.data.sources import places_of, shown_source
from tether.errors import ConfigError, DataError, TetherError
from tether.models.tokenizer import TextModel
from tether.protocols import RewardFn, Task
from tether.rewards.calling import explain, read_signature
from tether.rewards.function import FunctionReward, named_reward
from tether.rewards.math_answer import extract
from tether.rewards.resolve import resolve
from tether.rewards.scoring import CodeReward, failed
from tether.types import Prompt, Rollout, Score
from tether.user_code import apart, is_its_own

KINDS = {"lower": string.ascii_lowercase, "UPPER": string.ascii_uppercase, "12345": string.digits}


class MatchCase:
    """Prompts `lower:`, `UPPER:` and `12345:`; the score is the fraction of `length` characters of that kind.

    The maximum is 1. An answer that ends early scores only the characters it has, so stopping early does not pay.
    """

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def prompts(self) -> Sequence[Prompt]:
        """One prompt for each kind and each of 16 numbered variants."""
        return [
            Prompt.from_text(f"{kind}-{variant}", f"{variant:x} {kind}:", answer=kind)
            for kind in KINDS
            for variant in range(16)
        ]

    def held_out(self) -> Sequence[Prompt]:
        """The same three questions without a number."""
        return [Prompt.from_text(f"held-out-{kind}", f"{kind}:", answer=kind) for kind in KINDS]

    def reward(self) -> RewardFn:
        """The fraction of the wanted characters."""

        def score(rollouts: Sequence[Rollout]) -> list[Score]:
            return [Score(self.fraction(rollout)) for rollout in rollouts]

        return score

    def fraction(self, rollout: Rollout) -> float:
        """The fraction of the answer that is of the requested kind."""
        assert rollout.prompt.answer is not None
        wanted = KINDS[rollout.prompt.answer]
        return sum(character in wanted for character in rollout.completion[: self.length]) / self.length


PREFIX = "reasoning-gym:"
HELD_OUT_SEEDS = 2**31  # training seeds are below, held-out seeds from here to 2^32, numpy's maximum
RIGHT = 0.99  # minimum score of a correct answer: scorers give small scores to wrong prose that contains the answer

_EVALUATES = "its scorer runs the model's answer as Python code"
REFUSED = {
    **dict.fromkeys(("binary_matrix", "countdown", "intermediate_integration", "n_queens"), _EVALUATES),
    **dict.fromkeys(("polynomial_multiplication", "puzzle24", "simple_integration"), _EVALUATES),
    **dict.fromkeys(("spiral_matrix", "string_insertion"), _EVALUATES),
    "composite": "it mixes data sets and could include a rejected one",
    "pool_matrix": "its questions do not depend on its seed, so training and held-out ones cannot be separated",
}


class ReasoningOptions(Settings):
    """The task's own options; all others are passed to the data set."""

    size: Positive = Field(default=4096, le=2**30, description="Number of training questions.")
    held_out: Positive = Field(default=256, le=2**30, description="Number of held-out questions.")
    seed: Count = Field(default=0, lt=2**30, description="Offset of both ranges of seeds.")
    extract: Extract = Field(default="auto", description="Which part of the completion is the answer.")
    partial: bool = Field(default=False, description="Keep the scorer's partial credit.")
    instruction: str = Field(default="", description="A line added after every question.")
    unseen_questions: bool = Field(default=False, description="Remove the held-out questions from training.")


class ReasoningTask:
    """One data set of reasoning-gym: prompts by seed, and its scorer with a time limit and a threshold."""

    def __init__(self, dataset: str, options: Mapping[str, Option]) -> None:
        self.dataset = dataset
        own = {name: value for name, value in options.items() if name in ReasoningOptions.model_fields}
        try:
            self.options = ReasoningOptions.model_validate(own, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise ConfigError(f"task.options.{problem['loc'][0]}: {problem['msg']}") from None
        theirs = {name: value for name, value in options.items() if name not in own}
        seed = self.options.seed
        self.entries: dict[str, tuple[Any, dict[str, Any]]] = {}  # by prompt id: the data set, and its item
        self._held_out = self._prompts(theirs, HELD_OUT_SEEDS + seed, self.options.held_out)
        self._training = self._prompts(theirs, seed, self.options.size)
        if self.options.unseen_questions:
            asked = {prompt.messages[0]["content"] for prompt in self._held_out}
            self._training = [prompt for prompt in self._training if prompt.messages[0]["content"] not in asked]

    def prompts(self) -> Sequence[Prompt]:
        """Questions from the training seeds."""
        return self._training

    def held_out(self) -> Sequence[Prompt]:
        """Questions from the held-out seeds."""
        return self._held_out

    def reward(self) -> RewardFn:
        """1 where the data set's scorer accepts the answer, else 0; with `partial`, the scorer's own value."""
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> Score:
        """The score of one answer. If the scorer raises, the answer is wrong: it scores 0 and counts as `scorer_error`.

        A prompt from another task has no entry to check against, and gets no valid score.
        """
        if rollout.prompt.id not in self.entries:
            return failed("not_of_this_task")
        data, entry = self.entries[rollout.prompt.id]
        answer = extract(rollout.completion, self.options.extract, entry["answer"])
        error, raw = 0.0, 0.0
        try:
            raw = float(data.score_answer(answer, entry)) if answer is not None else 0.0
        except MemoryError:
            raise
        except Exception:
            error = 1.0
        if not math.isfinite(raw):
            error, raw = 1.0, 0.0
        value = raw if self.options.partial else float(raw >= RIGHT)
        return Score(value, {"right": float(raw >= RIGHT), "scorer": raw, "scorer_error": error})

    def _prompts(self, options: Mapping[str, Any], first_seed: int, count: int) -> list[Prompt]:
        data = _create(self.dataset, options, seed=first_seed, size=count)
        line = f"\n{self.options.instruction}" if self.options.instruction else ""
        prompts: list[Prompt] = []
        for index in range(count):
            entry = data[index]
            prompt = Prompt.from_text(
                f"{self.dataset}-{first_seed + index}", entry["question"] + line, answer=entry["answer"]
            )
            self.entries[prompt.id] = (data, entry)
            prompts.append(prompt)
        return prompts


def _create(dataset: str, options: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """The data set, or a ConfigError that lists the known names."""
    factory = _factory()
    if dataset not in factory.DATASETS:
        raise ConfigError(f"task.name: reasoning-gym has no data set {dataset!r}: {_near(dataset, factory.DATASETS)}")
    if dataset in REFUSED:
        raise ConfigError(f"task.name: reasoning-gym:{dataset} is not supported: {REFUSED[dataset]}")
    known = {field.name for field in dataclasses.fields(factory.DATASETS[dataset][1])}
    if unknown := sorted(set(options) - known):
        every = sorted((known - {"seed", "size"}) | set(ReasoningOptions.model_fields))
        raise ConfigError(f"task.options: {dataset} has no {unknown[0]!r}: {_near(unknown[0], every)}")
    _check_oracle(dataset, options)
    try:
        return factory.create_dataset(dataset, **options, seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.options: {dataset} rejects them: {error}") from error


def _check_oracle(dataset: str, options: Mapping[str, Any]) -> None:
    """Version 0.1.25 of basic_arithmetic gives wrong answers without parentheses, unless it only adds and subtracts."""
    operators = set(options.get("operators") or "+-*/")
    if dataset == "basic_arithmetic" and not options.get("allow_parentheses", True) and operators - {"+", "-"}:
        raise ConfigError(
            "task.options: basic_arithmetic with allow_parentheses: false has wrong answers for * and /: add "
            "operators: ['+', '-'], or allow parentheses"
        )


def _factory() -> Any:
    try:
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as missing:
        raise ConfigError("task.name: reasoning-gym is not installed: pip install 'tether-rl[reasoning]'") from missing


def _near(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(sorted(known))}"


BUILT_IN = {TOY_TASK: MatchCase}


@dataclass(frozen=True)
class RecipeTask:
    """A recipe's prompts and reward, read and checked. `scorer` is None where only reward.parts score."""

    training: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    scorer: RewardFn | None
    notices: tuple[str, ...] = ()

    def prompts(self) -> Sequence[Prompt]:
        """Prompts to train on."""
        return self.training

    def held_out(self) -> Sequence[Prompt]:
        """Prompts that are never trained on."""
        return self.evaluation

    def reward(self) -> RewardFn | None:
        """The reward, where the task has one."""
        return self.scorer


def build_task(settings: TaskSettings, data: PromptSettings | None = None, passed: Task | None = None) -> RecipeTask:
    """The task that is named or `passed`, or the user's own prompts; with the recipe's reward where it has one."""
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
    """The training prompts, for commands that only inspect them: runs no code that the recipe names."""
    if settings.prompts is not None:
        return _own_prompts(settings, data)[0]
    name = settings.task_name or ""
    if ":" in name and not name.startswith(PREFIX) and name not in BUILT_IN_CODE:
        raise ConfigError(f"task.name {name} is code, which is not run here")
    return _named(settings).prompts()


def fitted(task: RecipeTask, rule: PromptRule, model: TextModel) -> RecipeTask:
    """The task without prompts that are too long for the model, with notices about them."""
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
    """A task's prompts, held-out prompts and reward; errors of its code name the task."""
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
            raise DataError(f"task.name: {what} of {name} returned a {type(wrong[0]).__name__}: it must return Prompts")
    if scorer is not None and not callable(scorer):
        raise DataError(f"task.name: reward() of {name} returned a {type(scorer).__name__}: it must return a function")
    return training, held_out, None if scorer is None else _task_reward(scorer)


def _task_reward(scorer: Callable[..., Any]) -> RewardFn:
    """A task's reward, called by its signature where its parameter names mean `text` or `trl`."""
    with suppress(ConfigError):  # a function of rollouts may use any parameter name
        if read_signature(scorer, "auto", "reward()", "task.name").takes != "rollouts":
            part = FunctionPart(kind="function", name="task_reward", function="object:task_reward")
            return FunctionReward(part, field="task.name: reward()", seed=0, function=scorer)
    return CodeReward(scorer, "the task's reward")


def _named(settings: TaskSettings) -> Task:
    name = settings.task_name
    assert name is not None
    if name in BUILT_IN:
        return _make(BUILT_IN[name], settings)
    if name.startswith(PREFIX):
        return ReasoningTask(name.removeprefix(PREFIX), settings.options)
    if name.startswith(OBJECT):
        raise ConfigError(
            f"task.name: {name.removeprefix(OBJECT)} is a task that was passed from Python, and a recipe cannot store "
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
    """Call the factory with the options; an option that it does not accept is an error of the recipe."""
    try:
        signature(factory).bind(**settings.options)
    except TypeError as error:
        raise ConfigError(f"task.options: {settings.name or TOY_TASK} does not take them: {error}") from None
    return factory(**settings.options)
