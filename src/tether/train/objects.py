"""The user's own parts of a run: Python objects that a program passes, and code that a recipe names.

Both end up in `Objects`, so that the rest of training does not ask where a part came from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Any, cast

from tether.algorithms.algorithm import Algorithm
from tether.algorithms.select import build_algorithm
from tether.config.allowed_code import is_code
from tether.config.recipes import Recipe, RLRecipe
from tether.doctor.own_rules import OwnRule, own_rules
from tether.errors import ConfigError, TetherError, is_memory
from tether.models.load import LoadedModel
from tether.models.own_loader import OwnLoader
from tether.protocols import DoctorRule, ModelLoader, RolloutEngine, StepHook, Task, Tracker
from tether.rewards.calling import explain
from tether.rewards.resolve import resolve
from tether.store.trackers import NamedTracker, check_tracker
from tether.user_code import apart, is_its_own

KEYS = {"algorithm": "algorithm", "engine": "rollout.engine", "loader": "model.loader"}
"""By the argument of the Python API that takes an object: the key of a recipe that names code in its place."""

MEMBERS = {
    "generate": "method generate",
    "release": "method release",
    "cache_bytes": "cache_bytes",
    "notices": "notices",
}
HOOK_METHODS = ("begin", "restore", "heartbeat", "after_step", "state", "finish", "close")
INHERIT = "inherit from tether.protocols.RolloutEngine, whose only member without a default is generate"


@dataclass(frozen=True)
class Objects:
    """The user's own parts. `run.objects` records those that a program passes and that change what is trained.

    `named` holds, for a part that a recipe names, the name: `{"engine": "mine.py:make"}`.
    """

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])  # by part
    task: Task | None = None
    engine: RolloutEngine | Callable[[LoadedModel], RolloutEngine] | None = None
    algorithm: Algorithm | Callable[..., Algorithm] | None = None
    trackers: Sequence[Tracker | NamedTracker] = ()
    doctor_rules: Sequence[DoctorRule | OwnRule] = ()
    loader: ModelLoader | None = None
    hooks: Sequence[StepHook] = ()
    named: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        given: Any = self.trackers
        if not isinstance(given, Sequence):
            raise ConfigError(f"trackers: expected a list of trackers, was given a {type(given).__name__}")
        for place, tracker in enumerate(cast("Sequence[Any]", given)):
            if isinstance(tracker, NamedTracker):
                continue
            if isinstance(tracker, str):
                raise ConfigError(
                    f"trackers[{place}]: {tracker} is a name: pass an object here, or set store.trackers to its name"
                )
            label = f"trackers[{place}]: {name_of(tracker)}"
            check_tracker(tracker, label)
            if isinstance(tracker, type):
                raise ConfigError(f"{label} is a class: pass an object of it (tether.protocols.Tracker)")
        _check_hooks(self.hooks)
        own_rules(self.doctor_rules, "doctor_rules")
        if self.loader is not None:
            self._check_function("loader", self.loader, "pass a function from model.path to (model, tokenizer)")
        if self.engine is not None:
            self._check_engine()

    def names(self) -> tuple[str, ...]:
        """As `run.objects` records them."""
        others = {"task": self.task, "engine": self.engine, "algorithm": self.algorithm, "loader": self.loader}
        passed = {role: one for role, one in others.items() if one is not None and role not in self.named}
        return (
            *(f"reward {name}" for name in self.rewards),
            *(f"{role} {name_of(one)}" for role, one in passed.items()),
        )

    def label(self, role: str) -> str:
        """A part for errors: `rollout.engine: mine.py:make` where a recipe names it, else `engine: make`."""
        if role in self.named:
            return f"{KEYS[role]}: {self.named[role]}"
        return f"{role}: {name_of(getattr(self, role))}"

    def _check_function(self, role: str, function: Any, repair: str) -> None:
        if isclass(function) or not callable(function):
            what = "a class" if isclass(function) else f"a {type(function).__name__}"
            raise ConfigError(f"{self.label(role)} is {what}: {repair}")

    def _check_engine(self) -> None:
        """Raise, before a model is loaded, where it can be told that this is no engine and makes none."""
        engine: Any = self.engine
        if not callable(engine) and not hasattr(engine, "generate"):
            raise ConfigError(
                f"{self.label('engine')} is a {type(engine).__name__}: give a function from the policy to an engine"
            )
        if isclass(engine):
            self._check_members(engine)

    def _check_members(self, engine: Any) -> None:
        for name, words in MEMBERS.items():
            if not hasattr(engine, name):
                raise ConfigError(f"{self.label('engine')} has no {words}: {INHERIT}")
        kind: Any = engine if isclass(engine) else type(engine)
        if kind.generate is RolloutEngine.generate:
            raise ConfigError(f"{self.label('engine')} has no method generate of its own: write it")

    def engine_for(self, policy: LoadedModel) -> RolloutEngine | None:
        """The engine that was given; where a function or a class was, what it makes for the policy."""
        if self.engine is None:
            return None
        is_factory = isclass(self.engine) or not hasattr(self.engine, "generate")
        engine: Any = self._called("engine", self.engine, policy) if is_factory else self.engine
        self._check_members(engine)
        return engine

    def algorithm_for(self, recipe: RLRecipe) -> Algorithm:
        """The recipe's algorithm; where one was given, that one, or what the function that was given makes."""
        shipped = build_algorithm(recipe)
        if self.algorithm is None:
            return shipped
        repair = "pass an Algorithm, or a function from the recipe's Algorithm to another"
        chosen: Any = self.algorithm
        if not isinstance(chosen, Algorithm):
            self._check_function("algorithm", chosen, repair)
            chosen = self._called("algorithm", chosen, **self._arguments(chosen, shipped, recipe))
        if not isinstance(chosen, Algorithm):
            raise ConfigError(f"{self.label('algorithm')} gave a {type(chosen).__name__}: {repair}")
        chosen.check()
        for name, controller in (("reference", chosen.controllers.reference), ("old", chosen.controllers.old)):
            _check_controller(f"algorithm {chosen.name}: controllers.{name}", controller)
        samples = recipe.rollout.samples_per_prompt
        if chosen.needs_groups and samples < 2:
            raise ConfigError(
                f"algorithm {chosen.name} compares the samples of a prompt, and rollout.samples_per_prompt is "
                f"{samples}: set it to 2 or more"
            )
        if recipe.roles.critic_init is not None and not chosen.needs_critic:
            raise ConfigError(f"roles.critic_init is set, but algorithm {chosen.name} trains no critic: leave it out")
        return chosen

    def _arguments(self, function: Any, shipped: Algorithm, recipe: RLRecipe) -> dict[str, Any]:
        """A parameter called `recipe` gets the recipe; the other one gets the algorithm of the recipe's method."""
        kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        parameters = [each for each in signature(function).parameters.values() if each.kind in kinds]
        others = [each.name for each in parameters if each.name != "recipe" and each.default is Parameter.empty]
        if len(others) > 1 or not parameters:
            raise ConfigError(
                f"{self.label('algorithm')} takes {len(others)} parameters: write f(algorithm), f(recipe) or "
                "f(algorithm, recipe)"
            )
        given: dict[str, Any] = dict.fromkeys(others, shipped)
        return given | ({"recipe": recipe} if len(others) < len(parameters) and _has(parameters, "recipe") else {})

    def own_loader(self) -> OwnLoader | None:
        """The loader of the model that was given."""
        if self.loader is None:
            return None

        @wraps(self.loader)
        def load(*arguments: Any, **named: Any) -> Any:
            return self._called("loader", self.loader, *arguments, **named)

        return OwnLoader(load, self.label("loader"))

    def _called(self, role: str, function: Any, *arguments: Any, **named: Any) -> Any:
        """What the user's function returns; an exception of code that a recipe names is told with its line."""
        try:
            return function(*arguments, **named)
        except TetherError:
            raise
        except BaseException as error:
            if role not in self.named or not is_its_own(error) or is_memory(error):
                raise  # a program that passed the function wants the traceback
            raise ConfigError(f"{self.label(role)} raised {explain(error)}") from error


def _check_controller(label: str, controller: Any) -> None:
    """Raise where a KL controller lacks a part, or where a checkpoint could not hold it."""
    kind = type(controller).__name__
    number: Any = getattr(controller, "coef", None)
    if not isinstance(number, float | int) or not callable(getattr(controller, "after", None)):
        raise ConfigError(f"{label} {kind} needs the number coef, and after(kl, samples) (tether.ops.kl.KLController)")
    try:
        restored = type(controller)(**json.loads(json.dumps(asdict(controller))))
    except (TypeError, ValueError):
        restored = None
    if restored != controller:
        raise ConfigError(
            f"{label}: {kind} cannot be written to a checkpoint and read back: make it a frozen dataclass whose fields "
            "are numbers, texts and flags"
        )


def _check_hooks(hooks: Any) -> None:
    if not isinstance(hooks, Sequence):
        raise ConfigError(f"hooks: expected a list of hooks, was given a {type(hooks).__name__}")
    for place, hook in enumerate(cast("Sequence[Any]", hooks)):
        missing = [name for name in HOOK_METHODS if not callable(getattr(hook, name, None))]
        if isclass(hook) or missing:
            wrong = f"has no method {missing[0]}" if missing else "is a class: pass an object of it"
            raise ConfigError(f"hooks[{place}]: {name_of(hook)} {wrong} (tether.protocols.StepHook)")


def _has(parameters: Sequence[Parameter], name: str) -> bool:
    return any(each.name == name for each in parameters)


def with_named_code(recipe: Recipe, objects: Objects) -> Objects:
    """The objects, with the code that the recipe names loaded and checked; no model is needed for that.

    Called again on its own result it changes nothing.
    """
    found: dict[str, Any] = {}
    references = {"loader": recipe.model.loader}
    if isinstance(recipe, RLRecipe):
        engine = recipe.rollout.engine
        references |= {"algorithm": recipe.algorithm, "engine": engine if is_code(engine) else None}
    for role, reference in references.items():
        if reference is None or role in objects.named:
            continue
        if getattr(objects, role) is not None:
            raise ConfigError(f"{role} is passed as an object, and {KEYS[role]} names {reference}: leave one out")
        found[role] = _load(reference, KEYS[role])
    named = {**objects.named, **{role: str(references[role]) for role in found}}
    known = {each.name for each in objects.trackers if isinstance(each, NamedTracker)}
    trackers = [name for name in recipe.store.trackers if is_code(name) and name not in known]
    added = [NamedTracker(name, _load(name, "store.trackers")) for name in trackers]
    for tracker in added:
        tracker.check()
    rules = own_rules(objects.doctor_rules, "doctor_rules")
    unread = [name for name in recipe.run.doctor_rules if name not in {rule.name for rule in rules}]
    rules += own_rules(unread, "run.doctor_rules")
    objects = replace(objects, named=named, trackers=[*objects.trackers, *added], doctor_rules=rules, **found)
    if isinstance(recipe, RLRecipe) and objects.algorithm is not None and not isinstance(objects.algorithm, Algorithm):
        return replace(objects, algorithm=objects.algorithm_for(recipe))
    return objects


def loader_named(recipe: Recipe) -> OwnLoader | None:
    """The loader that the recipe names, where it names one."""
    reference = recipe.model.loader
    if reference is None:
        return None
    return Objects(loader=_load(reference, KEYS["loader"]), named={"loader": reference}).own_loader()


def check_loader(recipe: Recipe, loader: OwnLoader | None) -> None:
    """Refuse settings that need Tether's own loader."""
    if loader is None:
        return
    if recipe.model.quantize != "none":
        raise ConfigError(
            f"{loader.label} loads the model, and model.quantize is {recipe.model.quantize}: leave one of them out"
        )
    if recipe.roles.mode == "lora":
        raise ConfigError(
            f"{loader.label} loads the model, and roles.mode is lora: saved adapters name their base by model.path, "
            "which is loaded without your function; use roles.mode separate or shared_backbone"
        )


def _load(reference: str, field: str) -> Any:
    with apart(), redirect_stdout(sys.stderr):
        return resolve(reference, field)


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
            f"{run} was started from Python with objects that its recipe cannot hold ({', '.join(missing)}): pass them "
            f"again from Python, as in tether.load_run({str(run)!r}).{call}({words})"
        )
    added = [name for name in given if name not in expected]
    raise ConfigError(f"{run} was started without {', '.join(added)}: leave it out, or start a new run with it")
