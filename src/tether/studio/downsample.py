"""Long curves made short enough to draw, without losing a spike: each bucket keeps its mean, its low and its high."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.studio.metric_cache import Series


def shown_series(series: Series, points: int) -> dict[str, Any]:
    """`{steps, values}`, and where it is longer than `points`, one entry a bucket with `low` and `high` as well."""
    if len(series.steps) <= points:
        return {"steps": series.steps.tolist(), "values": _plain(series.values)}
    edges = np.linspace(0, len(series.steps), points + 1).astype(int)  # bucket i is [edges[i], edges[i + 1])
    buckets = [series.values[start:end] for start, end in pairwise(edges)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a bucket in which nothing was finite
        return {
            "steps": series.steps[edges[1:] - 1].tolist(),
            "values": _plain(np.array([np.nanmean(bucket) for bucket in buckets])),
            "low": _plain(np.array([np.nanmin(bucket) for bucket in buckets])),
            "high": _plain(np.array([np.nanmax(bucket) for bucket in buckets])),
        }


def spark(series: Series | None, points: int = 40) -> list[float | None]:
    """A curve in at most `points` numbers, for a list of runs."""
    return [] if series is None else shown_series(series, points)["values"]


def _plain(values: NDArray[Any]) -> list[float | None]:
    return [value if value == value and abs(value) != np.inf else None for value in values.tolist()]
