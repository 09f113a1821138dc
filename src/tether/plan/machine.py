"""The machine that a plan is for, and the time of an iteration on it.

A machine has an amount of memory, a rate of matrix products and a memory bandwidth. The time of an iteration is the
number of operations and bytes divided by these rates. A backbone's pass over one token costs 2 operations per number in
its matrices, plus 4 Q per previous token for attention. The backward pass costs the same for the states, and again for
trained weights. The output layer costs 2 V H per wanted token, and four times that in training, because the backward
pass recomputes the logits.
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


@dataclass(frozen=True)
class Pace:
    """The achieved fractions of a device's rates, and the minimum cost of a step."""

    share: float  # fraction of the product rate, in passes over many tokens
    layer: float  # minimum seconds of one layer's forward pass
    bytes_share: float  # fraction of the bandwidth, while sampling
    step_layer: float  # minimum seconds of one layer's decode step
    general_layer: float  # the same in the transformers engine


PACES = {
    "cuda": Pace(0.5, 0.2e-3, 0.6, 20e-6, 0.5e-3),
    "mps": Pace(0.4, 0.3e-3, 0.5, 0.5e-3, 0.5e-3),
    "cpu": Pace(0.6, 0.15e-3, 0.5, 0.15e-3, 0.4e-3),
}


def seconds_of(
    recipe: Recipe, shape: Shape, work: Work, memory: Memory, machine: Machine, critic: Shape | None = None
) -> dict[str, float]:
    """Predicted seconds of each phase of an iteration; `critic` is the critic's shape if it is not the policy's."""
    pace, held = PACES[machine.kind], Held.of(recipe, shape, machine.kind)
    fast = pace.share * machine.rate
    frozen_below = recipe.roles.mode == "shared_backbone"
    layers = min(recipe.roles.trainable_layers, shape.layers) if frozen_below else shape.layers
    part = layers / shape.layers
    backbone = part * _pass_of(shape, work)
    like_policy = (
        1.0 if critic is None else _pass_of(critic, work) / _pass_of(shape, work)
    )  # the critic's relative cost
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
    """Prefill, then one step after another over all slots; each step reads all weights and caches."""
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
