"""The seams that users extend: pass an object, or name one as `package.module:name` in a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from tether.types import Experience, Loss, Prompt, Rollout, Score, Sequences, TokenOutputs

InBatch = TypeVar("InBatch", bound=Sequences, contravariant=True)
AnyOutputs = TypeVar("AnyOutputs", contravariant=True)


class RewardFn(Protocol):
    """Scores rollouts. It sees the whole batch, so that a reward may compare the samples of a group."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """One score for each rollout, in order."""
        ...


class Task(Protocol):
    """Prompts and the reward that checks their answers."""

    def prompts(self) -> Sequence[Prompt]:
        """The prompts to train on."""
        ...

    def held_out(self) -> Sequence[Prompt]:
        """Prompts that are never trained on, for evaluation."""
        ...

    def reward(self) -> RewardFn:
        """The reward for an answer to any of them."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: the whole vocabulary
    stop_token_ids: tuple[int, ...] = ()  # added to the tokenizer's end token


class RolloutEngine(Protocol):
    """Samples answers. `policy_version` is written on each of them; the loop sets it to the iteration."""

    policy_version: int

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> list[Rollout]:
        """`samples_per_prompt` rollouts for each prompt, those of one prompt side by side with one `group_id`.

        The result depends on `seed`, on each prompt's id and on the sample's index within its prompt, never on which
        other prompts share the batch.
        """
        ...


class Objective(Protocol[InBatch, AnyOutputs]):
    """What an update minimises: a sum over tokens, sequences or pairs, and the size to divide it by."""

    def size(self, batch: InBatch) -> float:
        """How many tokens, sequences or pairs the batch counts for; known before the forward pass."""
        ...

    def __call__(self, outputs: AnyOutputs, batch: InBatch) -> Loss:
        """The sum over a micro-batch, and what to report."""
        ...


class AdvantageEstimator(Protocol):
    """Turns per-token rewards into advantages, and into returns where there is a critic to teach."""

    def __call__(
        self,
        rewards: Tensor,
        mask: Tensor,
        *,
        values: Tensor | None,
        final_values: Tensor | None,
        group_ids: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """`(advantages, returns)`, each (B, T) and 0 off the mask."""
        ...


class TrainedModel(Protocol):
    """What the learner trains: a forward pass, and its parameters by group."""

    def __call__(self, batch: Any) -> Any:
        """The outputs that the objective reads, with gradients."""
        ...

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trainable parameters by group name ("policy", "critic", "reward"); each group has a rate of its own."""
        ...


class PolicyModel(TrainedModel, Protocol):
    """A trained model that is a policy over tokens."""

    def __call__(self, batch: Sequences) -> TokenOutputs:
        """Log-probs, entropy and, where there is a critic, values."""
        ...

    def distributions(self, batch: Sequences) -> Tensor:
        """(N, V) whole log-distributions at the N tokens of `batch.response_mask`, in row-major order."""
        ...


class Tracker(Protocol):
    """Where metrics go."""

    def record(self, step: int, metrics: dict[str, float], experience: Experience | None = None) -> None:
        """Keep one step's metrics, and its tokens where the tracker keeps those."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...
