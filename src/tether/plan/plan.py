"""A plan: what a recipe will cost on a machine, as one value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tether.config.recipes import Recipe
from tether.plan.machine import Machine
from tether.plan.memory import Memory, memory_of
from tether.plan.model_shape import Shape, critic_shape_of
from tether.plan.seconds import seconds_of
from tether.plan.workload import Lengths, Work, work_of

GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """Everything the table says."""

    method: str
    model: str
    dtype: str  # of the policy's weights
    shape: Shape
    lengths: Lengths
    work: Work
    memory: Memory
    seconds: dict[str, float]  # of each phase
    machine: Machine

    @property
    def fits(self) -> bool:
        """Whether the most that is held at once fits into the device."""
        return self.memory.peak <= self.machine.usable

    @property
    def seconds_in_all(self) -> float:
        """Of one iteration."""
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


def make_plan(recipe: Recipe, shape: Shape, lengths: Lengths, machine: Machine) -> Plan:
    """What the recipe will cost there. Its precisions are said aloud: see tether.models.precision.with_precision."""
    work, critic = work_of(recipe, lengths), critic_shape_of(recipe)
    memory = memory_of(recipe, shape, work, machine.kind, critic)
    seconds = seconds_of(recipe, shape, work, memory, machine, critic)
    named = (recipe.method, recipe.model.path, recipe.model.dtype)
    return Plan(*named, shape, lengths, work, memory, seconds, machine)
