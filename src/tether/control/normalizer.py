"""Running moments, with which observations and rewards are normalized while they are sampled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EPSILON = 1e-8


class Moments:
    """Mean and variance of all vectors seen so far (Chan et al. 1979), starting from 0 and 1 with almost no weight."""

    def __init__(self, size: int) -> None:
        self.mean, self.variance, self.count = np.zeros(size), np.ones(size), 1e-4

    def update(self, rows: Array) -> None:
        """Add the rows (N, size)."""
        added = len(rows)
        total = self.count + added
        if added == 1:
            delta = rows[0] - self.mean
            self.variance = (self.variance + delta * delta * (added / total)) * (self.count / total)
        else:
            delta = rows.mean(axis=0) - self.mean
            squares = self.variance * self.count + rows.var(axis=0) * added
            self.variance = (squares + delta * delta * (self.count * added / total)) / total
        self.mean = self.mean + delta * (added / total)
        self.count = total


class ObservationNormalizer:
    """(x - mean) / deviation, clipped; the moments include x itself."""

    def __init__(self, size: int, *, active: bool, limit: float) -> None:
        self.moments, self.active, self.limit = Moments(size), active, limit

    def __call__(self, rows: Array, *, learn: bool = True) -> NDArray[np.float32]:
        """(N, size) as the networks see them."""
        if not self.active:
            return rows.astype(np.float32)
        if learn:
            self.moments.update(rows)
        scaled = (rows - self.moments.mean) / np.sqrt(self.moments.variance + EPSILON)
        return np.minimum(np.maximum(scaled, -self.limit), self.limit).astype(np.float32)


class RewardNormalizer:
    """Rewards divided by the running deviation of the discounted return, clipped; their mean is not moved."""

    def __init__(self, copies: int, *, active: bool, gamma: float, limit: float) -> None:
        self.active, self.gamma, self.limit = active, gamma, limit
        self.returns = [0.0] * copies
        self.mean, self.variance, self.count = 0.0, 1.0, 1e-4

    def __call__(self, rewards: list[float], ended: list[bool]) -> list[float]:
        """The rewards of one step of all copies; the return of an episode that `ended` starts again."""
        if not self.active:
            return rewards
        returns = [old * self.gamma + reward for old, reward in zip(self.returns, rewards, strict=True)]
        self._add(returns)
        self.returns = [0.0 if over else value for value, over in zip(returns, ended, strict=True)]
        scale = 1.0 / math.sqrt(self.variance + EPSILON)
        return [min(max(reward * scale, -self.limit), self.limit) for reward in rewards]

    def _add(self, values: list[float]) -> None:
        added = len(values)
        mean = sum(values) / added
        delta, total = mean - self.mean, self.count + added
        squares = self.variance * self.count + sum((value - mean) ** 2 for value in values)
        self.variance = (squares + delta * delta * self.count * added / total) / total
        self.mean += delta * added / total
        self.count = total

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"returns": self.returns, "mean": self.mean, "variance": self.variance, "count": self.count}

    def restore(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.returns = [float(value) for value in state["returns"]]
        self.mean, self.variance, self.count = (float(state[name]) for name in ("mean", "variance", "count"))
