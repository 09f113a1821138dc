"""Learning from records: one loop for demonstrations, rankings and pairs; centring and the report of a reward model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from tether.data.examples import DataOrder, Ranking, Row, collate_rows
from tether.evaluation.metrics import wilson
from tether.learner.learner import Learner
from tether.models.roles import ReferencePolicy
from tether.models.scalar_models import ScalarModel
from tether.models.shared_backbone import SharedBackbone
from tether.protocols import Objective
from tether.train.rl import Timers
from tether.types import Metrics, Sequences

Example = TypeVar("Example")


@dataclass(frozen=True)
class SupervisedParts(Generic[Example]):
    """The parts of a run that learns from records."""

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
    report: Callable[[SupervisedParts[Any]], dict[str, Any]] = lambda parts: {}  # noqa: ARG005
    as_saved: Callable[[SupervisedParts[Any]], AbstractContextManager[None]] = lambda parts: nullcontext()  # noqa: ARG005
    shared: SharedBackbone | None = None  # layers that remember what they were run on
    reference: ReferencePolicy | None = None


def train_supervised(
    parts: SupervisedParts[Any],
    *,
    start: int = 0,
    stop: Callable[[], bool] = lambda: False,
    heartbeat: Callable[[str], None] = lambda words: None,  # noqa: ARG005
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
    """Number of records in the first `steps` steps."""
    whole = steps * parts.batch_size
    return whole if parts.records is None else min(whole, parts.records)


def _batch_at(parts: SupervisedParts[Any], step: int) -> int:
    """Number of records in the batch of a step; only the last may be short."""
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


CALIBRATION_BINS = 5
MARGIN_BINS = 12


def finish_reward_model(parts: SupervisedParts[Ranking], center_on: Sequence[Row]) -> dict[str, Any]:
    """Centre the scores, and report on the held-out rankings."""
    model = parts.learner.model
    assert isinstance(model, ScalarModel)
    report: dict[str, Any] = {}
    if center_on:
        report["centred_by"] = centre(model, parts, center_on)
    if parts.held_out:
        report |= margins_report(held_out_margins(model, parts))
    return report


@contextmanager
def centred(parts: SupervisedParts[Ranking], center_on: Sequence[Row]) -> Iterator[None]:
    """Centre the model while it is saved; afterwards its bias is restored to the bit."""
    model = parts.learner.model
    assert isinstance(model, ScalarModel)
    before = model.head.bias.detach().clone()
    if center_on:
        centre(model, parts, center_on)
    try:
        yield
    finally:
        with torch.no_grad():
            model.head.bias.copy_(before)


@torch.no_grad()
def centre(model: ScalarModel, parts: SupervisedParts[Ranking], rows: Sequence[Row]) -> float:
    """Shift the head's bias so that the mean score of these rows is 0 (Stiennon et al. 2020); returns the shift."""
    batch = collate_rows(rows, 0)
    total = sum(float(model(micro).scores.sum()) for micro in parts.learner.micro_batches(batch))
    shift = total / len(rows)
    model.head.bias.sub_(shift)
    return shift


@torch.no_grad()
def held_out_margins(model: ScalarModel, parts: SupervisedParts[Ranking]) -> list[float]:
    """Score of the better answer minus that of the worse, for every held-out pair."""
    margins: list[float] = []
    for micro in parts.learner.micro_batches(parts.collate(parts.held_out)):
        scores = model(micro).scores
        wins = (micro.ranks[:, None] < micro.ranks[None, :]) & (micro.group_ids[:, None] == micro.group_ids[None, :])
        margins += (scores[:, None] - scores[None, :])[wins].tolist()
    return margins


def margins_report(margins: Sequence[float]) -> dict[str, Any]:
    """Accuracy with its interval, calibration and a histogram of margins.

    The model says P(better wins) = sigmoid(margin). Each pair is read in the order in which the model is more sure of
    itself, so its confidence is at least 1/2; it is right where the margin is positive. Calibrated means that of the
    pairs it is p sure of, a fraction p is right.
    """
    accuracy = wilson(sum(margin > 0 for margin in margins), len(margins))
    sure = [1.0 / (1.0 + math.exp(-min(abs(margin), 60.0))) for margin in margins]
    bins: list[dict[str, float]] = []
    for index in range(CALIBRATION_BINS):
        low, high = 0.5 + 0.5 * index / CALIBRATION_BINS, 0.5 + 0.5 * (index + 1) / CALIBRATION_BINS
        inside = [i for i, p in enumerate(sure) if low <= p < high or (p == 1.0 and index + 1 == CALIBRATION_BINS)]
        if inside:
            predicted = sum(sure[i] for i in inside) / len(inside)
            observed = sum(margins[i] > 0 for i in inside) / len(inside)
            bins.append({"predicted": predicted, "observed": observed, "pairs": float(len(inside))})
    return {
        "pairs": len(margins),
        "accuracy": accuracy.value,
        "accuracy_interval": [accuracy.low, accuracy.high],
        "calibration": bins,
        "calibration_error": sum(b["pairs"] * abs(b["predicted"] - b["observed"]) for b in bins) / len(margins),
        "margins": histogram(margins, MARGIN_BINS),
    }


def histogram(values: Sequence[float], bins: int) -> list[dict[str, float]]:
    """Counts in equal bins between the least and the greatest value."""
    low, high = min(values), max(values)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / width), bins - 1)] += 1
    return [{"from": low + i * width, "to": low + (i + 1) * width, "count": float(n)} for i, n in enumerate(counts)]
