"""Who compares two answers: a stand-in with a stated rule and a person's noise, or the person at the terminal."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import Console
from rich.panel import Panel

from tether.config.demo import RaterSettings
from tether.demo.rule import rule_score
from tether.seeds import derive_seed
from tether.types import Rollout

Choice = Literal["first", "second"]


class Rater(Protocol):
    """Chooses between two answers to one prompt."""

    def __call__(self, first: Rollout, second: Rollout) -> Choice | None:
        """The better one, or None where they are too close to call."""
        ...


@dataclass(frozen=True)
class StandInRater:
    """P(first) = sigmoid((rule(first) - rule(second)) / noise); answers within `tie` of each other are passed over."""

    settings: RaterSettings
    seed: int

    def __call__(self, first: Rollout, second: Rollout) -> Choice | None:
        """A choice that is the same each time it is asked of the same pair."""
        difference = rule_score(first).value - rule_score(second).value
        if abs(difference) <= self.settings.tie:
            return None
        name = (first.prompt.id, first.sample_id, second.sample_id)
        coin = random.Random(derive_seed(self.seed, "rater", *name)).random()  # noqa: S311 (noise, not a secret)
        return "first" if coin < 1.0 / (1.0 + math.exp(-difference / self.settings.noise)) else "second"


class PersonRater:
    """Asks the person at the terminal, for as many pairs as they like; the stand-in takes over after `quit`."""

    def __init__(self, console: Console, after: Rater, ask: Callable[[str], str] = input) -> None:
        self.console = console
        self.after = after
        self.ask = ask
        self.asked = 0
        self.done = False

    def __call__(self, first: Rollout, second: Rollout) -> Choice | None:
        """1 or 2 for the better answer, s to skip, q to leave the rest to the stand-in."""
        if self.done:
            return self.after(first, second)
        self.console.rule(f"Pair {self.asked + 1}")
        self.console.print(first.prompt.messages[-1]["content"], style="bold", markup=False)
        for number, answer in (("1", first), ("2", second)):
            cut = "" if answer.finish == "stop" else " (cut off)"
            self.console.print(Panel(answer.completion.strip().replace("[", r"\["), title=f"{number}{cut}"))
        while True:
            try:
                word = self.ask("Better: 1 or 2, s to skip, q to leave the rest to the stand-in: ").strip().lower()
            except EOFError:
                word = "q"
            if word == "q":
                self.done = True
                return self.after(first, second)
            if word in ("1", "2", "s"):
                self.asked += 1
                return {"1": "first", "2": "second", "s": None}[word]  # pyright: ignore[reportReturnType]
