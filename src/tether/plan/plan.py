"""A plan: what a recipe costs on a machine, whether it fits, and what to change if it does not.

`make_plan` predicts; `advice` tries settings one after another on the plan itself. `weights_fit` and `whole_fits` check
the free memory before a run's first step: the run starts, is split into smaller passes, or is refused. The plan is
accurate to about 10 % (docs/plan.md). A run is refused only if even 90 % of the prediction does not fit, so a run that
fits is never refused; if the prediction itself does not fit, a warning is printed and the run starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tether.algorithms.algorithm import Algorithm
from tether.config.load import change_settings
from tether.config.recipes import Recipe, RLRecipe
from tether.plan.machine import CUDA_OWN, Machine, device_memory
from tether.plan.memory import Memory, memory_of, slots_of
from tether.plan.timing import seconds_of
from tether.plan.workload import Lengths, Shape, Work, critic_shape_of, work_of
from tether.processes import ranks_of_machine

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """All values of the table."""

    method: str
    model: str
    dtype: str  # of the policy's weights
    shape: Shape
    lengths: Lengths
    work: Work
    memory: Memory
    seconds: dict[str, float]  # of each phase
    machine: Machine
    algorithm: Algorithm | None = None  # the run's own; None: the one that the recipe's method builds
    ranks: int = 1  # that train together; the memory is that of one

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the device."""
        return self.memory.peak <= self.machine.usable

    @property
    def seconds_in_all(self) -> float:
        """Seconds of one iteration."""
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        """Plain data, sizes in bytes."""
        return {
            "method": self.method,
            "model": {"path": self.model, "parameters": self.shape.parameters, "dtype": self.dtype},
            "device": asdict(self.machine),
            "fits": self.fits,
            "roles": [asdict(role) for role in self.memory.roles],
            "peak_bytes": self.memory.peak,
            "peak_phase": self.memory.peak_phase,
            "phase_bytes": self.memory.phases,
            "micro_rows": self.memory.micro_rows,
            "micro_batches": self.memory.micro_batches,
            "optimizer_steps": self.work.steps,
            "optimizer_steps_why": self.work.why,
            "tokens": {
                "learned_from": self.work.tokens,
                "sampled": self.work.sampled,
                "prompt_mean": self.lengths.mean,
                "prompt_longest": self.lengths.longest,
                "known_from": self.lengths.source,
            },
            "seconds": {**self.seconds, "iteration": self.seconds_in_all},
        }


def make_plan(
    recipe: Recipe,
    shape: Shape,
    lengths: Lengths,
    machine: Machine,
    algorithm: Algorithm | None = None,
    ranks: int = 1,
) -> Plan:
    """What the recipe will cost there. Its precisions are explicit: see tether.models.precision.with_precision.

    `algorithm` is the one that a run trains with; by default the one that the recipe's method builds. The memory is
    that of one of `ranks` ranks; seconds are those of one process.
    """
    work, critic = work_of(recipe, lengths, algorithm), critic_shape_of(recipe)
    several = ranks > 1 and recipe.distributed.shard != "none"
    shards = recipe.distributed.sharing(ranks, ranks_of_machine(ranks)) if several else None
    memory = memory_of(recipe, shape, work, machine.kind, critic, shards, ranks // (shards or 1))
    seconds = seconds_of(recipe, shape, work, memory, machine, critic)
    named = (recipe.method, recipe.model.path, recipe.model.dtype)
    return Plan(*named, shape, lengths, work, memory, seconds, machine, algorithm, ranks)


SMALLEST_MICRO = 256  # tokens: smaller passes leave a device idle


@dataclass(frozen=True)
class Change:
    """One setting, its new value, and what it saves alone."""

    key: str
    value: str
    saves: int  # bytes off the peak, with this change alone
    peak: int  # the resulting peak, in bytes
    fits: bool
    note: str


def advice(recipe: Recipe, plan: Plan) -> tuple[list[Change], list[Change]]:
    """`(each change alone, the fewest found that fit together)`; the cheapest changes come first."""
    alone = [change for candidate in candidates(recipe, plan) if (change := _try(recipe, plan, [candidate])).saves > 0]
    enough = next(([change] for change in alone if change.fits), None)
    return alone, enough if enough is not None else _together(recipe, plan, alone)


def _together(recipe: Recipe, plan: Plan, alone: list[Change]) -> list[Change]:
    """Add changes until the plan fits, then drop those that are not needed."""

    def fits(changes: Iterable[Change]) -> bool:
        return _try(recipe, plan, [(each.key, each.value, each.note) for each in changes]).fits

    taken: dict[str, Change] = {}
    for change in alone:
        taken[change.key] = change  # the last and strongest value of a key is used
        if fits(taken.values()):
            break
    else:
        return []
    for key in list(taken):
        others = [change for change in taken.values() if change.key != key]
        if others and fits(others):
            del taken[key]
    return list(taken.values())


def candidates(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(key, value, note): from changes that only cost time to changes of what is trained."""
    tokens = recipe.optimizer.micro_batch_tokens
    longest = plan.work.longest_row
    for smaller in (tokens // 2, tokens // 4, tokens // 8, tokens // 16):
        if smaller >= max(SMALLEST_MICRO, longest):
            yield "optimizer.micro_batch_tokens", str(smaller), "the same gradient in more, smaller passes"
    if not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", "true", "layers run twice: a third more time in the update"
    if isinstance(recipe, RLRecipe):
        slots = slots_of(recipe, plan.work, plan.machine.kind)
        yield "rollout.max_num_seqs", str(max(1, slots // 2)), "fewer answers sampled at once"
    if recipe.model.dtype == "float32" and plan.machine.kind == "cuda":
        yield "model.dtype", "bfloat16", "half the bytes of every weight"
    if plan.ranks > 1 and recipe.distributed.shard == "none" and recipe.roles.mode != "shared_backbone":
        yield "distributed.shard", "full", "each rank holds its share; weights are gathered around each pass"
    if recipe.roles.mode == "separate" and plan.work.reference and not recipe.roles.offload_reference:
        yield "roles.offload_reference", "true", "the reference stays in CPU memory between its passes"
    if recipe.optimizer.name == "adamw":
        yield "optimizer.name", "adamw_8bit", "the optimizer's moments in 8 bits"
    if plan.work.critic == "separate" and plan.work.policy and recipe.method != "trpo":
        yield "roles.critic", "head", "the critic is a head on the policy's backbone"
    if recipe.roles.mode == "separate":
        yield "roles.mode", "lora", "train adapters on one frozen base instead of whole models"
    elif recipe.model.quantize == "none" and recipe.roles.mode == "lora" and plan.machine.kind == "cuda":
        yield "model.quantize", "8bit", "the frozen base in 8 bits"
        yield "model.quantize", "4bit", "the frozen base in 4 bits"


def _try(recipe: Recipe, plan: Plan, changes: list[tuple[str, str, str]]) -> Change:
    """The plan with some changes, named after the last of them."""
    flags = [word for key, value, _ in changes for word in (f"--{key}", value)]
    other = change_settings(recipe, flags)
    changed = make_plan(other, plan.shape, plan.lengths, plan.machine, plan.algorithm, plan.ranks)
    key, value, note = changes[-1]
    return Change(key, value, plan.memory.peak - changed.memory.peak, changed.memory.peak, changed.fits, note)


PLAN_ERROR = 0.1  # relative error of the plan
CPU_ERROR = 0.25  # on a CPU, where the allocator and the libraries add more uncertainty


@dataclass(frozen=True)
class Judgement:
    """The result of a memory check, with a sentence for the user where needed."""

    verdict: Literal["fits", "tight", "split", "refused"]
    sentence: str = ""
    micro_batch_tokens: int | None = None  # a size of passes that fits, where they must be smaller


def free_memory(device: torch.device) -> int:
    """Bytes that this process can use: what is free, plus what it already holds for this run's models."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    held = _status("/proc/self/status", "VmRSS")
    available = _status("/proc/meminfo", "MemAvailable")
    if available is None:  # not Linux
        return device_memory(device)
    return min(available + (held or 0), _left_in_group(held or 0), device_memory(device))


def _left_in_group(held: int) -> int:
    """What a container's limit leaves, without cached files; unbounded if there is no limit."""
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


def weights_fit(recipe: Recipe, shape: Shape, machine: Machine, free: int, ranks: int = 1) -> Judgement:
    """Whether weights, gradients and optimizer fit, before any of them is allocated; needs no data."""
    roles = make_plan(recipe, shape, Lengths.assumed(1, "not read yet"), machine, ranks=ranks).memory.roles
    needed = sum(role.held + role.gradients for role in roles)
    if needed * (1.0 - _error(machine)) <= free:
        return Judgement("fits")
    plan = make_plan(recipe, shape, Lengths.assumed(1, "not read yet"), _with_memory(machine, free), ranks=ranks)
    what = f"the weights, gradients and optimizer of this run take {_size(needed)}"
    return Judgement("refused", _refusal(recipe, plan, what, free))


def whole_fits(recipe: Recipe, plan: Plan, free: int) -> Judgement:
    """Whether the peak fits; if smaller passes would fit, their size."""
    machine = _with_memory(plan.machine, free)
    needed, error = _needed(recipe, plan), _error(machine)
    if needed <= free:
        return Judgement("fits")
    about = f"the peak is about {_size(needed)} and {_size(free)} of {machine.name} are free"
    if needed * (1.0 - error) <= free:
        return Judgement("tight", f"It may not fit: {about}, and the plan is accurate to about {error:.0%}.")
    tokens = recipe.optimizer.micro_batch_tokens
    while (tokens := tokens // 2) >= max(SMALLEST_MICRO, plan.work.longest_row):
        smaller = change_settings(recipe, ["--optimizer.micro_batch_tokens", str(tokens)])
        if _needed(smaller, make_plan(smaller, plan.shape, plan.lengths, machine, plan.algorithm, plan.ranks)) <= free:
            return Judgement(
                "split",
                f"Passes of {recipe.optimizer.micro_batch_tokens} tokens do not fit ({about}): each batch is split "
                f"into passes of {tokens} (optimizer.micro_batch_tokens), which changes time and memory, never the "
                "gradient.",
                tokens,
            )
    tightened = make_plan(recipe, plan.shape, plan.lengths, machine, plan.algorithm, plan.ranks)
    return Judgement("refused", _refusal(recipe, tightened, f"the peak is about {_size(needed)}", free))


def _needed(recipe: Recipe, plan: Plan) -> int:
    """The plan's peak. On a GPU, a sampler with max_num_seqs: auto never uses more than the free memory."""
    phases = dict(plan.memory.phases)
    if isinstance(recipe, RLRecipe) and recipe.rollout.max_num_seqs == "auto" and plan.machine.kind == "cuda":
        phases["rollout"] -= sum(role.cache for role in plan.memory.roles)
    return max(phases.values())


def _refusal(recipe: Recipe, plan: Plan, what: str, free: int) -> str:
    _, together = advice(recipe, plan)
    flags = " ".join(f"--{change.key} {change.value}" for change in together)
    repair = f"it would fit with {flags}" if flags else "use a smaller model, or a device with more memory"
    return (
        f"this run does not fit: {what}, and {_size(free)} of {plan.machine.name} are free (the plan is accurate to "
        f"about {_error(plan.machine):.0%}); {repair}, or start it anyway with --run.memory_check warn"
    )


def _with_memory(machine: Machine, free: int) -> Machine:
    return replace(machine, memory=free + (CUDA_OWN if machine.kind == "cuda" else 0))


def _error(machine: Machine) -> float:
    return CPU_ERROR if machine.kind == "cpu" else PLAN_ERROR


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.0f} MiB"


def weights_on_disk(path: str) -> int:
    """Bytes of a folder's weights; 0 where it is not the folder of a saved model."""
    folder = Path(path).expanduser()
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return 0
