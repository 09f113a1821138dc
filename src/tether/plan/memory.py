"""What each role costs in memory, activations included, and when the most is held at once.

What a forward pass leaves behind for its backward pass, counted from the code that makes it.

For one token and one layer of width H, with Q features of queries, K of keys (and as many of values) and I inner ones,
the fused pass on a CUDA device (`layer_fused.py`) keeps

    H      what enters the first norm
    Q      queries, turned
    2 K    keys and values, the keys turned
    Q      what attention mixed
    H      what enters the second norm
    2 I    gate and up

and float32 sums of attention and norms; normed states and the gated product are made again. In plain torch
(`plain_ops.py`) both normed states are kept as well, keys and values are repeated for every query head, and the gate's
activation and the product are kept too. A model's own modules also keep what their norms do in float32. In the last
layer only tokens whose states are read go on after keys and values. Of layers that are run again in the backward pass
only what enters them is kept.

Where layers are small and all batches have one shape, the fused pass is held as CUDA graphs, and what it keeps stays
where it is from then on, with the gradients (`cuda_graphs.py`).

What each role costs in memory, and when the most is held at once.
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
from tether.plan.workload import Shape, Work

Backend = Literal["plain", "fused", "modules"]
CHUNK = {"fused": FUSED_CHUNK, "plain": CHUNK_ELEMENTS, "modules": CHUNK_ELEMENTS}  # logits at a time


@dataclass(frozen=True)
class Pass:
    """One backbone's pass over a micro-batch."""

    tokens: int  # in all
    wanted: int  # whose states are read after the last layer
    layers: int  # that autograd sees
    width: int  # bytes of a number
    backend: Backend
    rank: int = 0  # of the adapters; 0 where weights themselves are trained
    recompute: bool = False
    trains_head: bool = True  # whether the output layer is trained
    captured: bool = False  # held as CUDA graphs

    def kept(self, shape: Shape) -> int:
        """Bytes held from the forward pass until the backward pass comes by, the head's not counted."""
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
            single += 4 * shape.hidden * (self.tokens + wanted)
        return (self.tokens * each + wanted * going_on) * self.width + single

    def _numbers(self, shape: Shape, last: bool) -> tuple[int, int]:
        """(numbers kept of every token, numbers kept of each that goes on after attention)."""
        inner, queries, hidden = shape.inner, shape.queries, shape.hidden
        thin = 5 * self.rank  # of queries, output, gate, up and down; of keys and values 2 more for every token
        if self.backend == "fused":
            raw = (queries, shape.keys) if shape.head_norms else (0, 0)
            each = hidden + 2 * shape.keys + raw[1] + 2 * self.rank
            return each, 2 * queries + raw[0] + hidden + 2 * inner + thin
        keys = 2 * (queries if shape.kv_heads < shape.heads else shape.keys)
        each = 2 * hidden + keys + 2 * queries + 2 * self.rank  # in the last layer, too, all tokens go into attention
        return each, (2 * queries + hidden if last else 0) + 2 * hidden + 4 * inner + thin

    def rerun(self, shape: Shape) -> int:
        """Bytes of the one layer that is being run again, where layers are."""
        return self.layer(shape) if self.recompute else 0

    def passing(self, shape: Shape) -> int:
        """Bytes of the gradients at the widest place of a layer, its MLP: they come and go."""
        inner = 3 if self.backend == "fused" else 4
        return self.tokens * self.width * (inner * shape.inner + 4 * shape.hidden)

    def forward(self, shape: Shape) -> int:
        """Bytes of a pass without gradients at its widest."""
        return self.tokens * self.width * (3 * shape.inner + 4 * shape.hidden)

    # -- heads --------------------------------------------------------------------------------------------------------

    def ends(self, shape: Shape) -> int:
        """Bytes kept after the last layer: what is normed, and its norm where it is laid out among all tokens again."""
        return 2 * self.wanted * shape.hidden * self.width

    def states(self, shape: Shape) -> int:
        """Bytes kept for the output layer: the states it reads and, where it is frozen, the slopes it found.

        Logits of a single chunk wait for the backward pass on the fused way.
        """
        waits = self.chunk(shape) if self.trains_head and self.backend == "fused" and self.chunks(shape) == 1 else 0
        return (1 if self.trains_head else 2) * self.wanted * shape.hidden * self.width + waits

    def values(self, shape: Shape) -> int:
        """Bytes kept for a value head, which reads states in float32."""
        return 4 * self.wanted * shape.hidden

    def chunks(self, shape: Shape) -> int:
        """In how many parts logits are made."""
        return -(-self.wanted // max(1, CHUNK[self.backend] // shape.vocabulary))

    def chunk(self, shape: Shape) -> int:
        """Bytes of the logits that are there at a time, without gradients."""
        rows = min(self.wanted, max(1, CHUNK[self.backend] // shape.vocabulary))
        return rows * shape.vocabulary * (self.width if self.backend == "fused" else 3 * 4)

    def head(self, shape: Shape) -> int:
        """Bytes of the output layer's backward pass; a trained one's gradient is summed over chunks in float32."""
        states = self.wanted * shape.hidden * self.width
        if not self.trains_head or (self.backend == "fused" and self.chunks(shape) == 1):
            return states
        return self.chunk(shape) + states + shape.vocabulary * shape.hidden * (4 + self.width)


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BASE_BYTES = {"8bit": 1.02, "4bit": 0.56}  # a quantised number, with its share of the scales
REMEMBERED = 2**29  # bytes of states that a shared backbone remembers at the most
CUDA_LIBRARIES = 40 * 2**20  # bytes that the libraries of products take from torch
GRAPHS_OWN = 256 * 2**20  # bytes that captured passes take beside what they keep: work space of each graph, measured
CLOSING = 8  # float32 copies of a part that exist while its codes are made
EIGHT_BIT_MEANS = 2 * (1 + 4 / BLOCK)  # bytes of two codes, and their share of the scales of a block
MAX_SLOTS = {"cuda": 1024, "mps": 64, "cpu": 64}  # of a sampler that chooses for itself


@dataclass(frozen=True)
class RoleCost:
    """Bytes of one role."""

    role: str
    what: str  # in words
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # of one micro-batch in the update, or of a pass without gradients
    cache: int = 0  # while sampling

    @property
    def held(self) -> int:
        """What is there from the first to the last second."""
        return self.weights + self.optimizer


@dataclass(frozen=True)
class Memory:
    """The roles, and the most that is held at once in each phase, in bytes."""

    roles: tuple[RoleCost, ...]
    phases: dict[str, int]
    micro_rows: int  # rows in one forward and backward
    micro_batches: int  # of one optimiser step

    @property
    def peak(self) -> int:
        """The most that is held at any time."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        """When."""
        return max(self.phases, key=lambda name: self.phases[name])


@dataclass(frozen=True)
class Held:
    """How the recipe has numbers held."""

    width: int  # bytes of a weight that is not quantised
    base: float  # bytes of a number in the matrices of a frozen base
    master_weights: bool  # float32 copies of weights that are trained in half precision
    eight_bit: bool  # the optimiser's running means
    backend: Backend
    checkpointing: bool
    offload: bool  # the reference waits in host memory
    device: str

    @classmethod
    def of(cls, recipe: Recipe, shape: Shape, device: str) -> Held:
        """As the recipe says, on this kind of device."""
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
        """Bytes of both running means of one trained weight."""
        if self.eight_bit:
            return EIGHT_BIT_MEANS
        return 8.0 if self.master_weights else 2.0 * self.width

    def trained(self, count: int) -> dict[str, int]:
        """Gradients and optimiser of so many weights."""
        copy = 4 if self.master_weights else 0
        return {"gradients": count * self.width, "optimizer": round(count * (self.moments + copy))}

    def stepping(self, count: int, largest: int) -> int:
        """Bytes that come and go while `count` weights are stepped: float32 copies of a bucket's numbers.

        They are of its gradients, of its weights without master weights, and of its running means where these are
        codes, which are made a part at a time. A bucket holds whole weights: the largest may be one of its own.
        """
        if not self.master_weights and not self.eight_bit:
            return 0
        bucket = min(count, max(BUCKET, largest))
        copies = (1 if self.master_weights else 2) if self.width < 4 else 0
        if not self.eight_bit:
            return 4 * bucket * copies
        return 4 * (bucket * (copies + 2) + min(count, PART) * CLOSING)


def memory_of(recipe: Recipe, shape: Shape, work: Work, device: str, critic: Shape | None = None) -> Memory:
    """What the recipe holds, role by role and phase by phase; `critic` is the shape of one that is not the policy's."""
    held = Held.of(recipe, shape, device)
    micro_rows = max(1, min(work.minibatch, recipe.optimizer.micro_batch_tokens // max(1, work.longest_row)))
    micro_batches = math.ceil(work.minibatch / micro_rows)
    one = micro_pass(recipe, shape, work, held, micro_rows)
    own = critic or shape
    other = replace(one, layers=own.layers) if critic else one  # the critic's pass
    roles = _roles(recipe, shape, work, held, one)
    if critic is not None:
        roles = tuple(_critic_of(critic, held, other) if role.role == "critic" else role for role in roles)
    kept = {role.role: other.kept(own) if role.role == "critic" else one.kept(shape) for role in roles}
    always = sum(role.held for role in roles) + (CUDA_LIBRARIES if device == "cuda" else 0)
    graphs = sum(role.gradients + kept[role.role] for role in roles if role.activations) if one.captured else 0
    always += GRAPHS_OWN if one.captured else 0
    phases: dict[str, int] = {}
    if isinstance(recipe, RLRecipe):
        room = _work_space(recipe, shape, work, held)
        phases["rollout"] = always + graphs + sum(role.cache for role in roles)
        always += room + _remembered(recipe, shape, work, held)
    streamed = shape.parameters * held.width if held.offload and work.reference else 0
    passing = max(one.forward(shape), other.forward(own), one.chunk(shape) if work.policy else 0)
    phases["evaluation"] = always + graphs + streamed + passing
    passing = max(one.passing(shape) + one.rerun(shape), other.passing(own) + other.rerun(own))
    stays = sum(kept[role.role] for role in roles if role.activations) if one.captured else 0  # between passes, too
    largest = max(shape.embedding, own.embedding)
    several = micro_batches > 1 or one.captured
    phases["update"] = always + _update(shape, work, held, one, roles, (passing, stays, largest), several=several)
    return Memory(roles, phases, micro_rows, micro_batches)


def micro_pass(recipe: Recipe, shape: Shape, work: Work, held: Held, micro_rows: int) -> Pass:
    """A backbone's pass over one micro-batch."""
    mode = recipe.roles.mode
    tokens = min(round(micro_rows * work.row_tokens), micro_rows * work.longest_row)
    weights = 2 * shape.hidden * (2 * shape.queries + 2 * shape.inner)
    alike = work.row_tokens == work.longest_row  # rows of one length make micro-batches of one shape
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
    """The most that comes on top of weights and optimiser: activations, gradients, and what passes by.

    `of_all` roles: what passes by at the most, what captured passes keep, and numbers in the largest weight.
    The critic's pass is made last, so its backward pass comes first, and the policy's head waits for it. The first
    micro-batch of a step makes gradients where activations were; from the second on all gradients are there.
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
        # The gradient of an output layer that is the embedding waits for the embedding's own.
        waits = shape.embedding * one.width if one.trains_head and not shape.output and one.chunks(shape) > 1 else 0
        moments.append(made + own + waits + passing)
        moments.append(gradients + (waits if one.backend == "fused" else 2 * waits))  # fused, it has no copy of its own
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
    """Every role a model of its own."""
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
        where = 0 if held.offload else shape.parameters * held.width
        words = "a frozen copy" + (", in host memory until its pass" if held.offload else "")
        found.append(RoleCost("reference", words, where))
    return found


def _critic_of(shape: Shape, held: Held, one: Pass) -> RoleCost:
    """A separate critic that is a model of its own shape."""
    count, head = shape.backbone, 4 * 4 * (shape.hidden + 1)
    kept = one.kept(shape) + one.ends(shape) + one.values(shape)
    words = f"a model of its own size ({count / 1e6:,.0f}M), trained"
    return RoleCost("critic", words, count * held.width + head, **held.trained(count), activations=kept)


def _adapters(recipe: Recipe, shape: Shape, work: Work, held: Held, one: Pass) -> list[RoleCost]:
    """One frozen base, and low-rank adapters on it for every role that learns."""
    matrices = shape.products
    base = round(matrices * held.base) + (shape.parameters - matrices) * held.width
    count = shape.adapters(recipe.roles.lora_rank, recipe.roles.lora_targets)
    words = f"adapters of rank {recipe.roles.lora_rank}"
    found = [RoleCost("base", "one frozen model under all roles", base)]
    found += _learning(shape, work, held, one, count, words)
    if work.reference:
        found.append(RoleCost("reference", "the base itself"))
    return found


def _learning(shape: Shape, work: Work, held: Held, one: Pass, count: int, words: str) -> list[RoleCost]:
    """The roles that learn on a shared base: each has `count` weights of its own."""
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
    # The tops as they were loaded are kept whether or not a reference is asked for: other roles start from them.
    found.append(RoleCost("reference", f"the {top} layers as they were loaded", count * held.width))
    return found


def _kept(shape: Shape, work: Work, one: Pass) -> tuple[int, int]:
    """(the policy's activations, a separate critic's), each with what its head keeps."""
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
    """What the sampler keeps beside its cache, also between its calls: a step's logits and states, draws to be made."""
    slots = slots_of(recipe, work, held.device)
    step = (shape.vocabulary + shape.inner + 2 * shape.hidden + 2 * shape.queries) * held.width
    parts = 4 * shape.hidden * max(8 * min(slots, 256), slots)
    return slots * (step + 24 * work.answer_tokens) + parts


def _remembered(recipe: RLRecipe, shape: Shape, work: Work, held: Held) -> int:
    """States that a shared backbone remembers of the rows it was run on."""
    if recipe.roles.mode != "shared_backbone":
        return 0
    return min(REMEMBERED, round(work.rows * work.row_tokens) * shape.hidden * held.width)


def slots_of(recipe: RLRecipe, work: Work, device: str) -> int:
    """Answers that are sampled at once; what is sized from free memory is taken to find enough of it."""
    most = recipe.rollout.max_num_seqs
    return min(most if isinstance(most, int) else MAX_SLOTS[device], work.rows)
