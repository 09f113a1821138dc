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
from tether.config.sections import (
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    KLSettings,
    ModelSettings,
    OptimizerSettings,
    PreferenceEvaluationSettings,
    PromptSettings,
    RecordsEvaluationSettings,
    RecordsRunSettings,
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

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return False

    @model_validator(mode="after")
    def _critic_from_has_a_critic(self) -> Recipe:
        if self.roles.critic_init is not None and not self.needs_critic:
            raise ValueError(
                f"roles.critic_init is set, but this recipe ({self.method}) trains no critic: leave it out"
            )
        return self


class RLRecipe(Recipe):
    """What every method that learns from rollouts needs."""

    task: TaskSettings = Field(default_factory=TaskSettings)
    data: PromptSettings = Field(default_factory=PromptSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    kl: KLSettings = Field(default_factory=KLSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)

    @model_validator(mode="after")
    def _own_prompts(self) -> RLRecipe:
        if self.task.prompts is None:
            return self
        if self.task.reward is None:
            kinds = [part.kind for part in self.reward.parts]
            if not kinds:
                raise ValueError(
                    "task.prompts has no reward: set reward.parts, such as [{kind: function, function: mine:score}] or "
                    "[{kind: math}], or set task.reward"
                )
            if "task" in kinds:
                raise ValueError(
                    "reward.parts has a part of kind task, and task.prompts has no reward of its own: set task.reward, "
                    "or remove the part"
                )
        held_out = self.task.held_out is not None or self.task.held_out_fraction or self.data.held_out_split is not None
        if self.evaluation.every and not held_out:
            raise ValueError(
                f"evaluation.every is {self.evaluation.every}, and there are no held-out prompts: set task.held_out to "
                "a file of them, or task.held_out_fraction to hold out some of task.prompts, or evaluation.every to 0"
            )
        return self

    @model_validator(mode="after")
    def _kl_that_teaches(self) -> RLRecipe:
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.kl.controller == "proportional" and self.kl.horizon < samples:
            raise ValueError(
                f"kl.horizon is {self.kl.horizon}, below the {samples} samples of one step: the controller would "
                "overshoot; raise it"
            )
        if self.kl.apply_to == "loss" and self.kl.estimator == "k1":
            raise ValueError(
                "kl.estimator k1 in the loss has a gradient whose mean is zero, whatever the KL: use k2 or k3 there"
            )
        return self


class PPORecipe(RLRecipe):
    """PPO: clipped, unclipped or with a KL penalty."""

    method: ClassVar[str] = "ppo"
    ppo: PPOSettings = Field(default_factory=PPOSettings)
    ptx: PtxSettings = Field(default_factory=PtxSettings)

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return True


class ReinforceRecipe(RLRecipe):
    """REINFORCE with any of four weightings."""

    method: ClassVar[str] = "reinforce"
    reinforce: ReinforceSettings = Field(default_factory=ReinforceSettings)

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.reinforce.needs_critic


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
    kl: KLSettings = Field(default_factory=lambda: KLSettings(apply_to="loss", estimator="k3"))

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

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return True

    @model_validator(mode="after")
    def _own_critic(self) -> TRPORecipe:
        if self.roles.critic != "separate":
            raise ValueError("roles.critic must be separate with TRPO: its step is over the policy's parameters alone")
        if self.kl.apply_to == "loss":
            raise ValueError("kl.apply_to must be reward or none with TRPO: its surrogate has no other term")
        return self


class RecordsRecipe(Recipe):
    """What every method that learns from records needs."""

    data: DataSettings
    run: RecordsRunSettings = Field(  # pyright: ignore[reportIncompatibleVariableOverride] (frozen, so covariant)
        default_factory=RecordsRunSettings
    )
    evaluation: RecordsEvaluationSettings = Field(default_factory=RecordsEvaluationSettings)

    @model_validator(mode="after")
    def _held_out_to_look_at(self) -> RecordsRecipe:
        if self.evaluation.every and not self.data.holds_out:
            raise ValueError(
                f"evaluation.every is {self.evaluation.every}, and no records are held out: name a file with "
                "data.held_out, or a part of data.train with data.held_out_fraction"
            )
        return self


class DPORecipe(RecordsRecipe):
    """Preferences without a reward model."""

    method: ClassVar[str] = "dpo"
    dpo: DPOSettings = Field(default_factory=DPOSettings)
    evaluation: PreferenceEvaluationSettings = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=PreferenceEvaluationSettings
    )


class SFTRecipe(RecordsRecipe):
    """Supervised fine-tuning."""

    method: ClassVar[str] = "sft"
    sft: SFTSettings = Field(default_factory=SFTSettings)


class RewardRecipe(RecordsRecipe):
    """A reward model."""

    method: ClassVar[str] = "reward"
    # Preferences are few and its rate is small: the figures in docs/results.md are float32's.
    model: ModelSettings = Field(default_factory=lambda: ModelSettings(dtype="float32"))
    reward: RewardModelSettings = Field(default_factory=RewardModelSettings)
    evaluation: PreferenceEvaluationSettings = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=PreferenceEvaluationSettings
    )


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
