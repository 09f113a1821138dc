"""A recipe is everything a run needs to know; one class for each method."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from tether.config.base import Settings
from tether.config.methods import (
    DPOSettings,
    GRPOSettings,
    PPOSettings,
    PtxSettings,
    ReinforceSettings,
    RewardModelSettings,
    RLOOSettings,
    SFTSettings,
    TRPOSettings,
    need_group,
)
from tether.config.parts import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    KLSettings,
    ModelSettings,
    OptimizerSettings,
    RewardSettings,
    RolesSettings,
    RolloutSettings,
    RunSettings,
    StoreSettings,
    TaskSettings,
)


class Recipe(Settings):
    """What every method needs."""

    method: ClassVar[str]

    model: ModelSettings = Field(default_factory=ModelSettings)
    roles: RolesSettings = Field(default_factory=RolesSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    run: RunSettings = Field(default_factory=RunSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)


class RLRecipe(Recipe):
    """What every method that learns from rollouts needs."""

    task: TaskSettings = Field(default_factory=TaskSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    kl: KLSettings = Field(default_factory=KLSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)

    @model_validator(mode="after")
    def _kl_that_teaches(self) -> RLRecipe:
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.kl.controller == "proportional" and self.kl.horizon < samples:
            raise ValueError(
                f"kl.horizon is {self.kl.horizon}, below the {samples} samples of one step: the controller would "
                "overshoot; raise it"
            )
        if self.kl.place == "loss" and self.kl.estimator == "k1":
            raise ValueError(
                "kl.estimator k1 in the loss has a gradient whose mean is zero, whatever the KL: use k2 or k3 there"
            )
        return self


class PPORecipe(RLRecipe):
    """PPO: clipped, unclipped or with a KL penalty."""

    method: ClassVar[str] = "ppo"
    ppo: PPOSettings = Field(default_factory=PPOSettings)
    ptx: PtxSettings = Field(default_factory=PtxSettings)


class ReinforceRecipe(RLRecipe):
    """REINFORCE with any of four weightings."""

    method: ClassVar[str] = "reinforce"
    reinforce: ReinforceSettings = Field(default_factory=ReinforceSettings)


class RLOORecipe(RLRecipe):
    """Leave-one-out."""

    method: ClassVar[str] = "rloo"
    rloo: RLOOSettings = Field(default_factory=RLOOSettings)
    rollout: RolloutSettings = Field(default_factory=lambda: RolloutSettings(prompts_per_step=16, samples_per_prompt=4))

    @model_validator(mode="after")
    def _groups(self) -> RLOORecipe:
        need_group(self.rollout.samples_per_prompt, "RLOO")
        if self.rloo.epochs > 1 and self.rloo.objective == "reinforce":
            raise ValueError("rloo.epochs above 1 needs objective: clip; -A log pi is right for one pass only")
        return self


class GRPORecipe(RLRecipe):
    """Group-relative."""

    method: ClassVar[str] = "grpo"
    grpo: GRPOSettings = Field(default_factory=GRPOSettings)
    rollout: RolloutSettings = Field(default_factory=lambda: RolloutSettings(prompts_per_step=16, samples_per_prompt=4))
    kl: KLSettings = Field(default_factory=lambda: KLSettings(place="loss", estimator="k3"))

    @model_validator(mode="after")
    def _groups(self) -> GRPORecipe:
        need_group(self.rollout.samples_per_prompt, "GRPO")
        return self


class TRPORecipe(RLRecipe):
    """A hard trust region. The critic is a model of its own: the trust region is over the policy's parameters alone."""

    method: ClassVar[str] = "trpo"
    # Its step is written into the weights themselves: no float32 copy catches what bfloat16 would round away.
    model: ModelSettings = Field(default_factory=lambda: ModelSettings(dtype="float32"))
    trpo: TRPOSettings = Field(default_factory=TRPOSettings)

    @model_validator(mode="after")
    def _own_critic(self) -> TRPORecipe:
        if self.roles.critic != "separate":
            raise ValueError("roles.critic must be separate with TRPO: its step is over the policy's parameters alone")
        if self.kl.place == "loss":
            raise ValueError("kl.place must be reward or none with TRPO: its surrogate has no other term")
        return self


class DPORecipe(Recipe):
    """Preferences without a reward model."""

    method: ClassVar[str] = "dpo"
    data: DataSettings
    dpo: DPOSettings = Field(default_factory=DPOSettings)


class SFTRecipe(Recipe):
    """Supervised fine-tuning."""

    method: ClassVar[str] = "sft"
    data: DataSettings
    sft: SFTSettings = Field(default_factory=SFTSettings)


class RewardRecipe(Recipe):
    """A reward model."""

    method: ClassVar[str] = "reward"
    # Preferences are few and its rate is small: the figures in docs/results.md are float32's.
    model: ModelSettings = Field(default_factory=lambda: ModelSettings(dtype="float32"))
    data: DataSettings
    reward: RewardModelSettings = Field(default_factory=RewardModelSettings)


RECIPES: dict[str, type[Recipe]] = {
    recipe.method: recipe
    for recipe in (
        SFTRecipe,
        RewardRecipe,
        PPORecipe,
        ReinforceRecipe,
        RLOORecipe,
        GRPORecipe,
        TRPORecipe,
        DPORecipe,
    )
}
