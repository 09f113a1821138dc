"""How many trials run at once, and with how many threads each: as many as memory and cores allow."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tether.config.recipes import Recipe
from tether.sweeps.variation import AnyRecipe

SHARE = 0.9  # of the free memory
MAX_ON_GPU = 4  # trials on one device; more would only take turns


@dataclass(frozen=True)
class Room:
    """The number of trials at once, the threads of each, and the reason in words."""

    jobs: int
    threads: int
    reason: str


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(jobs: int) -> int:
    """The cores divided among the trials; OMP_NUM_THREADS is the most that one takes."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, cores() // jobs)
    return min(share, int(limit)) if limit.isdecimal() and int(limit) > 0 else share


def room_for(recipe: AnyRecipe, asked: int | None, trials: int) -> Room:
    """The room for trials of this recipe. `asked` is `--jobs N`; None asks the plan, the free memory and the cores."""
    if asked is not None:
        return Room(asked, threads_each(asked), f"{asked} at once, as asked")
    if not isinstance(recipe, Recipe):  # `tether control`: small networks on the CPU
        jobs = max(1, min(cores(), trials))
        return Room(jobs, threads_each(jobs), f"{jobs} at once, one for each core")
    return _planned_room(recipe, trials)


def _planned_room(recipe: Recipe, trials: int) -> Room:
    from tether.models.load import resolve_device
    from tether.models.precision import with_precision
    from tether.plan.machine import CUDA_OWN, Machine, device_memory, device_name
    from tether.plan.plan import free_memory, make_plan
    from tether.plan.prompt_lengths import lengths_of
    from tether.plan.workload import shape_of
    from tether.store.find import find_model

    device = resolve_device(recipe.model.device)
    path = find_model(recipe.model.path)
    # The plan's seconds are not used, so the device need not be measured.
    machine = Machine(device.type, device_name(device), device_memory(device), 1.0, 1.0, "not measured")
    plan = make_plan(with_precision(recipe, device), shape_of(path), lengths_of(recipe, path), machine)
    own = CUDA_OWN if device.type == "cuda" else _own_memory()
    each, free = plan.memory.peak + own, int(SHARE * free_memory(device))
    most = cores() if device.type == "cpu" else min(cores(), MAX_ON_GPU)
    jobs = max(1, min(free // max(each, 1), most, trials))
    reason = (
        f"{jobs} at once: each needs {each / 2**30:.2f} GiB of {free / 2**30:.2f} GiB, and there are {cores()} cores"
    )
    return Room(jobs, threads_each(jobs), reason)


def _own_memory() -> int:
    """Bytes of a process that has imported torch, as this one has."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 400 * 2**20
