"""The recipe of `tether control`: PPO and TRPO on gymnasium's environments.

The algorithms and the optimizer have the settings of the other methods, with the defaults of the PPO paper's control
experiments. There is no language model, so there are no sections for models, roles and data.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from tether.config.base import (
    MAX_GROUP,
    MAX_NOTE,
    MAX_TAGS,
    Count,
    Fraction,
    NonNegative,
    Option,
    Positive,
    PositiveFloat,
    Settings,
    Tag,
)
from tether.config.recipes import PPOSettings, TRPOSettings
from tether.config.sections import CheckpointSettings, OptimizerSettings

MODULE = "a part before a colon names a module whose code would run, which a recipe may not do: name a registered id"


class EnvironmentSettings(Settings):
    """The environment, and what is done to its observations and rewards."""

    id: str = Field(min_length=1, description="Id of a gymnasium environment, such as Hopper-v5.")
    count: Positive = Field(default=1, description="Number of copies that are stepped in turn.")
    kwargs: dict[str, Option] = Field(default_factory=dict, description="Passed to gymnasium.make.")
    max_episode_steps: Positive | None = Field(
        default=None, description="Time limit of an episode; default: the environment's own."
    )
    normalize_observations: bool = Field(
        default=True, description="Shift and scale each observation by its running mean and deviation."
    )
    clip_observations: PositiveFloat = Field(default=10.0, description="Limit of a normalized observation.")
    normalize_rewards: bool = Field(
        default=True, description="Divide rewards by the running deviation of the discounted return."
    )
    clip_rewards: PositiveFloat = Field(default=10.0, description="Limit of a normalized reward.")

    @field_validator("id")
    @classmethod
    def _registered(cls, id: str) -> str:
        if ":" in id:
            raise ValueError(f"{id}: {MODULE}")
        return id


class NetworkSettings(Settings):
    """Policy and critic: two perceptrons of one shape."""

    hidden: tuple[Positive, ...] = Field(default=(64, 64), description="Width of each hidden layer.")
    activation: Literal["tanh", "relu"] = Field(default="tanh", description="After each hidden layer.")
    log_std: float = Field(
        default=0.0,
        ge=-20,
        le=20,
        description="Initial logarithm of the deviation of continuous actions; it is learned.",
    )


class ControlRolloutSettings(Settings):
    """How much is sampled between two updates."""

    steps: Positive = Field(default=2048, description="Steps of each environment per iteration.")


class ControlPPOSettings(PPOSettings):
    """Proximal Policy Optimization (Schulman et al. 2017)."""

    epochs: Positive = Field(default=10, description="Passes over the steps of an iteration.")
    minibatch_size: Positive = Field(default=64, description="Environment steps per optimizer step.")
    gamma: Fraction = Field(default=0.99, description="Discount per environment step.")
    bootstrap_truncated: bool = Field(
        default=True,
        description="Where a time limit ends an episode, the critic's value stands for the rest. The end of a rollout "
        "is always bootstrapped.",
    )
    whiten_advantages: bool = Field(default=True, description="Scale to mean 0, deviation 1 over an iteration's steps.")


class ControlTRPOSettings(TRPOSettings):
    """Trust Region Policy Optimization (Schulman et al. 2015): a hard bound on KL(old || new)."""

    gamma: Fraction = Field(default=0.99, description="Discount per environment step.")
    bootstrap_truncated: bool = Field(
        default=True,
        description="Where a time limit ends an episode, the critic's value stands for the rest. The end of a rollout "
        "is always bootstrapped.",
    )
    whiten_advantages: bool = Field(default=True, description="Scale to mean 0, deviation 1 over an iteration's steps.")
    critic_epochs: Positive = Field(default=10, description="Critic passes over the steps of an iteration.")
    minibatch_size: Positive = Field(default=64, description="Environment steps per critic step.")


class ControlRunSettings(Settings):
    """General settings of the run."""

    name: str | None = Field(default=None, description="Name of the run's folder; default: the environment and time.")
    directory: str = Field(default="runs", description="Parent folder of all runs.")
    seed: int = Field(default=0, ge=0, description="Seed of everything random.")
    environment_steps: Positive = Field(
        default=1_000_000,
        description="Steps of all environments together; the last iteration that starts before them is completed.",
    )
    threads: Positive = Field(default=1, description="Threads of torch; small networks are fastest with one.")
    save: bool = Field(default=True, description="Save the policy at the end.")
    max_skipped: Positive = Field(default=10, description="Stop (exit 4) after this many updates skipped in a row.")
    hang_timeout: NonNegative = Field(
        default=0.0, description="Dump all stacks and stop (exit 7) after this long without progress; 0 disables it."
    )
    doctor_every: Count = Field(default=5, description="Run the doctor every this many iterations; 0 disables it.")
    note: str | None = Field(
        default=None, max_length=MAX_NOTE, description="A note about the run; Studio can change it later."
    )
    tags: tuple[Tag, ...] = Field(default=(), max_length=MAX_TAGS, description="Tags to find the run by.")
    group: str | None = Field(default=None, max_length=MAX_GROUP, description="Group under which the run is listed.")

    @field_validator("name", "directory", "group")
    @classmethod
    def _shown_as_it_is(cls, text: str | None) -> str | None:
        """Reject names with control characters: they appear in terminals, logs and pages."""
        if text is not None and not text.isprintable():
            raise ValueError(f"{text!r:.80} contains characters that cannot be printed, such as control codes")
        return text


class ControlStoreSettings(Settings):
    """The run store: metrics and events."""

    rollouts_every: ClassVar[int] = 0  # a step of an environment has no tokens to keep
    rollouts_keep: ClassVar[int] = 0

    url: str | None = Field(
        default=None, description="Database URL, such as postgresql://...; default: tether.db in run.directory."
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(), description="Trackers that also receive the metrics."
    )


class ControlRecipe(Settings):
    """PPO or TRPO on an environment."""

    method: ClassVar[str] = "control"

    algorithm: Literal["ppo", "trpo"] = Field(default="ppo", description="The section below that applies.")
    environment: EnvironmentSettings
    network: NetworkSettings = Field(default_factory=NetworkSettings)
    rollout: ControlRolloutSettings = Field(default_factory=ControlRolloutSettings)
    ppo: ControlPPOSettings = Field(default_factory=ControlPPOSettings)
    trpo: ControlTRPOSettings = Field(default_factory=ControlTRPOSettings)
    optimizer: OptimizerSettings = Field(
        default_factory=lambda: OptimizerSettings(
            policy_lr=3e-4, critic_lr=3e-4, schedule="linear", epsilon=1e-5, max_grad_norm=0.5
        )
    )
    run: ControlRunSettings = Field(default_factory=ControlRunSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    store: ControlStoreSettings = Field(default_factory=ControlStoreSettings)

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates."""
        return self.environment.count * self.rollout.steps

    @property
    def iterations(self) -> int:
        """Number of updates."""
        return math.ceil(self.run.environment_steps / self.steps_per_iteration)
