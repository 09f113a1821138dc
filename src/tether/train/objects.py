"""Python objects that a program passes in place of names in a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.algorithms.algorithm import Algorithm
from tether.config.recipes import Recipe
from tether.errors import ConfigError
from tether.models.load import LoadedModel
from tether.protocols import RolloutEngine, StepHook, Task, Tracker

HOOK_METHODS = ("begin", "restore", "heartbeat", "after_step", "state", "finish", "close")


@dataclass(frozen=True)
class Objects:
    """The objects that a program passes. `run.objects` records all of them except trackers and hooks."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])  # by part
    task: Task | None = None
    engine: RolloutEngine | Callable[[LoadedModel], RolloutEngine] | None = None
    algorithm: Algorithm | Callable[[Algorithm], Algorithm] | None = None
    trackers: Sequence[Tracker] = ()
    hooks: Sequence[StepHook] = ()

    def __post_init__(self) -> None:
        _check_list("trackers", self.trackers, Tracker, ("record", "close"))
        _check_list("hooks", self.hooks, StepHook, HOOK_METHODS)

    def names(self) -> tuple[str, ...]:
        """As `run.objects` records them."""
        others = {"task": self.task, "engine": self.engine, "algorithm": self.algorithm}
        return (
            *(f"reward {name}" for name in self.rewards),
            *(f"{role} {name_of(one)}" for role, one in others.items() if one is not None),
        )

    def engine_for(self, policy: LoadedModel) -> RolloutEngine | None:
        """The engine that was passed; where a factory was, what it makes for the policy."""
        if self.engine is None:
            return None
        is_factory = isinstance(self.engine, type) or not hasattr(self.engine, "generate")
        engine: Any = self.engine(policy) if is_factory else self.engine  # pyright: ignore[reportCallIssue]
        wanted = {"generate": "method generate", "release": "method release", "cache_bytes": "cache_bytes"}
        for name, words in (wanted | {"notices": "notices"}).items():
            if not hasattr(engine, name):
                raise ConfigError(
                    f"engine: {name_of(self.engine)} has no {words}: inherit from tether.protocols.RolloutEngine, "
                    "whose only member without a default is generate"
                )
        return engine

    def algorithm_for(self, recipe_algorithm: Algorithm) -> Algorithm:
        """The algorithm that was passed, or what the function that was passed makes of the recipe's."""
        if self.algorithm is None:
            return recipe_algorithm
        chosen = self.algorithm if isinstance(self.algorithm, Algorithm) else self.algorithm(recipe_algorithm)
        if not isinstance(chosen, Algorithm):
            raise ConfigError(
                f"algorithm: {name_of(self.algorithm)} gave a {type(chosen).__name__}: pass an Algorithm, or a "
                "function from the recipe's Algorithm to another"
            )
        return chosen


def _check_list(argument: str, given: Any, protocol: type, methods: Sequence[str]) -> None:
    """Raise ConfigError unless `given` is a list of objects with these methods."""
    if not isinstance(given, Sequence):
        raise ConfigError(f"{argument}: expected a list of {argument}, was given a {type(given).__name__}")
    for place, each in enumerate(given):
        missing = [name for name in methods if not callable(getattr(each, name, None))]
        if isinstance(each, type) or missing:
            wrong = f"has no method {missing[0]}" if missing else "is a class: pass an object of it"
            raise ConfigError(f"{argument}[{place}]: {name_of(each)} {wrong} (tether.protocols.{protocol.__name__})")


def name_of(thing: Any) -> str:
    """What an object is called in records and errors: a function's own name, else that of its class."""
    name = getattr(thing, "__name__", None) or getattr(getattr(thing, "func", None), "__name__", None)
    name = name if isinstance(name, str) else type(thing).__name__
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "" for letter in name)
    return kept or type(thing).__name__


def check_objects(recipe: Recipe, objects: Objects, run: str | Path, call: str = "resume") -> None:
    """Raise where a run was begun with objects that are not passed now, or where others are passed.

    `call` is the method of the Python API that takes them.
    """
    expected, given = recipe.run.objects, objects.names()
    if sorted(expected) == sorted(given):
        return
    if missing := [name for name in expected if name not in given]:
        words = ", ".join(f"{name.partition(' ')[0]}=..." for name in dict.fromkeys(missing))
        raise ConfigError(
            f"{run} was begun from Python with objects that its recipe cannot hold ({', '.join(missing)}): pass them "
            f"again from Python, as in tether.load_run({str(run)!r}).{call}({words})"
        )
    added = [name for name in given if name not in expected]
    raise ConfigError(f"{run} was begun without {', '.join(added)}: leave it out, or begin a new run with it")
