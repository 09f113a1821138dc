"""Learning from records: demonstrations, rankings and pairs share one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tether.data.order import DataOrder
from tether.learner.learner import Learner
from tether.models.shared_backbone import SharedBackbone
from tether.protocols import Objective
from tether.train.timers import Timers
from tether.types import Metrics, Sequences

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
    records: int | None = None  # how many are learned from in all, each epoch's anew; None: as many as the steps take
    evaluate_every: int = 0  # steps; 0: after the last
    report: Callable[[SupervisedParts[Any]], dict[str, Any]] = lambda parts: {}  # noqa: ARG005 (nothing to tell)
    as_saved: Callable[[SupervisedParts[Any]], AbstractContextManager[None]] = lambda parts: nullcontext()  # noqa: ARG005
    shared: SharedBackbone | None = None  # layers that remember what they were run on


def train_supervised(
    parts: SupervisedParts[Any],
    *,
    start: int = 0,
    stop: Callable[[], bool] = lambda: False,
    heartbeat: Callable[[str], None] = lambda words: None,  # noqa: ARG005 (nobody wants to know)
) -> Iterator[tuple[int, dict[str, float]]]:
    """One optimiser step a batch, from step `start` on; ends early, between two steps, once `stop()` is true.

    Batches run over from one epoch into the next, so that all but the last are full.
    """
    for step in range(start, parts.steps):
        parts.learner.check_progress(parts.max_skipped)
        if stop():
            return
        heartbeat(f"step {step}")
        before = _held_out_metrics(parts) if step == 0 and parts.evaluate_every else {}
        parts.learner.set_progress((step + 0.5) / parts.steps)  # its middle: no step has rate 0
        phases = Timers(parts.learner.device)
        phases.begin("update")
        batch = parts.collate(parts.examples.take(step * parts.batch_size, _batch_at(parts, step)))
        sums = parts.learner.backward(batch, parts.objective)
        sums.merge(parts.learner.step())
        metrics = sums.values() | {"tokens/learned": float(batch.attention_mask.sum())} | phases.metrics()
        metrics |= {"epoch": _seen(parts, step + 1) / len(parts.examples.items)}
        metrics |= {f"start/{name}": value for name, value in before.items()}
        if _evaluates(parts, step):
            heartbeat(f"evaluation, step {step}")
            metrics |= _held_out_metrics(parts)
        yield step, metrics
    parts.learner.check_progress(parts.max_skipped)


def _seen(parts: SupervisedParts[Any], steps: int) -> int:
    """Records that so many steps learn from."""
    whole = steps * parts.batch_size
    return whole if parts.records is None else min(whole, parts.records)


def _batch_at(parts: SupervisedParts[Any], step: int) -> int:
    """Records in a step's batch: only the last may be short."""
    return _seen(parts, step + 1) - _seen(parts, step)


def _evaluates(parts: SupervisedParts[Any], step: int) -> bool:
    every, done = parts.evaluate_every, step + 1
    return bool(parts.held_out) and (done == parts.steps or (every > 0 and done % every == 0))


def _held_out_metrics(parts: SupervisedParts[Any]) -> dict[str, float]:
    return {f"held_out/{name}": value for name, value in evaluate_held_out(parts).items()}


def evaluate_held_out(parts: SupervisedParts[Any]) -> dict[str, float]:
    """The objective and its metrics over the held-out records, without learning from them.

    Each is a mean over what the objective counts (tokens, or pairs), so that neither batches nor micro-batches matter.
    """
    sums = Metrics()
    for start in range(0, len(parts.held_out), parts.batch_size):
        batch = parts.collate(parts.held_out[start : start + parts.batch_size])
        sums.merge(parts.learner.measure(batch, parts.objective))
    return sums.values()
