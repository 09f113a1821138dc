"""What a reward function takes, told by the names of its parameters. Free of torch: worker processes import it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from tether.errors import ConfigError

TEXT_NAMES = ("prompt", "completion", "answer", "id", "messages", "finish")
TRL_NAMES = ("prompts", "completions", "completion_ids", "completions_ids", "trainer_state", "log_metric", "log_extra")
OF_BATCHES = ("prompts", "completions", "completion_ids", "completions_ids")  # the names that tell TRL's shape
COLUMNS_OF_ALL = ("answer", "id", "messages", "finish")  # of every record, beside its own columns
CHOICES = "text for f(prompt, completion, **columns), trl for f(completions, **columns), rollouts for f(rollouts)"


@dataclass(frozen=True)
class Signature:
    """How a function is called."""

    takes: str  # text, trl or rollouts
    names: tuple[str, ...] = ()  # of its parameters
    required: tuple[str, ...] = ()  # those without a default
    everything: bool = False  # it has **kwargs
    by_position: int = 0  # text: how many of (prompt, completion, answer) are given by position
    awaited: bool = False  # it is an async function

    def wants(self, name: str) -> bool:
        """Whether it is called with this column."""
        return self.takes == "rollouts" or self.everything or name in self.names

    def columns(self) -> tuple[str, ...]:
        """The columns of a record that it cannot be called without."""
        known = {"text": TEXT_NAMES, "trl": (*TRL_NAMES, *COLUMNS_OF_ALL)}.get(self.takes)
        return tuple(name for name in self.required if name not in known) if known and not self.by_position else ()


def read_signature(function: Any, takes: str, name: str, field: str) -> Signature:
    """How `function`, which the recipe's `field` calls `name`, is called; `takes` is what the recipe says of it."""
    if inspect.isclass(function) or not callable(function):
        what = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}"
        raise ConfigError(f"{field}: {name} is {what}: name a function, or an object that can be called")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        if takes == "auto":
            raise ConfigError(f"{field}: the parameters of {name} cannot be read: set takes to {CHOICES}") from None
        return Signature(takes, everything=takes == "trl", by_position=3 if takes == "text" else 0)
    awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = tuple(p.name for p in named)
    chosen = _told(names) if takes == "auto" else takes
    if chosen is None:
        shown = f"{name}({', '.join(str(p).partition(':')[0] for p in parameters)})"
        raise ConfigError(f"{field}: the parameters of {shown} do not tell what it takes: set takes to {CHOICES}")
    return Signature(
        chosen,
        names,
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        _by_position(parameters, name, field) if chosen == "text" else 0,
        awaited,
    )


def _told(names: tuple[str, ...]) -> str | None:
    """What the names say; None where they say nothing, or several things."""
    signs = {"rollouts": ("rollouts",), "trl": OF_BATCHES, "text": ("completion",)}
    said = [takes for takes, marks in signs.items() if any(mark in names for mark in marks)]
    return said[0] if len(said) == 1 else None


def _by_position(parameters: list[inspect.Parameter], name: str, field: str) -> int:
    """How many arguments a function gets by position: none where any of its first three has a name that is known.

    `f(question, reply, gold)` with `takes: text` is called with prompt, completion and answer in this order. A
    function that names `completion` is called by name, so that a misspelt column is never given the answer.
    """
    first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    only = [p for p in first if p.kind is p.POSITIONAL_ONLY]
    if not only and any(p.name in TEXT_NAMES for p in parameters):
        return 0
    if only and len(only) != len(first):
        raise ConfigError(f"{field}: {name} mixes parameters before and after `/`: give all of them by name")
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3
    return len(first)
