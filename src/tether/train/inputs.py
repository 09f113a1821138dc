"""What a run is given beside its models: prompts or records from the recipe, and Python objects from a program.

Prompts and records are parsed and checked before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.algorithms.algorithm import Algorithm
from tether.config.recipes import DPORecipe, Recipe, RewardRecipe, RLRecipe, SFTRecipe
from tether.config.sections import DataSettings
from tether.data.examples import Parsed, parse_demonstrations, parse_rankings
from tether.data.prompts import PromptRule
from tether.data.sources import places_of, shown_source
from tether.errors import ConfigError, DataError
from tether.models.load import LoadedModel
from tether.models.tokenizer import TextModel, read_tokenizer
from tether.protocols import RolloutEngine, StepHook, Task, Tracker
from tether.rewards.tasks import RecipeTask, build_task, fitted
from tether.store.find import find_model


@dataclass(frozen=True)
class Inputs:
    """A task for RL; records for the rest."""

    task: RecipeTask | None = None
    train: Parsed | None = None
    held_out: Parsed | None = None
    centre: Parsed | None = None  # demonstrations that a reward model's scores are centred on

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know before training starts."""
        return self.task.notices if self.task is not None else ()


def read_before_loading(recipe: Recipe, task_object: Task | None = None) -> Inputs | None:
    """The inputs, read with the tokenizer alone; None where the model must be loaded first."""
    if not isinstance(recipe, RLRecipe):
        return read_inputs(recipe)
    # First, so that a wrong file is reported even if the model is wrong too.
    task = build_task(recipe.task, recipe.data, task_object)
    try:
        model = read_tokenizer(find_model(recipe.model.path))
    except ConfigError:
        return None  # loading the model says what is wrong with it
    return Inputs(task=checked(recipe, task, model))


def read_inputs(recipe: Recipe, model: TextModel | None = None, task_object: Task | None = None) -> Inputs:
    """The prompts or records of a recipe; prompts are checked against the limits of `model`."""
    match recipe:
        case RLRecipe():
            assert model is not None
            return Inputs(task=checked(recipe, build_task(recipe.task, recipe.data, task_object), model))
        case SFTRecipe():
            return _records(recipe.data, parse_demonstrations)
        case RewardRecipe():
            found = _records(recipe.data, parse_rankings)
            centre = parse_demonstrations(recipe.reward.center_on) if recipe.reward.center_on else None
            return Inputs(train=found.train, held_out=found.held_out, centre=centre)
        case DPORecipe():
            return _records(recipe.data, parse_rankings)
        case _:
            raise ValueError(f"{recipe.method} reads neither prompts nor records")


def checked(recipe: RLRecipe, task: RecipeTask, model: TextModel) -> RecipeTask:
    """The task with the prompts that fit the model. Raises ConfigError where `evaluation.every` has no prompts."""
    if recipe.evaluation.every and not task.held_out():
        raise ConfigError(
            f"evaluation.every is {recipe.evaluation.every}, and task {recipe.task.task_name} holds out no prompts: "
            "let its held_out() return some, or set evaluation.every to 0"
        )
    return fitted(task, PromptRule.of(recipe.data, model.context_length, recipe.rollout.max_new_tokens), model)


def _records(data: DataSettings, parse: Callable[..., Parsed]) -> Inputs:
    return Inputs(train=parse(data.train, data), held_out=_held_out(data, parse))


def _held_out(data: DataSettings, parse: Callable[..., Parsed]) -> Parsed | None:
    source = data.held_out
    if source is None and data.held_out_split is not None:
        if not all(place.has_splits for place in places_of(data.train)):
            raise DataError(
                f"data.held_out_split is {data.held_out_split}, and {shown_source(data.train)} has no splits: set "
                "data.held_out to a file"
            )
        source = data.train
    return parse(source, data, split=data.held_out_split) if source is not None else None


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
        """The names that `run.objects` records."""
        others = {"task": self.task, "engine": self.engine, "algorithm": self.algorithm}
        return (
            *(f"reward {name}" for name in self.rewards),
            *(f"{role} {name_of(one)}" for role, one in others.items() if one is not None),
        )

    def engine_for(self, policy: LoadedModel) -> RolloutEngine | None:
        """The engine that was passed, or the one that the passed function makes for the policy."""
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
        """The algorithm that was passed, or the one that the passed function makes of the recipe's."""
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
    """The name of an object in records and errors: of the function, or of the class."""
    name = getattr(thing, "__name__", None) or getattr(getattr(thing, "func", None), "__name__", None)
    name = name if isinstance(name, str) else type(thing).__name__
    kept = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "" for letter in name)
    return kept or type(thing).__name__


def check_objects(recipe: Recipe, objects: Objects, run: str | Path, call: str = "resume") -> None:
    """Raise ConfigError unless the objects passed now are those that the run started with.

    `call` is the method of the Python API that takes them.
    """
    expected, given = recipe.run.objects, objects.names()
    if sorted(expected) == sorted(given):
        return
    if missing := [name for name in expected if name not in given]:
        words = ", ".join(f"{name.partition(' ')[0]}=..." for name in dict.fromkeys(missing))
        raise ConfigError(
            f"{run} was started from Python with objects that its recipe cannot hold ({', '.join(missing)}): pass them "
            f"again from Python, as in tether.load_run({str(run)!r}).{call}({words})"
        )
    added = [name for name in given if name not in expected]
    raise ConfigError(f"{run} was started without {', '.join(added)}: leave it out, or start a new run with it")
