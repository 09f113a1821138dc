"""The machine that a plan is for, and how long an iteration takes on it.

The machine that a plan is for: how much memory it has, and how fast it multiplies and moves numbers.

How long an iteration will take: counted operations and bytes, over the device's rates.

A pass of a backbone over one token costs 2 operations for each number of its matrices, and 4 Q a token before it for
attention. The backward pass costs as much for the states and once more for trained weights. The output layer costs
2 V H for each wanted token, and in training as much four times: the backward makes the logits anew.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tether.config.recipes import Recipe, RLRecipe
from tether.errors import ConfigError
from tether.models.load import resolve_device
from tether.plan.memory import Held, Memory, slots_of
from tether.plan.workload import Shape, Work

CUDA_OWN = 700 * 2**20  # bytes that the driver, libraries and captured graphs keep for themselves
UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "tib": 2**40, "tb": 10**12, "g": 2**30, "m": 2**20}
STATED = {"cuda": (300e12, 2e12), "mps": (10e12, 3e11), "cpu": (2e11, 3e10)}  # products and bytes a second


@dataclass(frozen=True)
class Machine:
    """A device, as a plan sees it."""

    kind: str  # cpu, cuda or mps
    name: str
    memory: int  # bytes
    rate: float  # of large matrix products, operations a second
    bandwidth: float  # bytes a second
    basis: str  # where rate and bandwidth are known from

    @property
    def usable(self) -> int:
        """Bytes that a run can have."""
        return self.memory - (CUDA_OWN if self.kind == "cuda" else 0)


def machine_for(device: str, dtype: str, memory: str | None = None) -> Machine:
    """The device named, measured where it is here; `memory` plans for another size, such as 24GiB."""
    wanted = parse_memory(memory) if memory else None
    place = planned_device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        if wanted is None:
            raise ConfigError("no CUDA device is here: say how much memory to plan for, such as --memory 24GiB")
        rate, bandwidth = STATED["cuda"]
        basis = f"no such device is here; {rate / 1e12:.0f} TFLOP/s and {bandwidth / 1e12:.0f} TB/s are assumed"
        return Machine("cuda", "a CUDA device", wanted, rate, bandwidth, basis)
    rate, bandwidth, basis = measured(place, dtype)
    return Machine(place.type, device_name(place), wanted or device_memory(place), rate, bandwidth, basis)


def planned_device(name: str) -> torch.device:
    """The device to plan for, as `resolve_device` finds it; a CUDA device need not be here."""
    absent = re.fullmatch(r"cuda(:\d+)?", name) is not None and not torch.cuda.is_available()
    return torch.device("cuda") if absent else resolve_device(name)


def parse_memory(text: str) -> int:
    """24GiB, 24GB or 24g in bytes."""
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
    """Bytes of a device; of a CPU, what this process may have."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        return min(physical, int(limit.read_text()))
    except (OSError, ValueError):  # no limit is set, or this is no Linux
        return physical


def device_name(device: torch.device) -> str:
    """What people call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "this machine's CPU" if device.type == "cpu" else "this machine's GPU (MPS)"


def measured(device: torch.device, dtype: str) -> tuple[float, float, str]:
    """`(operations a second, bytes a second, in words)` of this device: one product and one copy, the best of a few.

    No random number is drawn, so measuring changes no run.
    """
    kind = torch.bfloat16 if dtype == "bfloat16" and device.type != "cpu" else torch.float32
    rate, bandwidth = _matrix_rate(device, kind), _bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a run may need all of it in one piece
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


@dataclass(frozen=True)
class Pace:
    """How much of a device's rates is reached, and what a step costs at the least."""

    share: float  # of the rate of large products, in passes over many tokens
    layer: float  # seconds that one layer's forward pass takes however few the tokens
    bytes_share: float  # of the bandwidth, while sampling
    step_layer: float  # seconds that one layer's decode step takes at the least
    general_layer: float  # the same on the general way


PACES = {
    "cuda": Pace(0.5, 0.2e-3, 0.6, 20e-6, 0.5e-3),
    "mps": Pace(0.4, 0.3e-3, 0.5, 0.5e-3, 0.5e-3),
    "cpu": Pace(0.6, 0.15e-3, 0.5, 0.15e-3, 0.4e-3),
}


def seconds_of(
    recipe: Recipe, shape: Shape, work: Work, memory: Memory, machine: Machine, critic: Shape | None = None
) -> dict[str, float]:
    """Predicted seconds of each phase of an iteration; `critic` is the shape of one that is not the policy's."""
    pace, held = PACES[machine.kind], Held.of(recipe, shape, machine.kind)
    fast = pace.share * machine.rate
    frozen_below = recipe.roles.mode == "shared_backbone"
    layers = min(recipe.roles.trainable_layers, shape.layers) if frozen_below else shape.layers
    part = layers / shape.layers
    backbone = part * _pass_of(shape, work)
    like_policy = 1.0 if critic is None else _pass_of(critic, work) / _pass_of(shape, work)  # the critic's work
    head = 2.0 * shape.vocabulary * shape.hidden
    tokens, answers = float(work.tokens), float(work.rows * work.answer_tokens)
    critics = like_policy if work.critic == "separate" else 0.0
    backbones = int(work.policy) + critics
    passes = work.rows / max(1, memory.micro_rows)
    found: dict[str, float] = {}
    if isinstance(recipe, RLRecipe):
        found["rollout"] = _rollout(recipe, shape, work, machine, held)
        evaluated = (backbones + int(work.reference) + work.rewards) * backbone * tokens
        evaluated += (backbone / part * (1 - part)) * tokens if frozen_below else 0.0
        evaluated += (1 + int(work.reference)) * head * answers
        found["evaluation"] = evaluated / fast + passes * layers * (backbones + int(work.reference)) * pace.layer
    trains_all = recipe.roles.mode != "lora"
    times = (3 if trains_all else 2) + int(held.checkpointing)
    heads = (4 if recipe.roles.mode == "separate" else 2) * head * answers if work.policy else 0.0
    operations = (
        work.epochs * (backbones * times * backbone * tokens + heads)
        + work.critic_alone * times * critics * backbone * tokens
    )
    waits = (work.epochs + work.critic_alone) * passes * layers * backbones * times * pace.layer
    trained = sum(role.gradients for role in memory.roles) / held.width
    stepping = work.steps * trained * (2 * held.width + 2 * held.moments + 8) / machine.bandwidth
    found["update"] = operations / fast + waits + stepping
    return found


def _pass_of(shape: Shape, work: Work) -> float:
    """Operations of a whole backbone's pass over one token of a row."""
    return 2.0 * shape.products + 2.0 * shape.layers * shape.queries * work.row_tokens


def _rollout(recipe: RLRecipe, shape: Shape, work: Work, machine: Machine, held: Held) -> float:
    """Reading the prompts, then one step after another of all slots: weights and caches are read at each."""
    pace = PACES[machine.kind]
    slots = slots_of(recipe, work, machine.kind)
    reading = 2.0 * shape.products * work.prompts * work.prompt_tokens / (pace.share * machine.rate)
    weights = (shape.products + shape.vocabulary * shape.hidden) * held.width
    kept = slots * (work.prompt_tokens + work.answer_tokens / 2) * 2 * shape.layers * shape.keys * held.width
    operations = 2.0 * slots * (shape.products + shape.vocabulary * shape.hidden)
    step = max((weights + kept) / (pace.bytes_share * machine.bandwidth), operations / (pace.share * machine.rate))
    floor = pace.general_layer if recipe.rollout.engine == "transformers" or not shape.packed else pace.step_layer
    rounds = -(-work.rows // slots)
    return reading + rounds * work.answer_tokens * (step + shape.layers * floor)
