"""What a run really took, gathered step by step, to stand beside what was planned."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

GIB = 2**30
PHASES = ("rollout", "scores", "evaluation", "update")


class Measured:
    """Means over the iterations seen; the first, which compiles and warms up, counts only where it is alone."""

    def __init__(self, *, on_cpu: bool) -> None:
        self.iterations = 0
        self.peak = 0
        self.bytes: dict[str, int] = {}
        self._sums: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._base = _reset_process_peak() if on_cpu else None

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take in one iteration."""
        taken = ("seconds/", "tokens/")
        numbers = {name: value for name, value in metrics.items() if name == "steps" or name.startswith(taken)}
        if self.iterations == 0:
            self._first = numbers
        else:
            for name, value in numbers.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
        self.iterations += 1
        for phase in PHASES:
            if (gib := metrics.get(f"memory/{phase}")) is not None:
                self.bytes[phase] = max(self.bytes.get(phase, 0), round(gib * GIB))
        self.peak = max(self.bytes.values(), default=0)

    def finish(self) -> None:
        """Look at the process itself, where there is no device to ask."""
        if self._base is not None:
            self.peak = max(0, _process_peak() - self._base)

    def mean(self, name: str) -> float:
        """Of one iteration."""
        count = self.iterations - 1
        return self._sums.get(name, 0.0) / count if count > 0 else self._first.get(name, 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """Of each phase and of an iteration."""
        found = {phase: self.mean(f"seconds/{phase}") for phase in PHASES}
        return {phase: took for phase, took in found.items() if took} | {"iteration": self.mean("seconds/step")}

    @property
    def steps(self) -> float:
        """Optimiser steps of an iteration."""
        return self.mean("steps")

    @property
    def tokens(self) -> float:
        """Tokens that an iteration learned from."""
        return self.mean("tokens/learned")

    @property
    def sampled(self) -> float:
        """Tokens that were sampled."""
        return self.mean("tokens/sampled")

    def as_json(self) -> dict[str, Any]:
        """Plain data, sizes in bytes."""
        return {
            "iterations": self.iterations,
            "peak_bytes": self.peak,
            "phase_bytes": self.bytes,
            "optimizer_steps": self.steps,
            "tokens": {"learned_from": self.tokens, "sampled": self.sampled},
            "seconds": self.seconds,
        }


def _reset_process_peak() -> int:
    """Have Linux forget how much memory the process once had; what it has now, in bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS") or _process_peak()


def _process_peak() -> int:
    """The most memory that the process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM") or (most if sys.platform == "darwin" else most * 1024)


def _status(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
