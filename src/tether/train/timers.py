"""What each phase of an iteration takes: seconds and, on a CUDA device, memory."""

from __future__ import annotations

import time

import torch

GIB = 2**30


class Timers:
    """A clock of consecutive phases: one begins where the one before it ends.

    On CUDA the device's peak statistics are reset as a phase begins, so whoever measures an iteration from outside
    reads `memory/...` in its metrics in place of `torch.cuda.max_memory_allocated`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._began = self._phase_began = 0.0
        self._name: str | None = None
        self._beside = 0
        self._found: dict[str, float] = {}

    def begin(self, name: str) -> None:
        """End the phase at hand, and begin another."""
        self._end()
        if self._name is None:
            self._began = self._phase_began
        self._name = name
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def hold_beside(self, size: int) -> None:
        """Count bytes of the device that are held in the phase at hand, and that torch does not know of."""
        self._beside = size

    def _end(self) -> None:
        now = time.perf_counter()
        if self._name is not None:
            self._found[f"seconds/{self._name}"] = now - self._phase_began
            if self._device is not None:
                held = torch.cuda.max_memory_allocated(self._device) + self._beside
                self._found[f"memory/{self._name}"] = held / GIB
        self._phase_began = now
        self._beside = 0

    def metrics(self) -> dict[str, float]:
        """End the last phase; seconds and peak GiB of each, and what is still held (`memory/kept`)."""
        self._end()
        self._name = None
        self._found["seconds/step"] = self._phase_began - self._began
        if self._device is not None:
            self._found["memory/kept"] = torch.cuda.memory_allocated(self._device) / GIB
        return self._found
