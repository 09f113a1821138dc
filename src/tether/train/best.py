"""The best model so far, by a held-out metric, and how long none was better: part of a run's state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.config.recipes import Recipe, RecordsRecipe, RLRecipe
from tether.config.sections import PreferenceEvaluationSettings


@dataclass
class BestSoFar:
    """What was best. `best` is greater where better: a loss is held with its sign turned."""

    metric: str  # such as held_out/score
    sign: float
    patience: int  # evaluations without a better one before the run ends; 0: it does not end for that
    keeps: bool  # whether the best model is saved
    best: float = -math.inf
    waited: int = 0  # evaluations since the best
    step: int | None = None  # after how many steps the best was seen; None: before the first, or never

    @classmethod
    def of(cls, recipe: Recipe) -> BestSoFar:
        """As the recipe says; for records the loss unless it says otherwise."""
        if isinstance(recipe, RLRecipe):
            rules, name, sign = recipe.evaluation, "score", 1.0
        else:
            assert isinstance(recipe, RecordsRecipe)
            rules = recipe.evaluation
            by_accuracy = isinstance(rules, PreferenceEvaluationSettings) and rules.metric == "accuracy"
            name, sign = ("accuracy", 1.0) if by_accuracy else ("loss", -1.0)
        # One look at the end chooses nothing.
        return cls(f"held_out/{name}", sign, rules.patience, rules.keep_best and rules.every > 0)

    def see(self, done: int, metrics: Mapping[str, float]) -> bool:
        """Whether the model after `done` steps is better than all before it, the start included.

        A value that is not finite is never better.
        """
        start = self.sign * metrics.get(f"start/{self.metric}", math.nan)
        if math.isfinite(start):
            self.best = max(self.best, start)
        if self.metric not in metrics:
            return False
        value = self.sign * metrics[self.metric]
        if not (math.isfinite(value) and value > self.best):
            self.waited += 1
            return False
        self.best, self.waited, self.step = value, 0, done
        return True

    @property
    def is_over(self) -> bool:
        """Whether nothing better came for so long that the run ends."""
        return bool(self.patience) and self.waited >= self.patience

    @property
    def words(self) -> str:
        """Why the run ended early."""
        name = self.metric.replace("_", "-").replace("/", " ")
        return f"the {name} was not better in {self.waited} evaluations (evaluation.patience)"

    def values(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {"best": self.best, "waited": self.waited, "best_step": self.step}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Become what was captured; a fork that looks at another metric, or waits otherwise, goes on from it."""
        self.best = float(values["best"])
        self.waited = int(values.get("waited", 0))
        self.step = values.get("best_step")
