"""Who ranks answers: a stand-in with a stated rule and a person's noise, or the person at the terminal."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from tether.config.demo import RaterSettings
from tether.demo.rule import rule_score
from tether.seeds import derive_seed
from tether.types import Rollout


class Rater(Protocol):
    """Ranks the answers to one prompt."""

    def __call__(self, answers: Sequence[Rollout]) -> list[int] | None:
        """A rank for each answer, 0 for the best and equal for ties; None where there is nothing to choose."""
        ...


@dataclass(frozen=True)
class StandInRater:
    """Ranks by rule(answer) / noise + Gumbel noise, so that any two answers are chosen between as a person would.

    P(prefers A to B) = sigmoid((rule(A) - rule(B)) / noise) (Plackett 1975, Luce 1959). Neighbours in the ranking whose
    rule scores differ by less than `tie` share a rank; with a `tie` of 0 the noise decides between equals.
    """

    settings: RaterSettings
    seed: int

    def __call__(self, answers: Sequence[Rollout]) -> list[int] | None:
        """The same ranking each time it is asked for the same answers."""
        noise = random.Random(derive_seed(self.seed, "rater", answers[0].prompt.id))  # noqa: S311 (not a secret)
        scores = [rule_score(answer).value for answer in answers]
        liking = [score / self.settings.noise - math.log(-math.log(1.0 - noise.random())) for score in scores]
        order = sorted(range(len(answers)), key=lambda index: -liking[index])
        ranks = [0] * len(answers)
        for better, worse in itertools.pairwise(order):
            tied = abs(scores[better] - scores[worse]) < self.settings.tie
            ranks[worse] = ranks[better] + (not tied)
        return ranks if max(ranks) > 0 else None


class PersonRater:
    """Asks the person at the terminal about the first two answers, for as many prompts as they like.

    After `q` the stand-in ranks the rest.
    """

    def __init__(self, console: Console, after: Rater, ask: Callable[[str], str] = input) -> None:
        self.console = console
        self.after = after
        self.ask = ask
        self.asked = 0
        self.done = False

    def __call__(self, answers: Sequence[Rollout]) -> list[int] | None:
        """1 or 2 for the better answer, s to skip the pair, q to leave the rest to the stand-in."""
        if self.done:
            return self.after(answers)
        self.console.rule(f"Pair {self.asked + 1}")
        self.console.print(escape(answers[0].prompt.messages[-1]["content"]), style="bold")
        for number, answer in enumerate(answers[:2], start=1):
            cut = "" if answer.finish == "stop" else " (cut off)"
            self.console.print(Panel(escape(answer.completion.strip()), title=f"{number}{cut}"))
        while True:
            try:
                word = self.ask("Better: 1 or 2, s to skip, q to leave the rest to the stand-in: ").strip().lower()
            except EOFError:
                word = "q"
            if word == "q":
                self.done = True
                return self.after(answers)
            if word in ("1", "2", "s"):
                self.asked += 1
                return {"1": [0, 1], "2": [1, 0], "s": None}[word]
