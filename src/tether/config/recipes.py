"""Recipes: a recipe holds every setting of a run, with one class per method.

Method settings use the names of the papers. `DemoRecipe` holds the settings of `tether demo`, whose stages are recipes
of their own.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from tether.config.base import CodeReference, Count, Fraction, Positive, PositiveFloat, Settings
from tether.config.evaluation_settings import (
    EvaluationSettings,
    PreferenceEvaluationSettings,
    RecordsEvaluationSettings,
)
from tether.config.kl_settings import KLSettings
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
)
from tether.config.sections import (
    CheckpointSettings,
    DataSettings,
    DistributedSettings,
    ModelSettings,
    OptimizerSettings,
    PromptSettings,
    RecordsRunSettings,
    RewardSettings,
    RolesSettings,
    RolloutSettings,
    RunSettings,
    StoreSettings,
    TaskSettings,
)


def need_group(samples_per_prompt: int, method: str) -> None:
    """Reject a group of one, which has no baseline."""
    if samples_per_prompt < 2:
        raise ValueError(
            f"rollout.samples_per_prompt is {samples_per_prompt}, but {method} compares the samples of a prompt: "
            "set it to 2 or more"
        )


class Recipe(Settings):
    """Settings that every method has."""

    method: ClassVar[str]

    model: ModelSettings = Field(default_factory=ModelSettings)
    roles: RolesSettings = Field(default_factory=RolesSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    run: RunSettings = Field(default_factory=RunSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    store: StoreSettings = Field(default_factory=StoreSettings)
    distributed: DistributedSettings = Field(default_factory=DistributedSettings)

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return False

    @model_validator(mode="after")
    def _exact_is_for_sampling(self) -> Recipe:
        if self.model.numerics == "exact" and not isinstance(self, RLRecipe):
            raise ValueError(
                f"model.numerics is exact, which makes sampling and training agree, and {self.method} samples nothing: "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _critic_from_has_a_critic(self) -> Recipe:
        own_algorithm = getattr(self, "algorithm", None) is not None  # it says itself whether it has a critic
        if self.roles.critic_init is not None and not self.needs_critic and not own_algorithm:
            raise ValueError(
                f"roles.critic_init is set, but this recipe ({self.method}) trains no critic: leave it out"
            )
        return self


class RLRecipe(Recipe):
    """Settings of every method that learns from rollouts."""

    task: TaskSettings = Field(default_factory=TaskSettings)
    data: PromptSettings = Field(default_factory=PromptSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: RewardSettings = Field(default_factory=RewardSettings)
    kl: KLSettings = Field(default_factory=KLSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    algorithm: CodeReference | None = Field(
        default=None,
        description="Your own algorithm, in place of the method's: an Algorithm, or a function that returns one from "
        "the method's algorithm or from the recipe; see docs/extending.md.",
    )

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
                f"evaluation.every is {self.evaluation.every}, but there are no held-out prompts: set task.held_out to "
                "a file of them, or task.held_out_fraction to hold out some of task.prompts, or evaluation.every to 0"
            )
        return self

    @model_validator(mode="after")
    def _workers_that_fit(self) -> RLRecipe:
        rollout, chunk = self.rollout, self.distributed.rollout_chunk
        if rollout.engine == "vllm" and not rollout.servers:
            raise ValueError("rollout.engine is vllm, and rollout.servers names no server: see docs/rollout-workers.md")
        if rollout.engine == "vllm" and rollout.workers:
            raise ValueError("rollout.workers are Tether's own, and rollout.engine is vllm: name rollout.servers alone")
        if not rollout.samples_elsewhere:
            return self
        asked = "rollout.workers" if rollout.workers else "rollout.servers"
        if rollout.workers + len(rollout.servers) > 1 and not chunk:
            raise ValueError(
                f"{asked} asks for several workers and distributed.rollout_chunk is 0, so that one of them would "
                "sample the whole step: set it to the number of prompts that are sampled together, such as "
                f"{max(1, rollout.prompts_per_step // (4 * (rollout.workers + len(rollout.servers))))}"
            )
        if ":" in rollout.engine:
            raise ValueError(f"rollout.engine names code, {rollout.engine}, which no worker runs: leave out {asked}")
        if self.model.loader is not None:
            raise ValueError(f"model.loader names code, {self.model.loader}, which no worker runs: leave out {asked}")
        if self.roles.mode == "shared_backbone":
            raise ValueError(
                f"roles.mode is shared_backbone, whose sampling leaves states for training, and {asked} samples "
                "elsewhere: use roles.mode separate or lora"
            )
        return self

    @model_validator(mode="after")
    def _exact_numerics(self) -> RLRecipe:
        if self.model.numerics == "exact" and (reason := self._inexact()) is not None:
            raise ValueError(f"model.numerics is exact, and {reason}; or set model.numerics to fast")
        return self

    def _inexact(self) -> str | None:
        """The first setting with which a sampler cannot compute to the bit what training does."""
        model, rollout = self.model, self.rollout
        if model.dtype == "bfloat16":
            return "model.dtype is bfloat16, for which there is no exact pass: set it to float32"
        if model.device.partition(":")[0] not in ("auto", "cpu"):
            return f"model.device is {model.device}: the exact pass was built and measured on a CPU alone, so use cpu"
        if model.quantize != "none":
            return f"model.quantize is {model.quantize}, whose products are another library's: set it to none"
        if rollout.engine != "auto":
            return f"rollout.engine is {rollout.engine}, which has an order of sums of its own: set it to auto"
        if rollout.servers:
            return (
                "rollout.servers may run on other processors, whose library may add in another order: use "
                "rollout.workers on this machine, or sample in this process"
            )
        return None

    @model_validator(mode="after")
    def _kl_that_teaches(self) -> RLRecipe:
        samples = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.kl.controller == "proportional" and self.kl.horizon < samples:
            raise ValueError(
                f"kl.horizon is {self.kl.horizon}, below the {samples} samples of one step: the controller would "
                "overshoot; raise it"
            )
        if self.kl.apply_to == "loss" and self.kl.estimator == "k1":
            raise ValueError("kl.estimator k1 in the loss has a gradient of mean zero for any KL: use k2 or k3 there")
        return self

    @model_validator(mode="after")
    def _answers_that_fit(self) -> RLRecipe:
        rollout, buffer = self.rollout, self.reward.overlong_buffer
        if buffer is not None and buffer > rollout.max_new_tokens:
            raise ValueError(
                f"reward.overlong_buffer is {buffer}, above rollout.max_new_tokens {rollout.max_new_tokens}: no answer "
                "is without a penalty; lower it"
            )
        if rollout.dynamic_sampling_rounds and rollout.samples_per_prompt < 2:
            raise ValueError(
                "rollout.dynamic_sampling_rounds replaces groups whose answers all have one score, and "
                "rollout.samples_per_prompt is 1: set it to 2 or more, or the rounds to 0"
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
    """REINFORCE with a choice of weighting and baseline."""

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
    """A hard trust region. The critic is a separate model: the trust region covers only the policy's parameters."""

    method: ClassVar[str] = "trpo"
    # TRPO writes its step into the weights directly, without float32 copies, and bfloat16 would round it away.
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
    """Settings of every method that learns from records."""

    data: DataSettings
    run: RecordsRunSettings = Field(  # pyright: ignore[reportIncompatibleVariableOverride] (frozen, so covariant)
        default_factory=RecordsRunSettings
    )
    evaluation: RecordsEvaluationSettings = Field(default_factory=RecordsEvaluationSettings)

    @model_validator(mode="after")
    def _held_out_to_look_at(self) -> RecordsRecipe:
        if self.evaluation.every and not self.data.holds_out:
            raise ValueError(
                f"evaluation.every is {self.evaluation.every}, but no records are held out: name a file with "
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
    # Preference sets are small and so is the learning rate: docs/results.md reports float32 runs.
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

FILLED_IN = DataSettings(train="(the demo's own)")
TUNED_IN = ModelSettings(dtype="float32")  # on every device: the demo's rates and steps were tuned in float32


class RaterSettings(Settings):
    """The simulated rater, who says which of two answers is better."""

    prompts: Positive = Field(default=120, description="Number of prompts whose answers are compared.")
    answers: int = Field(default=4, ge=2, le=9, description="Number of answers to each prompt; they are ranked.")
    max_new_tokens: Positive = Field(default=40, description="Maximum length of a compared answer.")
    temperature: PositiveFloat = Field(default=1.0, description="Sampling temperature of the answers.")
    noise: PositiveFloat = Field(
        default=0.1,
        description="P(prefer A) = sigmoid((rule(A) - rule(B)) / noise): a larger noise makes more mistakes.",
    )
    tie: Fraction = Field(default=0.05, description="Rule scores that differ by less count as a tie; 0 disables ties.")
    held_out: Fraction = Field(default=0.25, description="Fraction of the prompts held out from the reward model.")


class JudgingSettings(Settings):
    """The final comparison, on prompts that no stage has seen."""

    prompts: Positive = Field(default=96, description="Number of held-out prompts.")
    temperature: PositiveFloat = Field(default=0.7, description="Sampling temperature of the compared answers.")
    max_new_tokens: Positive = Field(default=40, description="Maximum length of an answer.")
    samples_shown: Count = Field(default=8, description="Number of prompts whose answers the report shows.")


class DemoRecipe(Settings):
    """SFT, preferences, reward model, PPO, evaluation. The pipeline sets `model.path` of the later stages."""

    method: ClassVar[str] = "demo"

    name: str = Field(default="demo", description="Name of the demo's folder.")
    directory: str = Field(default="runs", description="Parent folder of all runs.")
    seed: int = Field(default=0, ge=0, description="Seed of everything random.")
    sft: SFTRecipe = Field(default_factory=lambda: SFTRecipe(data=FILLED_IN, model=TUNED_IN))
    rater: RaterSettings = Field(default_factory=RaterSettings)
    reward: RewardRecipe = Field(default_factory=lambda: RewardRecipe(data=FILLED_IN, model=TUNED_IN))
    ppo: PPORecipe = Field(default_factory=lambda: PPORecipe(model=TUNED_IN))
    judging: JudgingSettings = Field(default_factory=JudgingSettings)
