"""The machine that a plan is for: its memory, its rate of matrix products and its memory bandwidth."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tether.errors import ConfigError
from tether.models.load import resolve_device

CUDA_OWN = 700 * 2**20  # bytes that the driver, libraries and captured graphs use
UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "tib": 2**40, "tb": 10**12, "g": 2**30, "m": 2**20}
STATED = {"cuda": (300e12, 2e12), "mps": (10e12, 3e11), "cpu": (2e11, 3e10)}  # operations and bytes per second


@dataclass(frozen=True)
class Machine:
    """A device, as seen by a plan."""

    kind: str  # cpu, cuda or mps
    name: str
    memory: int  # bytes
    rate: float  # of large matrix products, operations per second
    bandwidth: float  # bytes per second
    basis: str  # where rate and bandwidth come from

    @property
    def usable(self) -> int:
        """Bytes that a run can use."""
        return self.memory - (CUDA_OWN if self.kind == "cuda" else 0)


def machine_for(device: str, dtype: str, memory: str | None = None) -> Machine:
    """The named device, measured if it is present; `memory` plans for another size, such as 24GiB."""
    wanted = parse_memory(memory) if memory else None
    place = planned_device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        if wanted is None:
            raise ConfigError("there is no CUDA device: give the memory to plan for, such as --memory 24GiB")
        rate, bandwidth = STATED["cuda"]
        basis = f"the device is not present; {rate / 1e12:.0f} TFLOP/s and {bandwidth / 1e12:.0f} TB/s are assumed"
        return Machine("cuda", "a CUDA device", wanted, rate, bandwidth, basis)
    rate, bandwidth, basis = measured(place, dtype)
    return Machine(place.type, device_name(place), wanted or device_memory(place), rate, bandwidth, basis)


def planned_device(name: str) -> torch.device:
    """The device to plan for, as `resolve_device` finds it; a CUDA device need not be present."""
    absent = re.fullmatch(r"cuda(:\d+)?", name) is not None and not torch.cuda.is_available()
    return torch.device("cuda") if absent else resolve_device(name)


def parse_memory(text: str) -> int:
    """Convert 24GiB, 24GB or 24g to bytes."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower() or "gib"
    try:
        size = float(number) * UNITS[unit]
    except (KeyError, ValueError):
        raise ConfigError(f"--memory {text}: write it as 24GiB") from None
    if not size > 0:
        raise ConfigError(f"--memory {text}: it must be above 0")
    return round(size)


def device_memory(device: torch.device) -> int:
    """Memory of a device in bytes; for a CPU, the limit of this process."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        return min(physical, int(limit.read_text()))
    except (OSError, ValueError):  # no limit is set, or this is not Linux
        return physical


def device_name(device: torch.device) -> str:
    """The device's name for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "this machine's CPU" if device.type == "cpu" else "this machine's GPU (MPS)"


def measured(device: torch.device, dtype: str) -> tuple[float, float, str]:
    """`(operations per second, bytes per second, description)` of this device: one product and one copy, best of a few.

    It draws no random numbers, so measuring does not change a run.
    """
    kind = torch.bfloat16 if dtype == "bfloat16" and device.type != "cpu" else torch.float32
    rate, bandwidth = _matrix_rate(device, kind), _bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a run may need the memory in one piece
    name = str(kind).removeprefix("torch.")
    return rate, bandwidth, f"measured here: {_flops(rate)} in {name} products, {bandwidth / 1e9:,.0f} GB/s"


def _matrix_rate(device: torch.device, kind: torch.dtype) -> float:
    side = 4096 if device.type == "cuda" else 768
    left = torch.full((side, side), 1.0 / side, device=device, dtype=kind)
    right, out = left.t().contiguous(), torch.empty_like(left)
    return 2.0 * side**3 / _best(lambda: torch.mm(left, right, out=out), device)


def _bandwidth(device: torch.device) -> float:
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _best(lambda: target.copy_(source), device)


def _best(act: Callable[[], object], device: torch.device, repeats: int = 4) -> float:
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        act()
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"
