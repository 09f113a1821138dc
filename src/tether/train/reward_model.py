"""What is done with a reward model once it is trained: centring it, and saying how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tether.data.examples import Ranking, Row, collate_rows
from tether.evaluation.metrics import wilson
from tether.models.heads import ScalarModel
from tether.train.supervised import SupervisedParts

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
    """The model centred for as long as it is saved; training goes on with the very bits that it had."""
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
