"""How long an iteration will take: counted operations and bytes, over the device's rates.

A pass of a backbone over one token costs 2 operations for each number of its matrices, and 4 Q a token before it for
attention. The backward pass costs as much for the states and once more for trained weights. The output layer costs
2 V H for each wanted token, and in training as much four times: the backward makes the logits anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from tether.config.recipes import Recipe, RLRecipe
from tether.plan.machine import Machine
from tether.plan.memory import Held, Memory, slots_of
from tether.plan.model_shape import Shape
from tether.plan.workload import Work


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
