"""The settings of a sweep: the `sweep:` section of a recipe's file, and the options of `tether sweep`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from tether.config.base import Positive, Settings

Sampler = Literal["grid", "one-at-a-time", "random", "tpe"]
SAMPLED = ("random", "tpe")  # the samplers that draw settings, and take a budget
DEFAULT_BUDGET = 20


class SweepSettings(Settings):
    """What is varied, over how many seeds, and how a setting is judged."""

    method: ClassVar[str] = "sweep"

    vary: dict[str, Any] = Field(
        default_factory=dict,
        description="The varied keys of the recipe, each with a list of values, or a range as text: 0.01..0.3, "
        "0.01..0.3:log, 0.01..0.3:log:5 (five points).",
    )
    sampler: Sampler | None = Field(
        default=None,
        description="grid: every combination; one-at-a-time: each key alone, the others as in the recipe; random; tpe. "
        "Default: grid, or random where a range has no number of points.",
    )
    seeds: Positive = Field(default=3, description="Runs of each setting, with seeds from run.seed on.")
    budget: Positive | None = Field(
        default=None, description=f"Number of settings that random and tpe draw; default: {DEFAULT_BUDGET}."
    )
    metric: str | None = Field(
        default=None,
        description="The metric that judges a setting; default: held_out/score if the recipe evaluates, else score "
        "(loss, for methods that learn from records).",
    )
    direction: Literal["max", "min"] | None = Field(
        default=None, description="Whether more is better; default: min for a loss or a KL, else max."
    )
    prune: bool = Field(
        default=False,
        description="Stop a setting at a quarter or half of its steps if all its seeds are below the median.",
    )

    @model_validator(mode="after")
    def _budget_of_a_sampler(self) -> SweepSettings:
        if self.budget is not None and self.sampler in ("grid", "one-at-a-time"):
            raise ValueError(
                f"budget is the number of settings that random and tpe draw, and sampler is {self.sampler}, which runs "
                "all: leave budget out, or choose sampler random"
            )
        return self
