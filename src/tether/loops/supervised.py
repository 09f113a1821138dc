"""Learning from records: demonstrations, rankings and pairs share one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tether.data.cursor import DataOrder
from tether.learner.learner import Learner
from tether.loops.phases import Phases
from tether.models.shared_trunk import SharedTrunk
from tether.protocols import Objective
from tether.types import Measures, Sequences

Example = TypeVar("Example")


@dataclass(frozen=True)
class SupervisedParts(Generic[Example]):
    """What a supervised run is made of."""

    learner: Learner
    objective: Objective[Any, Any]
    examples: DataOrder[Example]
    held_out: Sequence[Example]
    collate: Callable[[Sequence[Example]], Sequences]
    batch_size: int
    steps: int
    max_skipped: int
    report: Callable[[SupervisedParts[Any]], dict[str, Any]] = lambda parts: {}  # noqa: ARG005 (nothing to tell)
    shared: SharedTrunk | None = None  # layers that remember what they were run on


def train_supervised(
    parts: SupervisedParts[Any],
    *,
    start: int = 0,
    stop: Callable[[], bool] = lambda: False,
    doing: Callable[[str], None] = lambda words: None,  # noqa: ARG005 (nobody wants to know)
) -> Iterator[tuple[int, dict[str, float]]]:
    """One optimiser step a batch, from step `start` on; ends early, between two steps, once `stop()` is true."""
    for step in range(start, parts.steps):
        parts.learner.check_progress(parts.max_skipped)
        if stop():
            return
        doing(f"step {step}")
        parts.learner.set_progress((step + 0.5) / parts.steps)  # its middle: no step has rate 0
        phases = Phases(parts.learner.device)
        phases.begin("update")
        batch = parts.collate(parts.examples.take(step * parts.batch_size, parts.batch_size))
        measures = parts.learner.backward(batch, parts.objective)
        measures.merge(parts.learner.step())
        metrics = measures.values() | {"tokens/learned": float(batch.attention_mask.sum())} | phases.metrics()
        if step + 1 == parts.steps and parts.held_out:
            metrics |= {f"held_out/{name}": value for name, value in evaluate_held_out(parts).items()}
        yield step, metrics
    parts.learner.check_progress(parts.max_skipped)


def evaluate_held_out(parts: SupervisedParts[Any]) -> dict[str, float]:
    """The objective and its measures over the held-out records, without learning from them."""
    measures = Measures()
    for start in range(0, len(parts.held_out), parts.batch_size):
        batch = parts.collate(parts.held_out[start : start + parts.batch_size])
        measures.merge(parts.learner.measure(batch, parts.objective))
    return measures.values()
