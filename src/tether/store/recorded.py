"""What a run has recorded, as values: whoever reads a run (reports, audits, exports) reads these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]

TOKEN_COLUMNS: dict[str, str] = {
    "token": "int32",
    "response": "bool",  # the policy sampled this token
    "behavior_logprob": "float32",
    "untruncated_logprob": "float32",
    "old_logprob": "float32",
    "ref_logprob": "float32",
    "value": "float32",
    "reward": "float32",
    "advantage": "float32",
    "return": "float32",
    "ratio": "float32",  # new / old, as the last pass of the update over this token saw it
    "clipped": "bool",  # whether the clip removed this token's gradient in that pass
    "entropy": "float32",  # of the policy that sampled, in nats
}
"""The columns that a rollout may have, and what they are stored as. `ref_logprob`, `value`, `return`, `ratio` and
`clipped` are absent where there is no reference, no critic or no clip; `entropy` in what older versions recorded."""


@dataclass(frozen=True)
class TopLogprobs:
    """What else might have been said at each of T tokens; those at one token stand together, the likeliest first."""

    counts: Column  # (T,) uint8, how many there are at each token; 0 off the answer
    tokens: Column  # (N,) int32, of all of them
    logprobs: Column  # (N,) float16: to be read by people
    texts: Mapping[int, str]  # of each token that occurs

    def at_each(self) -> list[list[tuple[str, float]]]:
        """(T,) lists of (text, log-prob)."""
        told = [
            (self.texts.get(token, ""), round(float(logprob), 3))
            for token, logprob in zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        ]
        ends = np.cumsum(self.counts, dtype=np.int64).tolist()
        return [told[end - count : end] for end, count in zip(ends, self.counts.tolist(), strict=True)]


@dataclass(frozen=True)
class StoredRollout:
    """One rollout of one step with its token columns, each of length T = prompt + answer tokens."""

    step: int
    row: int  # its place in the step's batch
    prompt_id: str
    group_id: int
    sample_id: int
    prompt_text: str
    completion: str
    finish: str
    score: float
    temperature: float
    columns: Mapping[str, Column]
    pieces: Sequence[str]  # (T,) the text of each token
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    final_value: float | None = None
    top_logprobs: TopLogprobs | None = None
    messages: Sequence[Mapping[str, Any]] = ()  # the prompt as it was asked; empty in what older versions recorded
    tools: Sequence[Mapping[str, Any]] = ()  # that the prompt offered

    @property
    def kl(self) -> Column | None:
        """(T,) old - ref log-prob, the k1 estimate of the KL to the reference; 0 off the answer."""
        if "ref_logprob" not in self.columns:
            return None
        difference = self.columns["old_logprob"] - self.columns["ref_logprob"]
        return np.where(self.columns["response"], difference, np.float32(0.0))

    def answer(self, name: str) -> Column:
        """One column over the answer's tokens alone."""
        return self.columns[name][self.columns["response"]]


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: started, resumed, checkpoint, skipped, finding, ..."""

    time: float  # seconds since 1970
    kind: str
    text: str
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.float64))
"""The steps and values of a metric that no step has."""


@dataclass(frozen=True)
class RecordedRun:
    """A whole run. `metrics` has one mapping a step, in order, each with its "step"; what was not finite is NaN."""

    name: str
    method: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float]]
    events: Sequence[Event] = ()
    rollout_steps: Sequence[int] = ()  # the steps whose rollouts were kept
    rollouts: Callable[[int], Sequence[StoredRollout]] = lambda step: ()  # noqa: ARG005 (none were kept)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one metric, where it was measured."""
        steps, values = self.series.get(name, NOTHING)
        return steps.tolist(), values.tolist()

    @cached_property
    def series(self) -> Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """(steps, values) of every metric, in the order in which they first occur; taken from the rows once."""
        found: dict[str, tuple[list[float], list[float]]] = {}
        for row in self.metrics:
            step = row["step"]
            for name, value in row.items():
                if name not in found:
                    found[name] = ([], [])
                steps, values = found[name]
                steps.append(step)
                values.append(value)
        return {
            name: (np.array(steps, np.int64), np.array(values, np.float64)) for name, (steps, values) in found.items()
        }
