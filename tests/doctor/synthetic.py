"""Runs that were never trained: metrics made up for one test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tether.doctor.findings import Finding, Healthy, TooLittle, Verdict
from tether.store.recorded import RecordedRun, StoredRollout

STEPS = 24


def synthetic(
    method: str = "ppo",
    config: Mapping[str, Any] | None = None,
    rollouts: Sequence[StoredRollout] = (),
    steps: int = STEPS,
    **curves: float | Sequence[float],
) -> RecordedRun:
    """A run with these metrics; a single number stands at every step, and `__` in a name is a slash."""
    metrics: list[dict[str, float]] = [{"step": float(step)} for step in range(steps)]
    for name, values in curves.items():
        row = [float(values)] * steps if isinstance(values, int | float) else list(values)
        for place, value in enumerate(row):
            metrics[place][name.replace("__", "/")] = value
    return RecordedRun(
        name="made-up",
        method=method,
        config=config or {},
        metrics=metrics,
        rollout_steps=sorted({rollout.step for rollout in rollouts}),
        rollouts=lambda step: [rollout for rollout in rollouts if rollout.step == step],
    )


def wave(start: float, end: float, *, noise: float = 0.0, steps: int = STEPS) -> list[float]:
    """From one value to another, with a wobble whose mean is 0."""
    line = np.linspace(start, end, steps)
    return (line + noise * np.where(np.arange(steps) % 2 == 0, 1.0, -1.0)).tolist()


def answered(
    tokens: Sequence[int],
    *,
    step: int = 0,
    row: int = 0,
    prompt: str | None = None,
    text: str = "answer",
    score: float = 0.0,
    **columns: Sequence[float],
) -> StoredRollout:
    """A rollout with a prompt of two tokens and this answer."""
    length = len(tokens)
    table = {name: np.array([0.0, 0.0, *values], dtype="float32") for name, values in columns.items()}
    table["token"] = np.array([0, 0, *tokens], dtype="int32")
    table["response"] = np.array([False, False, *[True] * length])
    return StoredRollout(
        step=step,
        row=row,
        prompt_id=prompt or f"prompt-{row}",
        group_id=row,
        sample_id=0,
        prompt_text="asked",
        completion=text,
        finish="stop",
        score=score,
        temperature=1.0,
        columns=table,
        pieces=["", "", *[f"<{token}>" for token in tokens]],
    )


def found(verdict: Verdict) -> Finding:
    """The finding; a failure with the reason where there is none."""
    assert isinstance(verdict, Finding), verdict
    return verdict


def silent(verdict: Verdict) -> bool:
    """Whether the audit had enough to judge by and found nothing."""
    return isinstance(verdict, Healthy)


def undecided(verdict: Verdict) -> bool:
    """Whether the audit had too little to judge by."""
    return isinstance(verdict, TooLittle)
