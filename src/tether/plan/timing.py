"""The time of each phase of an iteration on one device.

The time is the number of operations and bytes divided by the rates of the device (`machine.py`) and by the fractions of
them that are achieved (`Pace`). A backbone's pass over one token costs 2 operations per number in its matrices, plus
4 Q per previous token for attention. The backward pass costs the same for the states, and again for trained weights.
The output layer costs 2 V H per wanted token, and four times that in training, because the backward pass recomputes the
logits. Adapters move the inputs and outputs of the layers that they belong to once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tether.config.recipes import Recipe, RLRecipe
from tether.plan.machine import Machine
from tether.plan.memory import Held, Memory, slots_of
from tether.plan.workload import Shape, Work


@dataclass(frozen=True)
class Pace:
    """The achieved fractions of a device's rates, and the minimum cost of a step."""

    share: float  # fraction of the product rate, in passes over many tokens
    layer: float  # minimum seconds of one layer's forward pass
    weights_share: float  # fraction of the bandwidth at which a decode step reads weights
    cache_share: float  # the same for keys and values, and for what adapters move
    step_share: float  # fraction of the product rate in a decode step
    step_layer: float  # minimum seconds of one layer's decode step
    step_adapter: float  # seconds that one adapted matrix adds to a decode step
    general_layer: float  # minimum seconds of one layer's decode step in the transformers engine
    call: float  # seconds of one call of the sampler beside its steps
    reading_share: float  # fraction of the product rate while prompts are read
    reading_layer: float  # minimum seconds of one layer in a pass over prompts


@dataclass(frozen=True)
class Decoder:
    """What a decode step reads and multiplies, in bytes and operations."""

    weights: float  # bytes of all weights
    cached: float  # bytes of keys and values of one token
    operations: float  # of one sequence, without attention
    layers: int
    overhead: float  # minimum seconds of a step

    @classmethod
    def of(cls, shape: Shape, width: int, pace: Pace, *, adapted: int = 0, general: bool = False) -> Decoder:
        """A decoder of this shape; `adapted` matrices of each layer have adapters."""
        numbers = shape.products + shape.vocabulary * shape.hidden
        floor = pace.general_layer if general else pace.step_layer
        overhead = shape.layers * (floor + adapted * pace.step_adapter)
        return cls(numbers * width, 2 * shape.layers * shape.keys * width, 2.0 * numbers, shape.layers, overhead)

    def step(self, machine: Machine, pace: Pace, slots: float, context: float, tensor: int = 1) -> float:
        """Seconds of one token for each of `slots` sequences with `context` tokens in all, on `tensor` devices."""
        reads = self.weights / (pace.weights_share * machine.bandwidth)
        multiplies = slots * self.operations / (pace.step_share * machine.rate)
        attends = context * self.cached / (pace.cache_share * machine.bandwidth)
        return (max(reads, multiplies) + attends) / tensor + self.overhead


READ_TOKENS = 16_384  # tokens of prompts that the sampler reads in one pass


def reading_seconds(shape: Shape, tokens: float, prompt: float, machine: Machine, pace: Pace, tensor: int = 1) -> float:
    """Seconds to read `tokens` tokens of prompts that have `prompt` tokens each."""
    operations = tokens * (2.0 * shape.products + 2.0 * shape.layers * shape.queries * prompt)
    floor = math.ceil(tokens / READ_TOKENS) * shape.layers * pace.reading_layer
    return operations / (pace.reading_share * machine.rate) / tensor + floor


PACES = {
    "cuda": Pace(0.5, 0.2e-3, 0.6, 0.6, 0.5, 20e-6, 5e-6, 0.5e-3, 0.0, 0.5, 0.2e-3),
    "mps": Pace(0.4, 0.3e-3, 0.5, 0.5, 0.4, 0.5e-3, 0.0, 0.5e-3, 0.0, 0.4, 0.3e-3),
    "cpu": Pace(0.6, 0.15e-3, 0.5, 0.5, 0.6, 0.15e-3, 0.0, 0.4e-3, 0.0, 0.6, 0.15e-3),
}


@dataclass(frozen=True)
class RowSums:
    """RowSums that a device passes through a model, in sums over them."""

    tokens: float
    squares: float  # of the lengths, for attention
    answers: float  # tokens whose log-probs are wanted
    passes: float  # micro-batches

    @classmethod
    def alike(cls, count: float, length: float, answer: float, passes: float) -> RowSums:
        """RowSums of one length."""
        return cls(count * length, count * length**2, count * answer, passes)


@dataclass(frozen=True)
class PassCosts:
    """What the trainer computes for its rows in one iteration."""

    shape: Shape
    policy: bool
    critic: float  # cost of a separate critic's pass relative to the policy's; 0 without one
    reference: bool
    rewards: int
    epochs: int
    critic_alone: int = 0  # additional epochs of the critic alone
    part: float = 1.0  # fraction of the layers that the roles own
    times: int = 3  # passes that an update costs: forward, backward for the states, for the weights, recomputed
    heads: int = 4  # products with the output layer in an update
    adapted: int = 0  # features that go into and out of the adapted matrices of one token
    width: int = 2

    @classmethod
    def of(cls, recipe: Recipe, shape: Shape, work: Work, held: Held, critic: Shape | None = None) -> PassCosts:
        """From the recipe; `critic` is the critic's shape if it is not the policy's."""
        mode = recipe.roles.mode
        like_policy = 1.0 if critic is None else _pass_of(critic, work) / _pass_of(shape, work)
        layers = min(recipe.roles.trainable_layers, shape.layers) if mode == "shared_backbone" else shape.layers
        return cls(
            shape,
            work.policy,
            like_policy if work.critic == "separate" else 0.0,
            work.reference,
            work.rewards,
            work.epochs,
            work.critic_alone,
            layers / shape.layers,
            (2 if mode == "lora" else 3) + int(held.checkpointing),
            4 if mode == "separate" else 2,
            shape.adapters(1, recipe.roles.lora_targets) if mode == "lora" else 0,
            held.width,
        )

    def forward(self, rows: RowSums, machine: Machine, pace: Pace, *, plain: bool = False) -> float:
        """Seconds of one backbone's forward pass; `plain` without adapters."""
        layers = self.part * self.shape.layers
        operations = rows.tokens * 2.0 * self.part * self.shape.products
        operations += 2.0 * layers * self.shape.queries * rows.squares
        moved = 0.0 if plain else rows.tokens * self.adapted * self.width
        seconds = operations / (pace.share * machine.rate) + moved / (pace.cache_share * machine.bandwidth)
        return seconds + rows.passes * layers * pace.layer

    def scores(self, rows: RowSums, machine: Machine, pace: Pace) -> float:
        """Seconds of the reward models."""
        return self.rewards * self.forward(rows, machine, pace)

    def evaluation(self, rows: RowSums, machine: Machine, pace: Pace) -> float:
        """Seconds of the old log-probs, the values and the reference."""
        fast = pace.share * machine.rate
        seconds = (int(self.policy) + self.critic) * self.forward(rows, machine, pace)
        seconds += int(self.reference) * self.forward(rows, machine, pace, plain=True)
        seconds += (int(self.policy) + int(self.reference)) * self._head(rows) / fast
        return seconds + (1.0 - self.part) * 2.0 * self.shape.products * rows.tokens / fast  # the shared layers, once

    def update(self, rows: RowSums, machine: Machine, pace: Pace) -> float:
        """Seconds of all forward and backward passes of the update."""
        one = self.times * self.forward(rows, machine, pace)
        seconds = self.epochs * (int(self.policy) + self.critic) * one + self.critic_alone * self.critic * one
        return seconds + self.epochs * int(self.policy) * self.heads * self._head(rows) / (pace.share * machine.rate)

    def _head(self, rows: RowSums) -> float:
        return 2.0 * self.shape.vocabulary * self.shape.hidden * rows.answers


def seconds_of(
    recipe: Recipe,
    shape: Shape,
    work: Work,
    memory: Memory,
    machine: Machine,
    critic: Shape | None = None,
    pace: Pace | None = None,
) -> dict[str, float]:
    """Predicted seconds of each phase of an iteration; `critic` is the critic's shape if it is not the policy's."""
    pace, held = pace or PACES[machine.kind], Held.of(recipe, shape, machine.kind)
    passes = PassCosts.of(recipe, shape, work, held, critic)
    rows = RowSums.alike(work.rows, work.row_tokens, work.answer_tokens, work.rows / max(1, memory.micro_rows))
    found: dict[str, float] = {}
    if isinstance(recipe, RLRecipe):
        found["rollout"] = _rollout(recipe, shape, work, machine, held, pace)
        if work.rewards:
            found["scores"] = passes.scores(rows, machine, pace)
        found["evaluation"] = passes.evaluation(rows, machine, pace)
    found["update"] = passes.update(rows, machine, pace) + stepping_seconds(work, memory, held, machine)
    return found


def stepping_seconds(work: Work, memory: Memory, held: Held, machine: Machine) -> float:
    """Seconds of the optimizer's own steps."""
    trained = sum(role.gradients for role in memory.roles) / held.width
    return work.steps * trained * (2 * held.width + 2 * held.moments + 8) / machine.bandwidth


def _pass_of(shape: Shape, work: Work) -> float:
    """Operations of a whole backbone's pass over one token of a row."""
    return 2.0 * shape.products + 2.0 * shape.layers * shape.queries * work.row_tokens


def adapted_matrices(recipe: Recipe, shape: Shape) -> int:
    """How many matrices of a layer have adapters."""
    if recipe.roles.mode != "lora":
        return 0
    targets = recipe.roles.lora_targets
    named = None if targets == "all-linear" else {name.strip() for name in targets.split(",")}
    return sum(named is None or name in named for name, _, _ in shape.linears)


def _rollout(recipe: RLRecipe, shape: Shape, work: Work, machine: Machine, held: Held, pace: Pace) -> float:
    """Prompts are read, then all slots take one step after another; each step reads all weights and caches."""
    slots = slots_of(recipe, work, machine.kind)
    reading = reading_seconds(shape, work.prompts * work.prompt_tokens, work.prompt_tokens, machine, pace)
    general = recipe.rollout.engine == "transformers" or not shape.packed
    decoder = Decoder.of(shape, held.width, pace, adapted=adapted_matrices(recipe, shape), general=general)
    step = decoder.step(machine, pace, slots, slots * (work.prompt_tokens + work.answer_tokens / 2))
    return pace.call + reading + -(-work.rows // slots) * work.answer_tokens * step
