"""Rollouts as the token microscope shows them: a step's answers in a chosen order, one of them token by token."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sqlalchemy import select

from tether.store.database.schema import rollouts, runs
from tether.store.read import OpenWorkspace
from tether.store.recorded import Column, StoredRollout
from tether.store.token_codec import rollout_head_of

SHOWN_COLUMNS = (
    *("behavior_logprob", "untruncated_logprob", "old_logprob", "ref_logprob", "value"),
    *("reward", "advantage", "return", "ratio", "clipped", "entropy"),
)

EXCERPT = 400  # characters of a text in a list; the whole of it is on its own page

SORTS: dict[str, tuple[str, int]] = {
    "row": ("row", 1),
    "score": ("score", -1),
    "kl": ("kl", -1),
    "advantage": ("mean_advantage", 1),  # the most negative first: what the policy was told to stop doing
    "length": ("length", -1),
}
"""What a list of rollouts can be sorted by: the field, and whether it rises or falls."""


def rollout_row(rollout: StoredRollout) -> dict[str, Any]:
    """One line of a list, its texts cut short; `kl` is the sum over the answer, `clipped` counts its clipped tokens."""
    return {
        "row": rollout.row,
        "prompt_id": rollout.prompt_id,
        "prompt_text": rollout.prompt_text[:EXCERPT],
        "completion": rollout.completion[:EXCERPT],
        "finish": rollout.finish,
        "score": rollout.score,
        "length": int(rollout.columns["response"].sum()),
        "kl": None if rollout.kl is None else float(rollout.kl.sum()),
        "mean_advantage": _mean(rollout, "advantage"),
        "clipped": int(rollout.answer("clipped").sum()) if "clipped" in rollout.columns else 0,
    }


def _mean(rollout: StoredRollout, name: str) -> float | None:
    values = rollout.answer(name) if name in rollout.columns else np.zeros(0)
    return float(values.mean()) if len(values) else None


def listed(found: Sequence[StoredRollout], *, sort: str, text: str, truncated: bool | None) -> list[dict[str, Any]]:
    """The rows that a person asked for, in their order; what has no number is last."""
    needle = text.casefold()
    chosen = [
        rollout
        for rollout in found
        if (truncated is None or (rollout.finish == "length") == truncated)
        and needle in f"{rollout.prompt_text}\n{rollout.completion}".casefold()
    ]
    field, direction = SORTS[sort]
    return sorted((rollout_row(rollout) for rollout in chosen), key=_key(field, direction))


def _key(field: str, direction: int) -> Callable[[dict[str, Any]], tuple[bool, float, int]]:
    def key(row: dict[str, Any]) -> tuple[bool, float, int]:
        value = row[field]
        if value is None or not math.isfinite(value):
            return (True, 0.0, row["row"])
        return (False, direction * value, row["row"])

    return key


def token_page(rollout: StoredRollout) -> dict[str, Any]:
    """One rollout with its columns over all tokens, prompt and answer; a column it lacks is absent."""
    columns = {name: _listed(rollout.columns[name]) for name in SHOWN_COLUMNS if name in rollout.columns}
    if rollout.kl is not None:
        columns["kl"] = _listed(rollout.kl)
    return {
        "step": rollout.step,
        "row": rollout.row,
        "prompt_id": rollout.prompt_id,
        "prompt_text": rollout.prompt_text,
        "completion": rollout.completion,
        "finish": rollout.finish,
        "score": rollout.score,
        "parts": dict(rollout.parts),
        "temperature": rollout.temperature,
        "final_value": rollout.final_value,
        "pieces": list(rollout.pieces),
        "response": rollout.columns["response"].tolist(),
        "columns": columns,
    }


def _listed(column: Column) -> list[Any]:
    """Plain numbers, rounded to seven places: finer than anything that is drawn, and half as long to send."""
    if column.dtype == bool:
        return column.tolist()
    values = np.round(column.astype(np.float64), 7).tolist()
    return values if np.isfinite(column).all() else [value if math.isfinite(value) else None for value in values]


class PromptIndex:
    """Which prompt stands in which row of which kept step. A step is looked through once."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self._opened = opened
        self._known: dict[tuple[str, int], list[tuple[int, str]]] = {}
        self._lock = threading.Lock()

    def rows_with(self, run_id: int, steps: Sequence[int], prompt_id: str) -> list[tuple[int, int]]:
        """(step, row) of every kept answer to a prompt."""
        with self._opened.reading() as connection:
            uid = connection.execute(select(runs.c.uid).where(runs.c.id == run_id)).scalar() or ""
        with self._lock:
            for step in steps:
                if (uid, step) not in self._known:
                    self._known[uid, step] = self._look_through(run_id, step)
            return [(step, row) for step in steps for row, prompt in self._known[uid, step] if prompt == prompt_id]

    def _look_through(self, run_id: int, step: int) -> list[tuple[int, str]]:
        chosen = select(rollouts.c.place, rollouts.c.content).where(rollouts.c.run_id == run_id)
        with self._opened.reading() as connection:
            rows = connection.execute(chosen.where(rollouts.c.step == step).order_by(rollouts.c.place)).all()
        return [(place, rollout_head_of(content)["prompt_id"]) for place, content in rows]


def answers_at(opened: OpenWorkspace, run_id: int, places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """`{step, row, score, completion}` of the rollouts at these places, the answers cut short."""
    found: list[dict[str, Any]] = []
    with opened.reading() as connection:
        for step, row in places:
            chosen = select(rollouts.c.score, rollouts.c.content)
            chosen = chosen.where(rollouts.c.run_id == run_id, rollouts.c.step == step, rollouts.c.place == row)
            for score, content in connection.execute(chosen):
                head = rollout_head_of(content)
                found.append({"step": step, "row": row, "score": score, "completion": head["completion"][:EXCERPT]})
    return found
