"""Long curves made short enough to draw, without losing a spike: each bucket keeps its mean, its low and its high."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.studio.metric_cache import MetricSeries


def shown_series(series: MetricSeries, points: int) -> dict[str, Any]:
    """`{steps, values}`, and where it is longer than `points`, one entry a bucket with `low` and `high` as well."""
    if len(series.steps) <= points:
        return {"steps": series.steps.tolist(), "values": _plain(series.values)}
    edges = np.linspace(0, len(series.steps), points + 1).astype(int)  # bucket i is [edges[i], edges[i + 1])
    starts = edges[:-1]
    finite = np.isfinite(series.values)
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, series.values, 0.0), starts)
    return {
        "steps": series.steps[edges[1:] - 1].tolist(),
        "values": _plain(np.divide(sums, counts, out=np.full(points, np.nan), where=counts > 0)),
        "low": _plain(np.fmin.reduceat(np.where(finite, series.values, np.inf), starts)),
        "high": _plain(np.fmax.reduceat(np.where(finite, series.values, -np.inf), starts)),
    }


def _plain(values: NDArray[Any]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
