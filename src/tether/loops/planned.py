"""The plan of a run beside what the run really took: made as it begins, filled in step by step, kept at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tether.config.recipes import Recipe, RLRecipe
from tether.loops.training import FromRollouts, Training
from tether.models.load import LoadedModel
from tether.plan.machine import machine_for
from tether.plan.measured import Measured
from tether.plan.plan import Plan, make_plan
from tether.plan.shape import Shape
from tether.plan.work import PROMPTS_LOOKED_AT, Lengths

FILE = "plan.json"


@dataclass(frozen=True)
class RunPlan:
    """What was predicted and what was measured."""

    plan: Plan
    measured: Measured

    @classmethod
    def of(cls, recipe: Recipe, shape: Shape, training: Training, policy: LoadedModel) -> RunPlan:
        """Predict, and begin to measure."""
        device = policy.model.device
        machine = machine_for(str(device), recipe.model.dtype)
        plan = make_plan(recipe, shape, _lengths(recipe, training, policy), machine)
        return cls(plan, Measured(on_cpu=device.type == "cpu"))

    def as_json(self) -> dict[str, Any]:
        """Both, as plain data."""
        return {"predicted": self.plan.as_json(), "measured": self.measured.as_json()}


def _lengths(recipe: Recipe, training: Training, policy: LoadedModel) -> Lengths:
    if isinstance(recipe, RLRecipe):
        assert isinstance(training, FromRollouts)
        return Lengths.of(training.parts.prompts.take(0, PROMPTS_LOOKED_AT), policy.tokenizer)
    return Lengths.of_records(recipe)
