"""The versions and the machine, as a report lists them."""

from __future__ import annotations

import math
import platform
import time

import torch

from tether import __version__


def environment_rows(seed: int) -> dict[str, str]:
    """The versions and the machine, including its matrix rate, which the times depend on."""
    return {
        "Tether": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "Threads": str(torch.get_num_threads()),
        "fp32 matrix rate": f"{matrix_rate():.0f} GFLOP/s on the CPU",
        "Seed": str(seed),
    }


def matrix_rate(size: int = 1024, repeats: int = 5) -> float:
    """GFLOP/s of an fp32 matrix product, the best of a few."""
    matrix = torch.ones(size, size)
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e9
