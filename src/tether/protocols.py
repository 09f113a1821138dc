"""The parts of a run that users replace: pass an object from Python, or name code in a recipe (`file.py:name`).

docs/extending.md has an example of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

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

    def reward(self) -> RewardFn | Callable[..., Any] | None:
        """The reward for an answer to any of them: any shape of docs/rewards.md. None leaves it to `reward.parts`."""
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
    """Samples answers. Inherit from it: everything but `generate` has a default.

    The loop sets `policy_version` to the iteration; write it on each rollout. `notices` are sentences that the user
    reads as the run starts.
    """

    policy_version: int = 0
    notices: tuple[str, ...] = ()

    @property
    def cache_bytes(self) -> int:
        """The peak of the device memory that torch's counters do not see, for the metric `memory/rollout`."""
        return 0

    def release(self) -> None:
        """Free the device memory of the cache. The loop calls it after each `generate`: the update needs the room."""
        return

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> list[Rollout]:
        """`samples_per_prompt` rollouts for each prompt, those of one prompt side by side with one `group_id`.

        The result depends on `seed`, on each prompt's id and on the sample's index within its prompt, never on which
        other prompts share the batch.
        """
        ...


PendingRollouts = Callable[[], list[Rollout]]
"""Waits for rollouts that were asked for, and returns them."""


@runtime_checkable
class AsyncRolloutEngine(RolloutEngine, Protocol):
    """An engine that samples elsewhere while this process trains: with `rollout.lag` the loop asks it ahead.

    `generate` and `release` may be called while rollouts are under way, and a request may never be waited for.
    """

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> PendingRollouts:
        """Start to sample what `generate` would return now, with the weights that the policy has now."""
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


class Distribution(Protocol):
    """N distributions over an action."""

    def logprobs(self, actions: Tensor) -> Tensor:
        """(N,) log pi(a)."""
        ...

    def entropy(self) -> Tensor:
        """(N,) in nats."""
        ...

    def kl(self, new: Distribution) -> Tensor:
        """(N,) KL(self || new), both of one kind."""
        ...

    def detach(self) -> Distribution:
        """The same without gradients."""
        ...


class PolicyModel(TrainedModel, Protocol):
    """A trained model that is a policy over tokens."""

    def __call__(self, batch: Sequences) -> TokenOutputs:
        """Log-probs, entropy and, where there is a critic, values."""
        ...

    def distributions(self, batch: Sequences) -> Tensor | Distribution:
        """At the N tokens of `batch.response_mask`, in row-major order; a tensor (N, V) holds log-probabilities."""
        ...


class TextMetric(Protocol):
    """A number for one answer, reported by an evaluation with its interval. Columns of the record come by name."""

    def __call__(self, prompt: str, completion: str, **columns: Any) -> float:
        """The value for this answer."""
        ...


class DoctorRule(Protocol):
    """Looks at what a run recorded (`tether.store.recorded.RecordedRun`) for something wrong."""

    def __call__(self, run: Any, /) -> Any:
        """A `tether.doctor.findings.Finding`, a list of them, or None."""
        ...


class ModelLoader(Protocol):
    """Loads a model in place of Tether. Parameters called dtype, device and seed are given where it has them."""

    def __call__(self, path: str, /, **known: Any) -> tuple[Any, Any]:
        """`(model, tokenizer)`, of transformers, for `model.path`."""
        ...


class Tracker(Protocol):
    """Where metrics go. It runs in a thread of its own."""

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Keep one step's metrics."""
        ...

    def close(self) -> None:
        """Flush and close, after the last step."""
        ...


@dataclass(frozen=True)
class StepOutcome:
    """What one training step produced.

    A step that sampled answers has rollouts and an experience: row b of the experience is `rollouts[b]`, whose score is
    `scores[b]`. A step that learned from records has metrics alone.
    """

    step: int  # 0 is the first
    metrics: dict[str, float]
    experience: Experience | None = None
    rollouts: Sequence[Rollout] = ()
    scores: Sequence[Score] = ()
    ratios: Tensor | None = None  # (B, T) new / old probability in the last pass of the update over each token
    clipped: Tensor | None = None  # (B, T) bool
    reward_errors: tuple[str, ...] = ()  # why some answers have no score


class StepHook(Protocol):
    """Runs around the steps of a run, in the training thread. Inherit from it: every method has a default.

    `run` is a `tether.train.hooks.RunContext`: `path`, `total`, `done`, `config`, `model`, `tokenizer`, and the methods
    `notify(text)`, `event(kind, text)` and `end_early(reason)`.
    """

    def begin(self, run: Any) -> None:  # noqa: ARG002
        """Prepare, before the first step of a new, resumed or forked run."""
        return

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take back what `state` returned for the checkpoint that the run continues from."""
        return

    def heartbeat(self, phase: str) -> None:  # noqa: ARG002
        """A phase of a step starts, such as `rollout, step 12`."""
        return

    def after_step(self, outcome: StepOutcome) -> None:  # noqa: ARG002
        """Use the outcome of a step; its metrics are recorded already."""
        return

    def state(self) -> Mapping[str, Any]:
        """JSON values for the checkpoint that is about to be written."""
        return {}

    def finish(self) -> None:
        """Finish, after the last step and before the model is saved. A stopped run does not get here."""
        return

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Release what `begin` took. Called once, also for a run that stops or fails; `error` is why it failed."""
        return
