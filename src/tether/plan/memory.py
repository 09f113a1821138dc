"""The memory of each role, including activations, and the peak over the phases of an iteration.

Activations are counted from the code that creates them. For one token and one layer of width H, with Q features of
queries, K of keys (and as many of values) and I inner ones, the fused pass on a CUDA device (`fused_layer.py`) keeps

    H      input of the first norm
    Q      rotated queries
    2 K    rotated keys, and values
    Q      output of attention
    H      input of the second norm
    2 I    gate and up

plus float32 sums of attention and norms, the inputs of norms over queries and keys, and those of norms after attention
and the MLP, where a model has them; normed states and the gated product are recomputed. Plain torch
(`plain_ops.py`) also keeps both normed states, repeats keys and values for every query head, and keeps the gate's
activation and the product. A model's own modules also keep the float32 intermediates of their norms. In the last layer,
only tokens whose states are read continue after keys and values. With gradient checkpointing only the input of each
layer is kept.

Where layers are small and all batches have one shape, the fused pass runs as CUDA graphs, which keep their activations
and gradients allocated (`cuda_graph.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tether.config.recipes import Recipe, RLRecipe
from tether.learner.adamw import BLOCK, BUCKET, PART
from tether.models.acceleration import FUSED_CHUNK_ELEMENTS as FUSED_CHUNK
from tether.models.acceleration import MAX_WORK
from tether.ops.logprobs import CHUNK_ELEMENTS
from tether.plan.gathered import gathered, summing
from tether.plan.workload import Shape, Work
from tether.store.find import is_start

Backend = Literal["plain", "fused", "modules"]
CHUNK = {"fused": FUSED_CHUNK, "plain": CHUNK_ELEMENTS, "modules": CHUNK_ELEMENTS}  # logits per chunk


@dataclass(frozen=True)
class Pass:
    """One backbone's pass over a micro-batch."""

    tokens: int  # in total
    wanted: int  # tokens whose states are read after the last layer
    layers: int  # layers in the autograd graph
    width: int  # bytes per number
    backend: Backend
    rank: int = 0  # of the adapters; 0 where the weights themselves are trained
    recompute: bool = False
    trains_head: bool = True  # whether the output layer is trained
    captured: bool = False  # runs as CUDA graphs

    def kept(self, shape: Shape) -> int:
        """Bytes kept from the forward pass for the backward pass, without the head's."""
        if not self.layers:
            return 0
        angles = 2 * self.tokens * shape.head_dim * self.width
        if self.recompute:
            return angles + self.tokens * shape.hidden * self.width * self.layers
        return angles + (self.layers - 1) * self.layer(shape) + self.layer(shape, last=True)

    def layer(self, shape: Shape, *, last: bool = False) -> int:
        """Bytes that one layer keeps."""
        each, going_on = self._numbers(shape, last)
        wanted = self.wanted if last else self.tokens
        single = 4 * (wanted * shape.heads + self.tokens + wanted)
        if self.backend == "modules":
            single += 2 * shape.norms * shape.hidden * (self.tokens + wanted)
        return (self.tokens * each + wanted * going_on) * self.width + single

    def _numbers(self, shape: Shape, last: bool) -> tuple[int, int]:
        """(numbers kept per token, numbers kept per token that continues after attention)."""
        inner, queries, hidden = shape.inner, shape.queries, shape.hidden
        thin = 5 * self.rank  # for queries, output, gate, up and down; keys and values add 2 for every token
        if self.backend == "fused":
            raw = (queries, shape.keys) if shape.head_norms else (0, 0)
            each = hidden + 2 * shape.keys + raw[1] + 2 * self.rank
            after = 2 * hidden if shape.norms_after else 0
            return each, 2 * queries + raw[0] + hidden + after + 2 * inner + thin
        keys = 2 * (queries if shape.kv_heads < shape.heads else shape.keys)
        raw = (queries, shape.keys) if shape.head_norms else (0, 0)
        each = 2 * hidden + keys + 2 * queries + raw[1] + 2 * self.rank  # also in the last layer all enter attention
        more = raw[0] + (shape.norms - 2) * hidden
        return each, (2 * queries + hidden if last else 0) + 2 * hidden + more + 4 * inner + thin

    def rerun(self, shape: Shape) -> int:
        """Bytes of the one layer that is recomputed, with gradient checkpointing."""
        return self.layer(shape) if self.recompute else 0

    def passing(self, shape: Shape) -> int:
        """Temporary bytes of the gradients at the widest part of a layer, its MLP."""
        inner = 3 if self.backend == "fused" else 4
        return self.tokens * self.width * (inner * shape.inner + 4 * shape.hidden)

    def forward(self, shape: Shape) -> int:
        """Peak bytes of a pass without gradients."""
        return self.tokens * self.width * (3 * shape.inner + 4 * shape.hidden)

    # -- heads --------------------------------------------------------------------------------------------------------

    def ends(self, shape: Shape) -> int:
        """Bytes kept after the last layer: the norm's input, and its output where it is scattered to all tokens."""
        return 2 * self.wanted * shape.hidden * self.width

    def states(self, shape: Shape) -> int:
        """Bytes kept for the output layer: the states it reads and, where it is frozen, their gradients.

        In the fused pass, logits that fit one chunk are kept for the backward pass.
        """
        waits = self.chunk(shape) if self.trains_head and self.backend == "fused" and self.chunks(shape) == 1 else 0
        return (1 if self.trains_head else 2) * self.wanted * shape.hidden * self.width + waits

    def values(self, shape: Shape) -> int:
        """Bytes kept for a value head, which reads states in float32."""
        return 4 * self.wanted * shape.hidden

    def chunks(self, shape: Shape) -> int:
        """The number of chunks in which logits are computed."""
        return -(-self.wanted // max(1, CHUNK[self.backend] // shape.vocabulary))

    def chunk(self, shape: Shape) -> int:
        """Bytes of one chunk of logits, without gradients."""
        rows = min(self.wanted, max(1, CHUNK[self.backend] // shape.vocabulary))
        return rows * shape.vocabulary * (self.width if self.backend == "fused" else 3 * 4)

    def head(self, shape: Shape) -> int:
        """Bytes of the output layer's backward pass; a trained one's gradient is summed over chunks in float32."""
        states = self.wanted * shape.hidden * self.width
        if not self.trains_head or (self.backend == "fused" and self.chunks(shape) == 1):
            return states
        return self.chunk(shape) + states + shape.vocabulary * shape.hidden * (4 + self.width)


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BASE_BYTES = {"8bit": 1.02, "4bit": 0.56}  # bytes per quantized number, including its share of the scales
REMEMBERED = 2**29  # maximum bytes of states that a shared backbone caches
CUDA_LIBRARIES = 40 * 2**20  # bytes that the matrix libraries allocate through torch
GRAPHS_OWN = 256 * 2**20  # bytes that CUDA graphs use beside their activations: work space of each graph, measured
CLOSING = 8  # float32 copies of a part that exist while its codes are computed
EIGHT_BIT_MEANS = 2 * (1 + 4 / BLOCK)  # bytes of two codes, and their share of a block's scales
MAX_SLOTS = {"cuda": 1024, "mps": 64, "cpu": 64}  # of a sampler with max_num_seqs: auto


@dataclass(frozen=True)
class RoleCost:
    """Bytes of one role."""

    role: str
    what: str  # a description
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # of one micro-batch in the update, or of a pass without gradients
    cache: int = 0  # while sampling

    @property
    def held(self) -> int:
        """Bytes held for the whole run."""
        return self.weights + self.optimizer

    def sharded(self, shards: int) -> RoleCost:
        """What one of `shards` devices holds."""
        parts = {name: -(-getattr(self, name) // shards) for name in ("weights", "gradients", "optimizer")}
        return replace(self, **parts)


@dataclass(frozen=True)
class Memory:
    """The roles, and the peak of each phase, in bytes."""

    roles: tuple[RoleCost, ...]
    phases: dict[str, int]
    micro_rows: int  # rows per forward and backward pass
    micro_batches: int  # per optimizer step

    @property
    def peak(self) -> int:
        """The maximum over all phases."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """When."""
        return max(self.phases, key=lambda name: self.phases[name])


@dataclass(frozen=True)
class Held:
    """The storage formats that the recipe selects."""

    width: int  # bytes of a weight that is not quantized
    base: float  # bytes per number in the matrices of a frozen base
    master_weights: bool  # float32 copies of weights trained in half precision
    eight_bit: bool  # the optimizer's moments
    backend: Backend
    checkpointing: bool
    offload: bool  # the reference is kept in CPU memory between its passes
    device: str

    @classmethod
    def of(cls, recipe: Recipe, shape: Shape, device: str) -> Held:
        """From the recipe, on this kind of device."""
        width = BYTES[recipe.model.dtype]
        half: Backend = "fused" if device == "cuda" and shape.packed else "modules"
        return cls(
            width=width,
            base=BASE_BYTES.get(recipe.model.quantize, float(width)),
            master_weights=width < 4 and recipe.optimizer.master_weights != "none",
            eight_bit=recipe.optimizer.name == "adamw_8bit",
            backend=half if width < 4 else "plain" if shape.packed else "modules",
            checkpointing=recipe.model.gradient_checkpointing,
            offload=recipe.roles.offload_reference and recipe.roles.mode == "separate",
            device=device,
        )

    @property
    def moments(self) -> float:
        """Bytes of both moments of one trained weight."""
        if self.eight_bit:
            return EIGHT_BIT_MEANS
        return 8.0 if self.master_weights else 2.0 * self.width

    def trained(self, count: int) -> dict[str, int]:
        """Gradients and optimizer state of `count` weights."""
        copy = 4 if self.master_weights else 0
        return {"gradients": count * self.width, "optimizer": round(count * (self.moments + copy))}

    def stepping(self, count: int, largest: int) -> int:
        """Temporary bytes while `count` weights are updated: float32 copies of one bucket.

        They are copies of its gradients, of its weights without master weights, and of its 8-bit moments, which are
        decoded one part at a time. A bucket contains whole weights: the largest may form its own bucket.
        """
        if not self.master_weights and not self.eight_bit:
            return 0
        bucket = min(count, max(BUCKET, largest))
        copies = (1 if self.master_weights else 2) if self.width < 4 else 0
        if not self.eight_bit:
            return 4 * bucket * copies
        return 4 * (bucket * (copies + 2) + min(count, PART) * CLOSING)


def memory_of(
    recipe: Recipe, shape: Shape, work: Work, device: str, critic: Shape | None = None, shards: int | None = None,
    copies: int = 1,
) -> Memory:  # fmt: skip
    """The memory of the recipe, by role and phase; `critic` is the critic's shape if it differs from the policy's.

    With `shards`, on each of so many devices that share the weights of every role. There are `copies` of the weights.
    """
    held = Held.of(recipe, shape, device)
    micro_rows = max(1, min(work.minibatch, recipe.optimizer.micro_batch_tokens // max(1, work.longest_row)))
    micro_batches = math.ceil(work.minibatch / micro_rows)
    one = micro_pass(recipe, shape, work, held, micro_rows)
    shared = shards is not None and shards > 1
    one = replace(one, captured=one.captured and not shared)  # gathered weights lie elsewhere in each pass
    own = critic or shape
    other = replace(one, layers=own.layers) if critic else one  # the critic's pass
    roles = _roles(recipe, shape, work, held, one)
    if critic is not None:
        roles = tuple(_critic_of(critic, held, other) if role.role == "critic" else role for role in roles)
    if shards is not None:
        roles = tuple(role.sharded(shards) for role in roles)
    kept = {role.role: other.kept(own) if role.role == "critic" else one.kept(shape) for role in roles}
    always = sum(role.held for role in roles) + (CUDA_LIBRARIES if device == "cuda" else 0)
    graphs = sum(role.gradients + kept[role.role] for role in roles if role.activations) if one.captured else 0
    always += GRAPHS_OWN if one.captured else 0
    phases: dict[str, int] = {}
    if isinstance(recipe, RLRecipe):
        room = _work_space(recipe, shape, work, held)
        phases["rollout"] = always + graphs + sum(role.cache for role in roles)
        always += room + _remembered(recipe, shape, work, held)
    streamed = (work.other_reference or shape).parameters * held.width if held.offload and work.reference else 0
    passing = max(one.forward(shape), other.forward(own), one.chunk(shape) if work.policy else 0)
    phases["evaluation"] = always + graphs + streamed + passing
    passing = max(one.passing(shape) + one.rerun(shape), other.passing(own) + other.rerun(own))
    stays = sum(kept[role.role] for role in roles if role.activations) if one.captured else 0  # also between passes
    largest = max(shape.embedding, own.embedding)
    several = micro_batches > 1 or one.captured
    phases["update"] = always + _update(shape, work, held, one, roles, (passing, stays, largest), several=several)
    if shared and shards is not None:
        for phase, size in gathered(recipe, shape, own, work, held.width, shards, copies).items():
            phases |= {phase: phases[phase] + size} if phase in phases else {}
    elif copies > 1:
        gradients = sum(role.gradients for role in roles)
        phases["update"] = max(phases["update"], always + gradients + summing(recipe, gradients, held.width, copies))
    return Memory(roles, phases, micro_rows, micro_batches)


def micro_pass(recipe: Recipe, shape: Shape, work: Work, held: Held, micro_rows: int) -> Pass:
    """A backbone's pass over one micro-batch."""
    mode = recipe.roles.mode
    tokens = min(round(micro_rows * work.row_tokens), micro_rows * work.longest_row)
    weights = 2 * shape.hidden * (2 * shape.queries + 2 * shape.inner)
    alike = work.row_tokens == work.longest_row  # rows of equal length make micro-batches of one shape
    return Pass(
        tokens=tokens,
        wanted=micro_rows * min(work.answer_tokens + 1, work.longest_row),
        layers=min(recipe.roles.trainable_layers, shape.layers) if mode == "shared_backbone" else shape.layers,
        width=held.width,
        backend=held.backend,
        rank=recipe.roles.lora_rank if mode == "lora" else 0,
        recompute=held.checkpointing,
        trains_head=mode == "separate",
        captured=held.backend == "fused" and alike and not held.checkpointing and tokens * weights <= MAX_WORK,
    )


def _update(
    shape: Shape,
    work: Work,
    held: Held,
    one: Pass,
    roles: Sequence[RoleCost],
    of_all: tuple[int, int, int],
    *,
    several: bool,
) -> int:
    """The peak beyond weights and optimizer: activations, gradients, and temporary memory.

    `of_all` has, over all roles: the maximum temporary memory, the memory that CUDA graphs keep, and the size of the
    largest weight. The critic's pass is last, so its backward pass is first, while the policy's head is still held. The
    first micro-batch of a step allocates gradients in place of activations; from the second on all gradients exist.
    """
    passing, stays, largest = of_all
    trained = [role for role in roles if role.gradients]
    gradients = sum(role.gradients for role in trained)
    kept = sum(role.activations for role in trained)
    critic = next((role for role in trained if role.role == "critic"), None)
    own = kept - (critic.activations if critic is not None else 0)
    before = gradients if several else 0
    moments = [before + kept + passing]
    if work.policy:
        made = before or (critic.gradients if critic is not None else 0)
        moments.append(made + own + one.head(shape))
        # With tied embeddings, the output layer's gradient is held until the embedding's own gradient.
        waits = shape.embedding * one.width if one.trains_head and not shape.output and one.chunks(shape) > 1 else 0
        moments.append(made + own + waits + passing)
        moments.append(gradients + (waits if one.backend == "fused" else 2 * waits))  # the fused pass makes no copy
    count = max((role.gradients // held.width for role in trained), default=0)
    moments.append(gradients + stays + held.stepping(count, largest if one.trains_head else 0))
    return max(moments)


def _roles(recipe: Recipe, shape: Shape, work: Work, held: Held, one: Pass) -> tuple[RoleCost, ...]:
    roles = {"separate": _separate, "lora": _adapters, "shared_backbone": _tops}[recipe.roles.mode]
    found = roles(recipe, shape, work, held, one)
    if not isinstance(recipe, RLRecipe):
        return tuple(found)
    shared = {"separate": None, "lora": "adapters and a head", "shared_backbone": "its top layers"}[recipe.roles.mode]
    for part in recipe.reward.parts:
        if part.kind == "model":
            found.append(_reward(part, shape, shared, found))
    cache = _cache(recipe, shape, work, held) + _work_space(recipe, shape, work, held)
    return tuple(replace(role, cache=cache) if role.role == "policy" else role for role in found)


def _separate(_: Recipe, shape: Shape, work: Work, held: Held, one: Pass) -> list[RoleCost]:
    """Every role is a separate model."""
    found: list[RoleCost] = []
    policy, critic = _kept(shape, work, one)
    if work.policy:
        count = shape.parameters
        found.append(
            RoleCost("policy", "a model, trained", count * held.width, **held.trained(count), activations=policy)
        )
    if work.critic == "separate":
        name = "critic" if work.policy else "reward model"
        count, head = shape.backbone, 4 * 4 * (shape.hidden + 1)
        cost = held.trained(count)
        found.append(RoleCost(name, "a model, trained", count * held.width + head, **cost, activations=critic))
    elif work.critic == "head":
        found.append(_value_head(shape))
    if work.reference:
        where = 0 if held.offload else (work.other_reference or shape).parameters * held.width
        words = "a frozen copy" if work.other_reference is None else "another model, frozen"
        words += ", in CPU memory between its passes" if held.offload else ""
        found.append(RoleCost("reference", words, where))
    return found


def _critic_of(shape: Shape, held: Held, one: Pass) -> RoleCost:
    """A separate critic with its own shape."""
    count, head = shape.backbone, 4 * 4 * (shape.hidden + 1)
    kept = one.kept(shape) + one.ends(shape) + one.values(shape)
    words = f"a model of its own size ({count / 1e6:,.0f}M), trained"
    return RoleCost("critic", words, count * held.width + head, **held.trained(count), activations=kept)


def _adapters(recipe: Recipe, shape: Shape, work: Work, held: Held, one: Pass) -> list[RoleCost]:
    """One frozen base with LoRA adapters for every trained role."""
    matrices = shape.products
    base = round(matrices * held.base) + (shape.parameters - matrices) * held.width
    count = shape.adapters(recipe.roles.lora_rank, recipe.roles.lora_targets)
    words = f"adapters of rank {recipe.roles.lora_rank}"
    found = [RoleCost("base", "one frozen model under all roles", base)]
    found += _learning(shape, work, held, one, count, words)
    if work.reference and (other := work.other_reference) is not None:
        found.append(RoleCost("reference", "another model, frozen", other.parameters * held.width))
    elif work.reference:
        adapted = isinstance(recipe, RLRecipe) and not is_start(recipe)
        found.append(RoleCost("reference", "adapters on the base" if adapted else "the base itself"))
    return found


def _learning(shape: Shape, work: Work, held: Held, one: Pass, count: int, words: str) -> list[RoleCost]:
    """The trained roles on a shared base: each has `count` weights of its own."""
    found: list[RoleCost] = []
    own = {"weights": count * held.width, **held.trained(count)}
    policy, critic = _kept(shape, work, one)
    if work.policy:
        found.append(RoleCost("policy", words, **own, activations=policy))
    if work.critic == "separate":
        name = "critic" if work.policy else "reward model"
        found.append(RoleCost(name, f"{words} and a head", **own, activations=critic))
    elif work.critic == "head":
        found.append(_value_head(shape))
    return found


def _tops(recipe: Recipe, shape: Shape, work: Work, held: Held, one: Pass) -> list[RoleCost]:
    """One frozen backbone; every role owns the layers above it."""
    top = min(recipe.roles.trainable_layers, shape.layers)
    count = top * shape.layer + shape.norm
    words = f"{top} layers of its own"
    found = [RoleCost("base", "one frozen backbone under all roles", (shape.parameters - count) * held.width)]
    found += _learning(shape, work, held, one, count, words)
    # The initial top layers are kept even without a reference, because other roles start from them.
    found.append(RoleCost("reference", f"the {top} layers as they were loaded", count * held.width))
    if work.other_reference is not None:
        found.append(RoleCost("reference", f"{top} layers of another model", count * held.width))
    return found


def _kept(shape: Shape, work: Work, one: Pass) -> tuple[int, int]:
    """(the policy's activations, a separate critic's), each including its head."""
    backbone = one.kept(shape) + one.ends(shape)
    policy = backbone + one.states(shape) + (one.values(shape) if work.critic == "head" else 0)
    return policy, backbone + one.values(shape)


def _value_head(shape: Shape) -> RoleCost:
    one = 4 * (shape.hidden + 1)
    return RoleCost("critic", "a head on the policy's backbone", one, one, 2 * one)


def _reward(part: Any, shape: Shape, shared: str | None, found: list[RoleCost]) -> RoleCost:
    if part.shared and shared is not None:
        like = next(role for role in found if role.role == "policy")
        return RoleCost("reward", shared, like.weights)
    return RoleCost("reward", "a model, frozen", shape.backbone * BYTES[part.dtype])


def _cache(recipe: RLRecipe, shape: Shape, work: Work, held: Held) -> int:
    """Keys and values of every slot."""
    unit = 128 if held.device == "cuda" else 1
    room = -(-work.longest_row // unit) * unit
    return 2 * shape.layers * slots_of(recipe, work, held.device) * shape.keys * room * held.width


def _work_space(recipe: RLRecipe, shape: Shape, work: Work, held: Held) -> int:
    """The sampler's buffers beside its cache, which stay allocated: logits and states of a step, pending draws."""
    slots = slots_of(recipe, work, held.device)
    step = (shape.vocabulary + shape.inner + 2 * shape.hidden + 2 * shape.queries) * held.width
    parts = 4 * shape.hidden * max(8 * min(slots, 256), slots)
    return slots * (step + 24 * work.answer_tokens) + parts


def _remembered(recipe: RLRecipe, shape: Shape, work: Work, held: Held) -> int:
    """The states that a shared backbone caches for the rows it has seen."""
    if recipe.roles.mode != "shared_backbone":
        return 0
    return min(REMEMBERED, round(work.rows * work.row_tokens) * shape.hidden * held.width)


def slots_of(recipe: RLRecipe, work: Work, device: str) -> int:
    """The number of answers sampled at once; a size that depends on free memory is assumed to fit."""
    most = recipe.rollout.max_num_seqs
    return min(most if isinstance(most, int) else MAX_SLOTS[device], work.rows)
