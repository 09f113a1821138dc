"""Questions that make themselves and check their own answers: the `reasoning-gym` package as a task.

`task.name: reasoning-gym:chain_sum`; `task.options` holds the settings below and any of the data set's own.

Item i of a data set with seed s is made from s + i alone, so neighbouring seeds share all but one of their items. Here
training uses s + i below 2^31 and held-out items those from 2^31 on: the two never meet, whatever their sizes. Easy
data sets have few questions, and the same one can still come from two seeds; `unseen_questions: true` takes every
held-out question out of training.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import Field, ValidationError

from tether.config.base import Count, Option, Positive, Settings
from tether.config.rewards import Extract
from tether.errors import ConfigError
from tether.protocols import RewardFn
from tether.rewards.combine import failed
from tether.rewards.extract import extract
from tether.types import Prompt, Rollout, Score

PREFIX = "reasoning-gym:"
HELD_OUT_SEEDS = 2**31  # training seeds are below, held-out seeds from here to 2^32, which is the most numpy takes
RIGHT = 0.99  # scorers give wrong prose that holds the answer somewhere a little; only this much counts as right

_EVALUATES = "its scorer runs the model's answer as Python code"
REFUSED = {
    **dict.fromkeys(("binary_matrix", "countdown", "intermediate_integration", "n_queens"), _EVALUATES),
    **dict.fromkeys(("polynomial_multiplication", "puzzle24", "simple_integration"), _EVALUATES),
    **dict.fromkeys(("spiral_matrix", "string_insertion"), _EVALUATES),
    "composite": "it mixes data sets, and could let in one that is refused",
    "pool_matrix": "its questions do not follow from its seed, so training and held-out ones cannot be told apart",
}


class ReasoningOptions(Settings):
    """The task's own options; all others go to the data set."""

    size: Positive = Field(default=4096, le=2**30, description="Training questions.")
    held_out: Positive = Field(default=256, le=2**30, description="Held-out questions.")
    seed: Count = Field(default=0, lt=2**30, description="Moves both ranges of seeds along.")
    extract: Extract = Field(default="auto", description="What of the completion is the answer.")
    partial: bool = Field(default=False, description="Keep the scorer's partial credit.")
    instruction: str = Field(default="", description="A line put after every question.")
    unseen_questions: bool = Field(default=False, description="Take the held-out questions out of training.")


class ReasoningTask:
    """One data set of reasoning-gym: prompts by seed, and its scorer, contained and thresholded."""

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
        """1 where the data set's scorer says right, else 0; with `partial`, what the scorer says."""
        return lambda rollouts: [self.score(rollout) for rollout in rollouts]

    def score(self, rollout: Rollout) -> Score:
        """A scorer that raises on what the model wrote has been given a wrong answer: 0, and `scorer_error` counts it.

        A prompt that is not of this task has no entry to check against, and no valid score.
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
    """The data set, or a ConfigError that says what it knows."""
    factory = _factory()
    if dataset not in factory.DATASETS:
        raise ConfigError(f"task.name: reasoning-gym has no data set {dataset!r}: {_near(dataset, factory.DATASETS)}")
    if dataset in REFUSED:
        raise ConfigError(f"task.name: reasoning-gym:{dataset} is refused, for {REFUSED[dataset]}")
    known = {field.name for field in dataclasses.fields(factory.DATASETS[dataset][1])}
    if unknown := sorted(set(options) - known):
        every = sorted((known - {"seed", "size"}) | set(ReasoningOptions.model_fields))
        raise ConfigError(f"task.options: {dataset} has no {unknown[0]!r}: {_near(unknown[0], every)}")
    _check_oracle(dataset, options)
    try:
        return factory.create_dataset(dataset, **options, seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.options: {dataset} refuses them: {error}") from error


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
