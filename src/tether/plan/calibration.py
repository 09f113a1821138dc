"""What one GPU achieves: `calibration.json` has the figures, where they come from, and nothing else has any."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from tether.errors import UsageError
from tether.plan.machine import Machine
from tether.plan.timing import Pace

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    machine: Machine
    nvlink: float  # bytes per second to the other GPUs of its node


@dataclass(frozen=True)
class Network:
    """What is assumed of collectives."""

    efficiency: float  # fraction of a link's speed
    latency: float  # seconds for each doubling of the group


@cache
def table() -> dict[str, Any]:
    """The figures, as they are in the file."""
    return json.loads(files("tether.plan").joinpath("calibration.json").read_text(encoding="utf-8"))


def gpu_named(name: str) -> Gpu:
    """The GPU of that name."""
    known = table()["gpus"]
    if name.lower() not in known:
        raise UsageError(f"--gpu {name}: there are figures for {', '.join(known)}")
    each = known[name.lower()]
    basis = f"{each['tflops']:,} TFLOP/s ({each['basis']}), {each['bandwidth_tb']} TB/s"
    memory = round(each["memory_gib"] * GIB)
    machine = Machine("cuda", name.upper(), memory, each["tflops"] * 1e12, each["bandwidth_tb"] * 1e12, basis)
    return Gpu(name.lower(), machine, each["nvlink_gb"] * 1e9)


def calibrated_pace() -> Pace:
    """The fractions of its rates that a GPU achieves, as one H200 does."""
    figures = {name: value for name, value in table()["pace"].items() if name not in ("what", "gpu")}
    return Pace(**figures, reading_share=_reading_share(figures["share"]))


def prompt_reading_is_measured() -> bool:
    """Whether the speed of reading prompts is a measurement."""
    return bool(table()["prompt_reading"]["rows"])


def _reading_share(share: float) -> float:
    rows = table()["prompt_reading"]["rows"]
    if not rows:
        return share
    rate = gpu_named(table()["prompt_reading"]["gpu"]).machine.rate
    return median(row["operations_per_second"] for row in rows) / rate


def network() -> Network:
    """The assumptions about collectives."""
    found = table()["network"]
    return Network(found["efficiency"], found["latency"])
