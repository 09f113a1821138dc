"""Recorded runs as the doctor reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np

from tether.reports.capability_table import EVENT
from tether.store.recorded import TOKEN_COLUMNS, Event, RecordedRun, StoredRollout

ARCHIVE = Path(__file__).parent / "recorded.zip"


def recorded_names(prefix: str = "") -> list[str]:
    """The runs of the archive whose names begin with `prefix`, sorted."""
    with ZipFile(ARCHIVE) as archive:
        return sorted(name.removesuffix(".json") for name in archive.namelist() if name.startswith(prefix))


def keep_recorded(name: str, text: str) -> None:
    """Put a run into the archive, in place of one of that name. The same runs give the same bytes."""
    with ZipFile(ARCHIVE) as archive:
        runs = {entry: archive.read(entry) for entry in archive.namelist()}
    runs[f"{name}.json"] = text.encode("utf-8")
    with ZipFile(ARCHIVE, "w", ZIP_DEFLATED) as archive:
        for entry, content in sorted(runs.items()):
            archive.writestr(ZipInfo(entry), content, ZIP_DEFLATED)  # ZipInfo's own date never changes


def read_recorded(name: str) -> RecordedRun:
    """One of the runs of the archive."""
    with ZipFile(ARCHIVE) as archive:
        found = json.loads(archive.read(f"{name}.json"))
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
        events=[Event(0.0, EVENT, "", each["step"], each["data"]) for each in found.get("capability", ())],
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
