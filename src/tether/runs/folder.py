"""A run's folder: its resolved recipe, its metrics line by line, and the model it ends with."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from tether.config import Recipe
from tether.errors import ConfigError, StorageError
from tether.types import Experience


def json_line(step: int, metrics: dict[str, float]) -> str:
    """One step as strict JSON, in which a number that is not finite is null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **finite}, allow_nan=False)


class RunFolder:
    """`config.json`, `metrics.jsonl` and `model/` of one run. Metrics are on disk once `record` returns."""

    def __init__(self, recipe: Recipe) -> None:
        name = recipe.run.name or f"{recipe.method}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path = Path(recipe.run.directory) / name
        self._best = -math.inf
        if (self.path / "config.json").exists():
            raise ConfigError(f"run.name: {self.path} already holds a run; choose another name, or remove it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.json").write_text(
                json.dumps({"method": recipe.method, **recipe.model_dump(mode="json")}, indent=2) + "\n"
            )
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"run.directory: cannot write to {self.path} ({error.strerror})") from error

    def record(self, step: int, metrics: dict[str, float], experience: Experience | None = None) -> None:
        """Append one step's metrics."""
        del experience
        self._metrics.write(json_line(step, metrics) + "\n")
        self._metrics.flush()

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Keep something as JSON; nothing is written where there is nothing to keep."""
        if content:
            (self.path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @property
    def model_path(self) -> Path:
        """Where the trained model goes."""
        return self.path / "model"

    @property
    def best_path(self) -> Path:
        """Where the model with the best held-out score goes."""
        return self.path / "best"

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Whether this step's held-out score is above all before it, the start's included."""
        self._best = max(self._best, metrics.get("start/held_out/score", -math.inf))
        score = metrics.get("held_out/score", -math.inf)
        if score <= self._best:
            return False
        self._best = score
        return True

    def close(self) -> None:
        """Close the metrics file."""
        self._metrics.close()
