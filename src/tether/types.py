"""The data at each stage of a run, as frozen dataclasses.

Each stage has its own type, so reading an advantage before it exists is a type error, not a None. The stages:

    Prompt -> Rollout -> (with Score) TokenBatch -> EvaluatedBatch -> Experience

One convention holds everywhere: **`x[b, t]` is about token `t` of row `b`**. `logprobs[b, t]` is
log pi(token t | tokens before t); `values[b, t]` is V(tokens before t), the value of the state in which token t was
chosen. Column 0 has nothing before it and is never part of `response_mask`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NotRequired, Self, TypedDict, TypeVar

import torch
from torch import Tensor

from tether.device_transfer import sent

Finish = Literal["stop", "length", "error"]


class Message(TypedDict):
    """One turn of a conversation. The optional keys are for chat templates that read them."""

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


@dataclass(frozen=True)
class Prompt:
    """A prompt for the policy. `answer` is the reference answer, for rewards that need one.

    `as_messages` means that the record held a list of messages, not a text: reward functions in TRL's form are called
    with whichever the record held. `meta` holds the record's other columns under their own names. `tools` and
    `template_kwargs` are passed to the chat template with the messages.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    as_messages: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_text(cls, id: str, text: str, answer: str | None = None) -> Prompt:
        """A prompt of one user turn."""
        return cls(id=id, messages=(Message(role="user", content=text),), answer=answer)


@dataclass(frozen=True)
class Rollout:
    """One sampled answer, on the CPU, with the engine's log-probabilities.

    All columns have length T = prompt + answer tokens. `response_mask` is True where the policy sampled the token; it
    is built from lengths, never from token ids. `behavior_logprobs` is the log-probability under the distribution that
    was sampled from (temperature and truncation applied). `untruncated_logprobs` is at the same temperature over the
    whole vocabulary; the two are equal if neither top-p nor top-k is set. Both are 0 off the mask.
    """

    prompt: Prompt
    group_id: int
    sample_id: int
    token_ids: Tensor  # (T,) int64
    response_mask: Tensor  # (T,) bool
    behavior_logprobs: Tensor  # (T,) float32
    untruncated_logprobs: Tensor  # (T,) float32
    completion: str
    finish: Finish
    policy_version: int = 0  # the number of steps after which the weights that sampled it were taken
    step: int | None = None  # the step that trains on it, which the loop writes; None: it is not trained on

    @property
    def trained_in(self) -> int:
        """The step that trains on it; for an answer that is only evaluated, the version of its policy."""
        return self.policy_version if self.step is None else self.step

    @property
    def response_length(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.response_mask.sum())


@dataclass(frozen=True)
class Score:
    """The reward of one rollout. An invalid score is masked out of the batch and counted, never read as zero.

    `error` describes in one line what went wrong, where the reason in `parts` is not enough.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    valid: bool = True
    error: str = ""

    @property
    def usable(self) -> bool:
        """Whether training can use the value: valid, and finite in fp32."""
        return self.valid and abs(self.value) <= torch.finfo(torch.float32).max


BatchT = TypeVar("BatchT", bound="Sequences")


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Padded rows of tokens. Padding may be on either side; `attention_mask` marks the real tokens.

    `temperature` is the sampling temperature; every log-probability of the batch is computed at it. In a control task a
    time step is a token: `tokens` holds the action, and `observations` the state that it was chosen in.
    """

    tokens: Tensor  # (B, T) int64, or (B, T, A) float32 actions
    attention_mask: Tensor  # (B, T) bool, True on real tokens
    response_mask: Tensor  # (B, T) bool, True where the token is trained on
    temperature: float = 1.0
    observations: Tensor | None = None  # (B, T, O) float32, in place of the tokens before t

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def rows_are_groups(self) -> bool:
        """Whether each row is its own group."""
        return type(self).row_groups is Sequences.row_groups

    def row_groups(self) -> list[list[int]]:
        """Rows that must stay together in one micro-batch; here each row is its own group."""
        return [[row] for row in range(len(self))]

    def lengths(self) -> Tensor:
        """(B,) number of real tokens in each row."""
        return self.attention_mask.sum(dim=1)

    def select(self, rows: Tensor) -> Self:
        """The given rows, in the given order."""
        return self.map_tensors(lambda column: column[rows.to(column.device)])

    def to(self, device: torch.device | str) -> Self:
        """The same batch on another device."""
        return self.map_tensors(lambda column: sent(column, device))

    def span(self) -> tuple[int, int]:
        """The columns [first, last) outside which every row is padding."""
        if self.tokens.shape[1] == 1:
            return 0, 1
        used = self.attention_mask.any(dim=0).nonzero()
        return (int(used[0]), int(used[-1]) + 1) if used.numel() else (0, self.tokens.shape[1])

    def trimmed(self) -> Self:
        """The batch without leading and trailing columns that are padding in every row."""
        first, last = self.span()
        width = self.tokens.shape[1]
        if (first, last) == (0, width):
            return self
        return self.map_tensors(
            lambda column: column[:, first:last] if column.dim() > 1 and column.shape[1] == width else column
        )

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `change` applied to every tensor column."""
        columns = {name: value for name, value in columns_of(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **{name: change(value) for name, value in columns.items()})


@dataclass(frozen=True, kw_only=True)
class TokenBatch(Sequences):
    """Scored rollouts, padded together."""

    behavior_logprobs: Tensor  # (B, T) of the distribution sampled from
    untruncated_logprobs: Tensor  # (B, T) over the whole vocabulary, at the same temperature
    scores: Tensor  # (B,)
    group_ids: Tensor  # (B,) int64, equal for samples of one prompt
    truncated: Tensor  # (B,) bool, the answer was cut off by the length limit


@dataclass(frozen=True, kw_only=True)
class EvaluatedBatch(TokenBatch):
    """Scored rollouts with the log-probs, values and entropy of the roles, computed before the first update."""

    old_logprobs: Tensor  # (B, T) the trainer's log-probs of the policy that sampled
    ref_logprobs: Tensor | None  # (B, T) the policy before any RL
    values: Tensor | None  # (B, T) V(tokens before t)
    final_values: Tensor | None  # (B,) V(all tokens), for bootstrapping where an answer was cut off
    entropy: Tensor | None = None  # (B, T) of the policy that sampled, in nats
    top_tokens: Tensor | None = None  # (B, T, K) int32, its K most likely tokens; for display only
    top_logprobs: Tensor | None = None  # (B, T, K)


@dataclass(frozen=True, kw_only=True)
class Experience(EvaluatedBatch):
    """Evaluated rollouts with the rewards, advantages and returns of each token."""

    rewards: Tensor  # (B, T)
    advantages: Tensor  # (B, T)
    returns: Tensor | None  # (B, T) the critic's target


@dataclass(frozen=True, kw_only=True)
class PairBatch(Sequences):
    """Preferred and rejected answers; the two rows of a pair share `pair_ids` and stay in one micro-batch."""

    pair_ids: Tensor  # (B,) int64
    chosen: Tensor  # (B,) bool
    ref_logprobs: Tensor  # (B, T)

    def row_groups(self) -> list[list[int]]:
        """The rows of each pair."""
        return rows_by_id(self.pair_ids)


@dataclass(frozen=True, kw_only=True)
class RankedBatch(Sequences):
    """Ranked answers (rank 0 is best; equal ranks are ties); all answers to a prompt stay in one step."""

    group_ids: Tensor  # (B,) int64
    ranks: Tensor  # (B,) int64

    def row_groups(self) -> list[list[int]]:
        """The rows of each prompt."""
        return rows_by_id(self.group_ids)


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of a forward pass for an objective over tokens."""

    logprobs: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    values: Tensor | None = None  # (B, T)


@dataclass(frozen=True)
class ScoreOutputs:
    """Outputs of a reward model's forward pass: one score per row, read at the last real token."""

    scores: Tensor  # (B,)


@dataclass(frozen=True)
class Loss:
    """The result of an objective: a sum (not a mean), to be divided by the size of the whole step, and metrics."""

    total: Tensor  # scalar
    metrics: Metrics


class Metrics:
    """Metrics as (sum, weight) pairs, so that adding up micro-batches, ranks and epochs gives the exact mean.

    A count is a sum without a weight.
    """

    def __init__(self) -> None:
        self.weighted: dict[str, tuple[Tensor, Tensor]] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, total: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add `total`, a sum over `weight` items, to the mean called `name`."""
        new_total, new_weight = _scalar(total), _scalar(weight)
        if name in self.weighted:
            old_total, old_weight = self.weighted[name]
            new_total = old_total + new_total.to(old_total.device)
            new_weight = old_weight + new_weight.to(old_weight.device)
        self.weighted[name] = (new_total, new_weight)

    def count(self, name: str, number: float = 1.0) -> None:
        """Add `number` to the count called `name`."""
        self.counts[name] = self.counts.get(name, 0.0) + number

    def merge(self, other: Metrics) -> None:
        """Add the sums and counts of `other` to these."""
        for name, (total, weight) in other.weighted.items():
            if name in self.weighted:
                old_total, old_weight = self.weighted[name]
                total, weight = old_total + total.to(old_total.device), old_weight + weight.to(old_weight.device)
            self.weighted[name] = (total, weight)
        for name, number in other.counts.items():
            self.count(name, number)

    def mean(self, name: str) -> float:
        """The mean of one metric."""
        total, weight = self.weighted[name]
        return float(total / weight)

    def values(self) -> dict[str, float]:
        """Every mean and count by name; a mean whose weight is 0 is left out."""
        means = {name: self.mean(name) for name, (_, weight) in self.weighted.items() if float(weight) != 0.0}
        return means | self.counts


def _scalar(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64, copy=True)
    return torch.tensor(value, dtype=torch.float64)


def columns_of(batch: Sequences) -> dict[str, Any]:
    """The batch's fields by name, without copying."""
    return {name: getattr(batch, name) for name in _column_names(type(batch))}


@cache
def _column_names(stage: type[Sequences]) -> tuple[str, ...]:
    return tuple(column.name for column in dataclasses.fields(stage))


def extend(batch: Sequences, stage: type[BatchT], **columns: Any) -> BatchT:
    """`batch` as the next stage, with the new columns added."""
    return stage(**columns_of(batch), **columns)


def rows_by_id(ids: Tensor) -> list[list[int]]:
    """Rows grouped by equal id, in the order in which the ids first appear."""
    groups: dict[int, list[int]] = {}
    for row in range(len(ids)):
        groups.setdefault(int(ids[row]), []).append(row)
    return list(groups.values())
