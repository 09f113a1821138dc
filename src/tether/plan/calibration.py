"""What one GPU achieves: `calibration.json` has the figures, where they come from, and nothing else has any."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from tether.errors import UsageError
from tether.plan.machine import Machine
from tether.plan.timing import READ_TOKENS, Pace

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
    reading = table()["prompt_reading"]
    if not reading["rows"]:
        return Pace(**figures, reading_share=figures["share"], reading_layer=figures["layer"])
    rate, layer = reading_figures(reading["rows"])
    return Pace(**figures, reading_share=rate / gpu_named(reading["gpu"]).machine.rate, reading_layer=layer)


def prompt_reading_is_measured() -> bool:
    """Whether the speed of reading prompts is a measurement."""
    return bool(table()["prompt_reading"]["rows"])


def reading_figures(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """`(operations a second, seconds of a layer of a short pass)`, from rows of benchmarks/gpu/prompt_reading.py.

    The shortest pass of the smallest shape is nearly all overhead, which is taken off every other row.
    """
    least = {each["shape"]: min(row["seconds"] for row in rows if row["shape"] == each["shape"]) for each in rows}
    short = [row for row in rows if row["seconds"] == least[row["shape"]]]
    layer = min(row["seconds"] / row["layers"] for row in short)
    rates: list[float] = []
    for row in rows:
        passes = math.ceil(row["prompts"] * row["prompt"] / READ_TOKENS)
        computing = row["seconds"] - passes * row["layers"] * layer
        if row not in short and computing > row["seconds"] / 2:
            rates.append(row["operations"] / computing)
    return (median(rates) if rates else max(row["operations"] / row["seconds"] for row in rows)), layer


def network() -> Network:
    """The assumptions about collectives."""
    found = table()["network"]
    return Network(found["efficiency"], found["latency"])
