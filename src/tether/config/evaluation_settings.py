"""`evaluation`: what is measured on held-out data while a run trains, and which capabilities before and after it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tether.config.base import Count, Positive, Settings
from tether.config.suite_names import checked_suite


class EvaluationRules(Settings):
    """When to evaluate on held-out data, and what to do with the result."""

    every: Count = Field(
        default=0, description="Evaluate before the first and after every Nth iteration; 0 disables it."
    )
    keep_best: bool = Field(default=True, description="Keep the model with the best held-out score as best/.")
    patience: Count = Field(
        default=0, description="Stop after this many evaluations in a row without improvement; 0 disables it."
    )

    @model_validator(mode="after")
    def _something_to_wait_for(self) -> EvaluationRules:
        if self.patience and not self.every:
            raise ValueError("patience counts evaluations, but every is 0: set evaluation.every as well")
        return self


class EvaluationSettings(EvaluationRules):
    """Evaluation on held-out prompts during training."""

    prompts: Positive = Field(default=64, description="Maximum number of held-out prompts.")
    suite: tuple[str, ...] = Field(
        default=(),
        description="Capabilities to measure before the first and after the last step: perplexity, arithmetic, "
        "instructions, repetition, all, or lm-eval:TASK; see docs/suite.md.",
    )
    suite_items: Positive | None = Field(
        default=None, description="Maximum number of items of each part of the suite; null uses all."
    )

    @field_validator("suite")
    @classmethod
    def _known_parts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked_suite(value)


class RecordsEvaluationSettings(EvaluationRules):
    """Evaluation on held-out records during training."""

    every: Count = Field(
        default=0,
        description="Evaluate before the first and after every Nth step; 0: only after the last, if records are held "
        "out.",
    )
    keep_best: bool = Field(default=True, description="Keep the model with the lowest held-out loss as best/.")
    records: Positive | None = Field(default=None, description="Maximum number of held-out records; null uses all.")


class PreferenceEvaluationSettings(RecordsEvaluationSettings):
    """Evaluation on held-out preferences during training."""

    keep_best: bool = Field(default=True, description="Keep the best model, by evaluation.metric, as best/.")
    metric: Literal["loss", "accuracy"] = Field(
        default="loss", description="Selects the best model: the lowest loss, or the highest accuracy."
    )
