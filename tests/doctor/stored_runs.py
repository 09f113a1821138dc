"""Recorded runs as the doctor reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tether.store.recorded import TOKEN_COLUMNS, RecordedRun, StoredRollout

RECORDED = Path(__file__).parent / "recorded"


def read_recorded(name: str) -> RecordedRun:
    """One of the files of `recorded/`."""
    found = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    columns: dict[str, list[Any]] = found["metrics"]
    metrics = [
        {
            name: math.nan if values[place] == "nan" else float(values[place])
            for name, values in columns.items()
            if values[place] is not None
        }
        for place in range(len(columns["step"]))
    ]
    rollouts = [from_json(rollout) for rollout in found["rollouts"]]
    return RecordedRun(
        name=found["name"],
        method=found["method"],
        config=found["config"],
        metrics=metrics,
        rollout_steps=sorted({rollout.step for rollout in rollouts}),
        rollouts=lambda step: [rollout for rollout in rollouts if rollout.step == step],
    )


def from_json(found: dict[str, Any]) -> StoredRollout:
    """A rollout from plain values, whose columns cover the answer alone."""
    prompt = int(found["prompt_tokens"])
    columns = {
        name: np.concatenate([np.zeros(prompt), values]).astype(TOKEN_COLUMNS[name])
        for name, values in found["columns"].items()
    }
    length = len(found["columns"]["token"])
    columns["response"] = np.arange(prompt + length) >= prompt
    return StoredRollout(
        columns=columns,
        pieces=[""] * prompt + list(found["pieces"]),
        **{
            name: found[name]
            for name in (
                *("step", "row", "prompt_id", "group_id", "sample_id"),
                *("prompt_text", "completion", "finish", "score", "temperature"),
            )
        },
    )
