"""The settings of each method, named as the papers name them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tether.config.base import Count, Fraction, NonNegative, Positive, PositiveFloat, Settings
from tether.config.reading import Paths
from tether.config.sections import AggregationSettings, PenaltySettings


class UpdateSettings(Settings):
    """How often a batch of rollouts is reused."""

    epochs: Positive = Field(default=4, description="Passes over each batch of rollouts.")
    minibatch_size: Positive = Field(default=64, description="Sequences in one optimiser step.")
    target_kl: PositiveFloat | None = Field(
        default=None, description="End the update before a step once KL(old || new) per token is above this."
    )


class PPOSettings(UpdateSettings):
    """Proximal Policy Optimization (Schulman et al. 2017)."""

    objective: Literal["clip", "unclipped", "kl_penalty"] = Field(default="clip", description="The surrogate.")
    clip_range: PositiveFloat = Field(default=0.2, description="The ratio may fall to 1 - this before the clip binds.")
    clip_range_high: PositiveFloat | None = Field(
        default=None, description="The ratio may rise to 1 + this; by default as clip_range."
    )
    dual_clip: float | None = Field(default=None, gt=1, description="Bound the loss of bad tokens at this times |A|.")
    penalty: PenaltySettings = Field(default_factory=PenaltySettings, description="For objective: kl_penalty.")
    gamma: Fraction = Field(default=1.0, description="Discount per sampled token.")
    lam: Fraction = Field(default=0.95, description="GAE's lambda: 0 is the TD residual, 1 is Monte Carlo.")
    bootstrap_truncated: bool = Field(default=False, description="Add the value of what would follow a cut-off answer.")
    whiten_advantages: bool = Field(default=True, description="Mean 0, deviation 1 over the sampled tokens.")
    value_coef: NonNegative = Field(default=0.5, description="Weight of the value loss.")
    value_clip: PositiveFloat | None = Field(default=0.2, description="Clip range of the value loss; null for none.")
    critic_warmup: Count = Field(default=0, description="Iterations at the start in which only the critic learns.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    aggregation: AggregationSettings = Field(
        default_factory=AggregationSettings, description="What losses average over."
    )


class PtxSettings(Settings):
    """Pretraining or SFT gradients mixed into every step (PPO-ptx, Ouyang et al. 2022)."""

    data: Paths | None = Field(default=None, description="Records with text, messages, or prompt and completion.")
    coef: NonNegative = Field(default=1.0, description="Weight of their log-likelihood loss.")
    batch_size: Positive = Field(default=16, description="Records mixed into one optimiser step.")
    max_length: Positive = Field(default=512, description="Longest row in tokens.")


class ReinforceSettings(Settings):
    """REINFORCE / vanilla policy gradient (Williams 1992): one pass over each batch of rollouts."""

    weighting: Literal["total", "to_go", "baselined", "advantage"] = Field(
        default="to_go", description="What multiplies grad log pi; the last two train a critic."
    )
    minibatch_size: Positive = Field(default=64, description="Sequences in one optimiser step.")
    gamma: Fraction = Field(default=1.0, description="Discount per sampled token.")
    lam: Fraction = Field(default=0.95, description="GAE's lambda, for weighting: advantage.")
    whiten_advantages: bool = Field(default=False, description="Mean 0, deviation 1 over the sampled tokens.")
    value_coef: NonNegative = Field(default=0.5, description="Weight of the value loss, where there is a critic.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    aggregation: AggregationSettings = Field(
        default_factory=AggregationSettings, description="What losses average over."
    )

    @property
    def needs_critic(self) -> bool:
        """Whether the weighting reads values."""
        return self.weighting in ("baselined", "advantage")


class RLOOSettings(UpdateSettings):
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024)."""

    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts.")
    objective: Literal["reinforce", "clip"] = Field(default="reinforce", description="-A log pi, or the clipped ratio.")
    clip_range: PositiveFloat = Field(default=0.2, description="For objective: clip.")
    whiten_advantages: bool = Field(default=False, description="Mean 0, deviation 1 over the sampled tokens.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    aggregation: AggregationSettings = Field(
        default_factory=AggregationSettings, description="What losses average over."
    )


class GRPOSettings(UpdateSettings):
    """Group Relative Policy Optimization (Shao et al. 2024) and its variants."""

    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts.")
    scale_by_std: bool = Field(default=True, description="Divide by the deviation of the group.")
    std_epsilon: PositiveFloat = Field(default=1e-4, description="Added to the deviation.")
    clip_range: PositiveFloat = Field(default=0.2, description="The ratio may fall to 1 - this before the clip binds.")
    clip_range_high: PositiveFloat | None = Field(
        default=None, description="The ratio may rise to 1 + this; by default as clip_range."
    )
    dual_clip: float | None = Field(default=None, gt=1, description="Bound the loss of bad tokens at this times |A|.")
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    aggregation: AggregationSettings = Field(
        default_factory=lambda: AggregationSettings(over="sequence"), description="What losses average over."
    )


class TRPOSettings(Settings):
    """Trust Region Policy Optimization (Schulman et al. 2015): a hard bound on KL(old || new)."""

    max_kl: PositiveFloat = Field(default=0.01, description="The bound on the mean exact KL(old || new).")
    damping: NonNegative = Field(default=0.1, description="Added to the Fisher matrix's diagonal.")
    cg_iterations: Positive = Field(default=10, description="Conjugate-gradient iterations.")
    backtrack: float = Field(default=0.8, gt=0, lt=1, description="Each line-search trial is this much shorter.")
    max_backtracks: Count = Field(default=15, description="Trials before the step is given up.")
    gamma: Fraction = Field(default=1.0, description="Discount per sampled token.")
    lam: Fraction = Field(default=0.95, description="GAE's lambda.")
    bootstrap_truncated: bool = Field(default=False, description="Add the value of what would follow a cut-off answer.")
    whiten_advantages: bool = Field(default=True, description="Mean 0, deviation 1 over the sampled tokens.")
    critic_epochs: Positive = Field(default=4, description="Passes of the critic over each batch.")
    minibatch_size: Positive = Field(default=64, description="Sequences in one step of the critic.")


class DPOSettings(Settings):
    """Direct Preference Optimization (Rafailov et al. 2023)."""

    beta: PositiveFloat = Field(default=0.1, description="How strongly the policy is tied to the reference.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, description="The assumed chance that a label is flipped.")
    batch_size: Positive = Field(default=32, description="Records in one optimiser step, with all their pairs.")


class SFTSettings(Settings):
    """Supervised fine-tuning: the answer's tokens, the end token included."""

    batch_size: Positive = Field(default=32, description="Records in one optimiser step.")


class RewardModelSettings(Settings):
    """A reward model from pairs or rankings; all pairs of one prompt are one example."""

    batch_size: Positive = Field(default=32, description="Prompts in one optimiser step.")
    center_on: Paths | None = Field(
        default=None, description="Demonstrations whose mean score becomes 0 once the model is trained."
    )


def need_group(samples_per_prompt: int, method: str) -> None:
    """Refuse a group of one: it has no baseline."""
    if samples_per_prompt < 2:
        raise ValueError(
            f"rollout.samples_per_prompt is {samples_per_prompt}, but {method} compares the samples of a prompt: "
            "set it to 2 or more"
        )
