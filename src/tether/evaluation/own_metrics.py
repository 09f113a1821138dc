"""Text metrics of the user's own: functions of a prompt and an answer, reported beside the shipped ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tether.config.rewards import FunctionPart
from tether.errors import ConfigError
from tether.rewards.function import FunctionReward
from tether.types import Prompt, Rollout, Score

SHIPPED = (
    *("score", "rouge1", "rouge2", "rougeL", "ended", "length", "repetition", "distinct_1", "distinct_2"),
    *("kl_k1", "kl_k3"),
)


@dataclass(frozen=True)
class OwnMetric:
    """A function `f(prompt, completion, **columns)` that gives a number, and its name in reports."""

    name: str
    scores: FunctionReward

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise where the function needs a column that no record has."""
        self.scores.check(prompts)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """The value for each answer; one that the function cannot give is left out of the mean and counted."""
        return self.scores(rollouts)


def own_metrics(given: object, field: str, seed: int = 0) -> tuple[OwnMetric, ...]:
    """Metrics from functions and from names such as `my_metric.py:f`; each is reported under its function's name."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"{field}: expected a list of functions, was given a {type(given).__name__}")
    found: dict[str, OwnMetric] = {}
    for place, each in enumerate(cast("Sequence[object]", given)):
        metric = _metric(each, f"{field}[{place}]", seed)
        if metric.name in SHIPPED or metric.name in found:
            whose = "a shipped metric" if metric.name in SHIPPED else "another metric"
            raise ConfigError(f"{field}[{place}]: {metric.name} is the name of {whose}: rename the function")
        found[metric.name] = metric
    return tuple(found.values())


def _metric(given: object, field: str, seed: int) -> OwnMetric:
    if isinstance(given, str):
        if ":" not in given:
            raise ConfigError(f"{field}: {given!r} is neither file.py:name nor package.module:name")
        part = FunctionPart(kind="function", function=given)
        return OwnMetric(given.rpartition(":")[2], FunctionReward(part, field=field, seed=seed))
    function = cast("Callable[..., Any]", given)
    name = str(getattr(function, "__name__", type(function).__name__))
    name = "metric" if name == "<lambda>" else name
    part = FunctionPart(kind="function", name=name, function=f"object:{name}")
    return OwnMetric(name, FunctionReward(part, field=field, seed=seed, function=function))
