"""The settings of `tether demo`: the whole of RLHF, stage by stage. Each stage is a recipe of its own."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tether.config.base import Count, Fraction, Positive, PositiveFloat, Settings
from tether.config.recipes import PPORecipe, RewardRecipe, SFTRecipe
from tether.config.sections import DataSettings, ModelSettings

FILLED_IN = DataSettings(train="(the demo's own)")
TUNED_IN = ModelSettings(dtype="float32")  # on every device: its rates and steps were found so


class RaterSettings(Settings):
    """The stand-in for a person who says which of two answers is better."""

    prompts: Positive = Field(default=120, description="Prompts whose answers are compared.")
    answers: int = Field(default=4, ge=2, le=9, description="Answers to each prompt, which are ranked.")
    max_new_tokens: Positive = Field(default=40, description="Longest answer that is compared.")
    temperature: PositiveFloat = Field(default=1.0, description="Of sampling the answers.")
    noise: PositiveFloat = Field(
        default=0.1, description="P(prefer A) = sigmoid((rule(A) - rule(B)) / noise): small is sure, large is careless."
    )
    tie: Fraction = Field(
        default=0.05, description="Answers whose rule scores differ by less count as equal; 0: none do."
    )
    held_out: Fraction = Field(default=0.25, description="Fraction of the prompts that the reward model never sees.")


class JudgingSettings(Settings):
    """The comparison at the end, on prompts that no stage has seen."""

    prompts: Positive = Field(default=96, description="Held-out prompts.")
    temperature: PositiveFloat = Field(default=0.7, description="Of sampling the answers that are compared.")
    max_new_tokens: Positive = Field(default=40, description="Longest answer.")
    samples_shown: Count = Field(default=8, description="Answers shown before and after in the report.")


class DemoRecipe(Settings):
    """SFT, preferences, reward model, PPO, evaluation. `model.path` of later stages is filled in by the pipeline."""

    method: ClassVar[str] = "demo"

    name: str = Field(default="demo", description="The demo's folder.")
    directory: str = Field(default="runs", description="Where runs are kept.")
    seed: int = Field(default=0, ge=0, description="Everything random follows from it.")
    sft: SFTRecipe = Field(default_factory=lambda: SFTRecipe(data=FILLED_IN, model=TUNED_IN))
    rater: RaterSettings = Field(default_factory=RaterSettings)
    reward: RewardRecipe = Field(default_factory=lambda: RewardRecipe(data=FILLED_IN, model=TUNED_IN))
    ppo: PPORecipe = Field(default_factory=lambda: PPORecipe(model=TUNED_IN))
    judging: JudgingSettings = Field(default_factory=JudgingSettings)
