"""The settings of each method, with the names of the papers; a recipe has them under the method's name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tether.config.base import Count, Fraction, NonNegative, Paths, Positive, PositiveFloat, Settings
from tether.config.sections import AggregationSettings, PenaltySettings


class UpdateSettings(Settings):
    """How often a batch of rollouts is reused."""

    epochs: Positive = Field(default=4, description="Passes over each batch of rollouts.")
    minibatch_size: Positive = Field(default=64, description="Sequences per optimizer step.")
    target_kl: PositiveFloat | None = Field(
        default=None, description="Stop the update before a step whose KL(old || new) per token exceeds this."
    )


class PPOSettings(UpdateSettings):
    """Proximal Policy Optimization (Schulman et al. 2017)."""

    objective: Literal["clip", "unclipped", "kl_penalty"] = Field(
        default="clip", description="The surrogate objective."
    )
    clip_range: PositiveFloat = Field(default=0.2, description="Lower clip bound of the ratio: 1 - clip_range.")
    clip_range_high: PositiveFloat | None = Field(
        default=None, description="Upper clip bound of the ratio: 1 + this; defaults to clip_range."
    )
    dual_clip: float | None = Field(default=None, gt=1, description="Where A < 0, limit the loss to this times |A|.")
    penalty: PenaltySettings = Field(default_factory=PenaltySettings, description="For objective: kl_penalty.")
    gamma: Fraction = Field(default=1.0, description="Discount per sampled token.")
    lam: Fraction = Field(default=0.95, description="GAE lambda: 0 is the TD residual, 1 is Monte Carlo.")
    critic_lam: Fraction | None = Field(
        default=None, description="GAE lambda of the critic's targets (decoupled GAE); defaults to lam."
    )
    lam_alpha: PositiveFloat | None = Field(
        default=None,
        description="Length-adaptive lambda of the advantages (VAPO), 1 - 1 / (this x answer tokens), in place of lam.",
    )
    n_steps: Positive | None = Field(
        default=None, description="The n-step advantage and return of this n, in place of GAE; 1 is the TD residual."
    )
    bootstrap_truncated: bool = Field(default=False, description="Bootstrap truncated answers with the critic's value.")
    whiten_advantages: bool = Field(default=True, description="Scale to mean 0, deviation 1 over the sampled tokens.")
    value_coef: NonNegative = Field(default=0.5, description="Weight of the value loss.")
    value_clip: PositiveFloat | None = Field(default=0.2, description="Clip range of the value loss; null disables it.")
    critic_warmup: Count = Field(default=0, description="Iterations at the start that train only the critic.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    aggregation: AggregationSettings = Field(
        default_factory=AggregationSettings, description="What the loss is averaged over."
    )

    @model_validator(mode="after")
    def _one_estimator(self) -> PPOSettings:
        for name in ("critic_lam", "lam_alpha"):
            if self.n_steps is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} is a setting of GAE, and n_steps takes its place: remove one of the two")
        return self


class PtxSettings(Settings):
    """Pretraining or SFT gradients added to every step (PPO-ptx, Ouyang et al. 2022)."""

    data: Paths | None = Field(default=None, description="Records with text, messages, or prompt and completion.")
    coef: NonNegative = Field(default=1.0, description="Weight of their log-likelihood loss.")
    batch_size: Positive = Field(default=16, description="Records added to one optimizer step.")
    max_length: Positive = Field(default=512, description="Maximum row length in tokens.")


class ReinforceSettings(Settings):
    """REINFORCE / vanilla policy gradient (Williams 1992): one pass over each batch of rollouts."""

    weighting: Literal["total", "to_go", "baselined", "advantage", "n_step"] = Field(
        default="to_go", description="The weight of grad log pi; the last three train a critic."
    )
    n_steps: Positive | None = Field(default=None, description="The n of weighting: n_step; 1 is the TD residual.")
    baseline: Literal["none", "batch_mean", "moving_average"] = Field(
        default="none",
        description="Subtracted from weighting total or to_go: the mean return of the batch, or of earlier iterations.",
    )
    baseline_decay: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="Weight of an iteration relative to the next, for baseline: moving_average.",
    )
    minibatch_size: Positive = Field(default=64, description="Sequences per optimizer step.")
    gamma: Fraction = Field(default=1.0, description="Discount per sampled token.")
    lam: Fraction = Field(default=0.95, description="GAE lambda, for weighting: advantage.")
    whiten_advantages: bool = Field(default=False, description="Scale to mean 0, deviation 1 over the sampled tokens.")
    value_coef: NonNegative = Field(default=0.5, description="Weight of the value loss, if there is a critic.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    aggregation: AggregationSettings = Field(
        default_factory=AggregationSettings, description="What the loss is averaged over."
    )

    @property
    def needs_critic(self) -> bool:
        """Whether the weighting uses values."""
        return self.weighting in ("baselined", "advantage", "n_step")

    @model_validator(mode="after")
    def _parts_that_fit(self) -> ReinforceSettings:
        if (self.weighting == "n_step") != (self.n_steps is not None):
            raise ValueError("n_steps must be set with weighting: n_step, and only there")
        if self.baseline != "none" and self.needs_critic:
            raise ValueError(
                f"baseline is {self.baseline}, and weighting {self.weighting} has the critic's value as its baseline: "
                "set weighting to total or to_go, or baseline to none"
            )
        return self


class RLOOSettings(UpdateSettings):
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024)."""

    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts.")
    objective: Literal["reinforce", "clip"] = Field(default="reinforce", description="-A log pi, or the clipped ratio.")
    clip_range: PositiveFloat = Field(default=0.2, description="For objective: clip.")
    whiten_advantages: bool = Field(default=False, description="Scale to mean 0, deviation 1 over the sampled tokens.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    aggregation: AggregationSettings = Field(
        default_factory=AggregationSettings, description="What the loss is averaged over."
    )


class GRPOSettings(UpdateSettings):
    """Group Relative Policy Optimization (Shao et al. 2024) and its variants."""

    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts.")
    objective: Literal["clip", "gspo", "cispo"] = Field(
        default="clip",
        description="clip: the ratio of each token; gspo: the ratio of the whole answer; cispo: the clipped ratio as a "
        "weight of -A log pi.",
    )
    scale_by_std: bool = Field(default=True, description="Divide by the standard deviation of the group.")
    std_epsilon: PositiveFloat = Field(default=1e-4, description="Added to the standard deviation.")
    clip_range: PositiveFloat = Field(default=0.2, description="Lower clip bound of the ratio: 1 - clip_range.")
    clip_range_high: PositiveFloat | None = Field(
        default=None, description="Upper clip bound of the ratio: 1 + this; defaults to clip_range."
    )
    dual_clip: float | None = Field(default=None, gt=1, description="Where A < 0, limit the loss to this times |A|.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    aggregation: AggregationSettings = Field(
        default_factory=lambda: AggregationSettings(over="sequence"), description="What the loss is averaged over."
    )

    @model_validator(mode="after")
    def _objective_that_fits(self) -> GRPOSettings:
        if self.objective == "gspo" and self.aggregation.over != "sequence":
            raise ValueError(
                f"objective gspo has one loss for each answer, and aggregation.over {self.aggregation.over} would "
                "weight it by the answer's length: set aggregation.over to sequence"
            )
        if self.objective != "clip" and self.dual_clip is not None:
            raise ValueError(f"dual_clip is a setting of objective: clip, and objective is {self.objective}: remove it")
        return self


class TRPOSettings(Settings):
    """Trust Region Policy Optimization (Schulman et al. 2015): a hard bound on KL(old || new)."""

    max_kl: PositiveFloat = Field(default=0.01, description="The bound on the mean exact KL(old || new).")
    damping: NonNegative = Field(default=0.1, description="Added to the diagonal of the Fisher matrix.")
    cg_iterations: Positive = Field(default=10, description="Conjugate-gradient iterations.")
    backtrack: float = Field(default=0.8, gt=0, lt=1, description="Factor on the step length per line-search trial.")
    max_backtracks: Count = Field(default=15, description="Maximum number of line-search trials.")
    gamma: Fraction = Field(default=1.0, description="Discount per sampled token.")
    lam: Fraction = Field(default=0.95, description="GAE lambda.")
    bootstrap_truncated: bool = Field(default=False, description="Bootstrap truncated answers with the critic's value.")
    whiten_advantages: bool = Field(default=True, description="Scale to mean 0, deviation 1 over the sampled tokens.")
    critic_epochs: Positive = Field(default=4, description="Critic passes over each batch.")
    minibatch_size: Positive = Field(default=64, description="Sequences per critic step.")


class DPOSettings(Settings):
    """Direct Preference Optimization (Rafailov et al. 2023)."""

    beta: PositiveFloat = Field(default=0.1, description="Strength of the tie to the reference.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description="Assumed probability of a flipped label.")
    batch_size: Positive = Field(default=32, description="Records per optimizer step, with all their pairs.")


class SFTSettings(Settings):
    """Supervised fine-tuning: the answer's tokens, the end token included."""

    batch_size: Positive = Field(default=32, description="Records per optimizer step.")


class RewardModelSettings(Settings):
    """A reward model from pairs or rankings; all pairs of one prompt are one example."""

    batch_size: Positive = Field(default=32, description="Prompts per optimizer step.")
    center_on: Paths | None = Field(
        default=None, description="Demonstrations whose mean score is shifted to 0 after training."
    )
