"""Whether a run fits into the memory that is free, asked before its first step: run, split or refused.

The plan is right to about a tenth (docs/plan.md). A run is refused only where even nine tenths of what it predicts do
not fit, so that what fits is never refused; where the prediction itself does not fit, that is said and the run starts.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from tether.config.load import change_settings
from tether.config.recipes import Recipe, RLRecipe
from tether.plan.advice import SMALLEST_MICRO, advice
from tether.plan.machine import CUDA_OWN, Machine, device_memory
from tether.plan.model_shape import Shape
from tether.plan.plan import GIB, Plan, make_plan
from tether.plan.workload import Lengths

PLAN_ERROR = 0.1  # how far the plan may be off
CPU_ERROR = 0.25  # on a CPU, where the allocator and the libraries take more or less than what is counted


@dataclass(frozen=True)
class Judgement:
    """What became of the question, in a sentence where there is something to say."""

    verdict: Literal["fits", "tight", "split", "refused"]
    sentence: str = ""
    micro_batch_tokens: int | None = None  # the size of passes that fits, where they must be smaller


def free_memory(device: torch.device) -> int:
    """Bytes that this process can have: what is free, and what it already holds for the models of this run."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    held = _status("/proc/self/status", "VmRSS")
    available = _status("/proc/meminfo", "MemAvailable")
    if available is None:  # no Linux
        return device_memory(device)
    return min(available + (held or 0), _left_in_group(held or 0), device_memory(device))


def _left_in_group(held: int) -> int:
    """What a container's limit leaves, files that are only cached not counted; no limit is no bound."""
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = next(
            int(line.split()[1])
            for line in (group / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
        return limit - (used - cached) + held
    return 2**63 - 1


def _status(file: str, name: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def weights_fit(recipe: Recipe, shape: Shape, machine: Machine, free: int) -> Judgement:
    """Whether weights, gradients and optimiser fit, before any of them is made: no data is needed to say so."""
    roles = make_plan(recipe, shape, Lengths.assumed(1, "not read yet"), machine).memory.roles
    needed = sum(role.held + role.gradients for role in roles)
    if needed * (1.0 - _error(machine)) <= free:
        return Judgement("fits")
    plan = make_plan(recipe, shape, Lengths.assumed(1, "not read yet"), _with_memory(machine, free))
    what = f"the weights, gradients and optimiser of this run take {_size(needed)}"
    return Judgement("refused", _refusal(recipe, plan, what, free))


def whole_fits(recipe: Recipe, plan: Plan, free: int) -> Judgement:
    """Whether the most that is held at once fits; where smaller passes make it fit, how small they must be."""
    machine = _with_memory(plan.machine, free)
    needed, error = _needed(recipe, plan), _error(machine)
    if needed <= free:
        return Judgement("fits")
    about = f"about {_size(needed)} are needed at the most and {_size(free)} of {machine.name} are free"
    if needed * (1.0 - error) <= free:
        return Judgement("tight", f"It may not fit: {about}, and the plan is right to about {error:.0%}.")
    tokens = recipe.optimizer.micro_batch_tokens
    while (tokens := tokens // 2) >= max(SMALLEST_MICRO, plan.work.longest_row):
        smaller = change_settings(recipe, ["--optimizer.micro_batch_tokens", str(tokens)])
        if _needed(smaller, make_plan(smaller, plan.shape, plan.lengths, machine)) <= free:
            return Judgement(
                "split",
                f"Passes of {recipe.optimizer.micro_batch_tokens} tokens do not fit ({about}): each batch is split "
                f"into passes of {tokens} (optimizer.micro_batch_tokens), which changes time and memory, never the "
                "gradient.",
                tokens,
            )
    tightened = make_plan(recipe, plan.shape, plan.lengths, machine)
    return Judgement("refused", _refusal(recipe, tightened, f"about {_size(needed)} are needed at the most", free))


def _needed(recipe: Recipe, plan: Plan) -> int:
    """The plan's peak. A sampler on a GPU that chooses its own number of slots takes what is free, and no more."""
    phases = dict(plan.memory.phases)
    if isinstance(recipe, RLRecipe) and recipe.rollout.max_num_seqs == "auto" and plan.machine.kind == "cuda":
        phases["rollout"] -= sum(role.cache for role in plan.memory.roles)
    return max(phases.values())


def _refusal(recipe: Recipe, plan: Plan, what: str, free: int) -> str:
    _, together = advice(recipe, plan)
    flags = " ".join(f"--{change.key} {change.value}" for change in together)
    repair = f"it would fit with {flags}" if flags else "take a smaller model, or a device with more memory"
    return (
        f"this run does not fit: {what}, and {_size(free)} of {plan.machine.name} are free (the plan is right to about "
        f"{_error(plan.machine):.0%}); {repair}, or start it all the same with --run.memory_check warn"
    )


def _with_memory(machine: Machine, free: int) -> Machine:
    return replace(machine, memory=free + (CUDA_OWN if machine.kind == "cuda" else 0))


def _error(machine: Machine) -> float:
    return CPU_ERROR if machine.kind == "cpu" else PLAN_ERROR


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


def weights_on_disk(path: str) -> int:
    """Bytes of a folder's weights; 0 where it is no folder of a saved model."""
    folder = Path(path).expanduser()
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return 0
