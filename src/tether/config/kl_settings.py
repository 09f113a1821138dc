"""The KL of an RL recipe: where it counts, its weight, and the policy that it is to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tether.config.base import NonNegative, PositiveFloat, Settings

START = "start"  # of kl.reference


class KLSettings(Settings):
    """The KL to the reference, by default the policy before RL."""

    apply_to: Literal["reward", "loss", "none"] = Field(
        default="reward", description="Where the KL to the reference is applied."
    )
    coef: NonNegative = Field(default=0.05, description="Initial weight of the KL.")
    estimator: Literal["k1", "k2", "k3"] = Field(default="k1", description="Per-token estimator of the KL.")
    controller: Literal["fixed", "adaptive", "proportional"] = Field(
        default="fixed", description="fixed; adaptive doubles and halves (PPO paper); proportional (RLHF papers)."
    )
    target: PositiveFloat = Field(default=6.0, description="Target KL per sequence, for adaptive and proportional.")
    horizon: PositiveFloat = Field(default=10_000, description="Horizon of the proportional controller, in samples.")
    reference: str = Field(
        default=START,
        min_length=1,
        description="The policy that the KL is to: start, this run's policy before its first step; or a run, or the "
        "folder of a model with the same tokenizer.",
    )

    @model_validator(mode="after")
    def _a_kl_to_it(self) -> KLSettings:
        if self.reference != START and self.apply_to == "none":
            raise ValueError(
                f"reference is {self.reference}, but apply_to is none, so no KL is computed: set apply_to, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _something_to_adapt(self) -> KLSettings:
        if self.controller != "fixed" and self.coef == 0.0:
            raise ValueError("coef is 0, and no controller can change 0: start above 0, or use controller: fixed")
        return self
