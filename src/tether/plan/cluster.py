"""A cluster, how a recipe is placed on it, what each rank holds, and how long its communication takes.

Assumptions: a collective takes the longer of its traffic inside a node and between nodes, each at a fraction of the
link's speed (`calibration.json`), plus a latency for each doubling of the group. FSDP gathers the next layer while the
current one computes, so its traffic costs only what passes the time of the computation.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from tether.config.recipes import RLRecipe
from tether.errors import ConfigError, UsageError
from tether.plan.calibration import Gpu, network
from tether.plan.gathered import gathered
from tether.plan.memory import Held, Memory, memory_of
from tether.plan.workload import Shape, Work

Shard = Literal["none", "hybrid", "full"]
UNITS = {"Gb": 1e9 / 8, "Tb": 1e12 / 8, "GB": 1e9, "TB": 1e12, "Mb": 1e6 / 8, "MB": 1e6}
SAMPLER_SHARE = 0.8  # fraction of the free memory that a sampler's cache takes
MAX_SEQUENCES = 1024  # slots of one sampler


def parse_link(text: str) -> float:
    """Convert 400Gb (bits), 50GB (bytes) or 8x400Gb (eight adapters in a node) to bytes per second."""
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([GTM][bB])(?:/s|ps)?", text.strip())
    if found is None:
        raise UsageError(f"--link {text}: write bits as 400Gb, bytes as 50GB, several adapters of a node as 8x400Gb")
    speed = int(found[1] or 1) * float(found[2]) * UNITS[found[3]]
    if not speed > 0:
        raise UsageError(f"--link {text}: it must be above 0")
    return speed


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in nodes of one size."""

    gpu: Gpu
    gpus: int
    nodes: int
    link: float  # bytes per second between one node and the others

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.nodes < 1:
            raise UsageError(f"--gpus {self.gpus} --nodes {self.nodes}: both must be at least 1")
        if self.gpus % self.nodes:
            near = self.gpus - self.gpus % self.nodes or self.nodes
            raise UsageError(
                f"--gpus {self.gpus} --nodes {self.nodes}: every node has the same number of GPUs; use --gpus {near}"
            )

    @property
    def per_node(self) -> int:
        """GPUs of a node."""
        return self.gpus // self.nodes

    def nodes_of(self, group: int) -> int:
        """Nodes that a group of GPUs spans."""
        return math.ceil(group / self.per_node)

    def gather(self, size: float, group: int) -> float:
        """Seconds until each GPU of the group has `size` bytes, of which it holds a part; a reduce-scatter the same."""
        if group <= 1:
            return 0.0
        assumed, nodes = network(), self.nodes_of(group)
        inside = size * (min(group, self.per_node) - 1) / min(group, self.per_node) / self.gpu.nvlink
        between = size * (nodes - 1) / nodes / self.link
        return max(inside, between) / assumed.efficiency + assumed.latency * math.ceil(math.log2(group))

    def all_reduce(self, size: float, group: int) -> float:
        """Seconds of a sum over the group that every GPU gets: a reduce-scatter and a gather."""
        return 2.0 * self.gather(size, group)

    def send(self, size: float, targets: int) -> float:
        """Seconds to hand `size` bytes to `targets` other GPUs, in a chain."""
        speed = self.gpu.nvlink if self.nodes == 1 else min(self.gpu.nvlink, self.link)
        return size / (speed * network().efficiency) + network().latency * math.ceil(math.log2(targets + 1))


@dataclass(frozen=True)
class Placement:
    """Which GPUs do what."""

    trainers: int
    samplers: int  # 0: all GPUs take turns
    shard: Shard
    shards: int  # ranks that a role is divided over
    tensor: int  # GPUs that divide each layer of the trainer
    sampler_tensor: int
    slots: int  # answers that one sampler decodes at once
    trainer: Memory  # of each rank
    trainer_peak: int
    sampler_weights: int  # bytes of the sampler's own weights on each GPU
    sampler_peak: int

    @property
    def replicas(self) -> int:
        """Engines."""
        return (self.samplers or self.trainers) // self.sampler_tensor

    @property
    def groups(self) -> int:
        """Data-parallel groups of trainers."""
        return self.trainers // self.tensor


def sliced(shape: Shape, tensor: int) -> Shape:
    """What one of `tensor` GPUs has of each layer."""
    if tensor == 1:
        return shape
    return replace(
        shape,
        heads=-(-shape.heads // tensor),
        kv_heads=-(-shape.kv_heads // tensor),
        inner=-(-shape.inner // tensor),
        vocabulary=-(-shape.vocabulary // tensor),
        embedding=-(-shape.embedding // tensor),
        output=-(-shape.output // tensor),
        layer=-(-shape.layer // tensor),
        linears=tuple((name, inputs, -(-outputs // tensor)) for name, inputs, outputs in shape.linears),
    )


def share_of(work: Work, groups: int) -> Work:
    """The part of an iteration that one of `groups` data-parallel groups does."""
    return replace(
        work,
        rows=-(-work.rows // groups),
        prompts=-(-work.prompts // groups),
        minibatch=max(1, -(-work.minibatch // groups)),
    )


def place(
    recipe: RLRecipe, shape: Shape, work: Work, cluster: Cluster, *, samplers: int = 0, shard: str = "auto",
    critic: Shape | None = None,
) -> Placement:  # fmt: skip
    """The first placement that fits: whole copies, then FSDP in a node, then over all ranks, then split layers."""
    if not 0 <= samplers < cluster.gpus:
        raise UsageError(f"--samplers {samplers}: at least one of the {cluster.gpus} GPUs must train")
    trainers = cluster.gpus - samplers
    closest: Placement | None = None
    for kind, shards, tensor in _candidates(cluster, trainers, shape, shard):
        found = _placed(recipe, shape, work, cluster, (trainers, samplers), (kind, shards, tensor), critic)
        if max(found.trainer_peak, found.sampler_peak) <= cluster.gpu.machine.usable:
            return found
        if closest is None or found.trainer_peak < closest.trainer_peak:
            closest = found
    raise ConfigError(_too_large(recipe, cluster, closest, shard))


def _candidates(cluster: Cluster, trainers: int, shape: Shape, shard: str) -> list[tuple[Shard, int, int]]:
    if shard not in ("auto", "none", "hybrid", "full"):
        raise UsageError(f"--shard {shard}: choose auto, none, hybrid (FSDP in a node) or full (FSDP over all ranks)")
    found: list[tuple[Shard, int, int]] = []
    if shard in ("auto", "none"):
        found.append(("none", 1, 1))
    node = min(trainers, cluster.per_node)
    if shard in ("auto", "hybrid") and trainers % node == 0 and (shard == "hybrid" or 1 < node < trainers):
        found.append(("hybrid", node, 1))
    if shard in ("auto", "full") and (shard == "full" or trainers > 1):
        splits = [n for n in (1, 2, 4, 8) if trainers % n == 0 and n <= min(node, shape.heads)]
        found.extend(("full", trainers // tensor, tensor) for tensor in splits)
    return found


def _placed(
    recipe: RLRecipe,
    shape: Shape,
    work: Work,
    cluster: Cluster,
    gpus: tuple[int, int],
    split: tuple[Shard, int, int],
    critic: Shape | None,
) -> Placement:
    (trainers, samplers), (kind, shards, tensor) = gpus, split
    own = share_of(work, trainers // tensor)
    part, other = sliced(shape, tensor), sliced(critic, tensor) if critic else None
    memory = memory_of(recipe, part, own, "cuda", other, None if kind == "none" else shards)
    cache = sum(role.cache for role in memory.roles)
    if kind != "none" and shards > 1:
        cache += gathered(recipe, part, other or part, own, Held.of(recipe, part, "cuda").width, shards, 1)["rollout"]
    always = memory.phases["rollout"] - cache  # beside the sampler's weights and cache
    engine = _engine(recipe, shape, work, cluster, trainers, samplers, 0 if samplers else always, kind)
    sampler_tensor, slots, weights, sampling = engine
    learning = max(size for phase, size in memory.phases.items() if phase != "rollout")
    sampler_peak = weights + sampling + (0 if samplers else always)
    return Placement(
        trainers,
        samplers,
        kind,
        shards,
        tensor,
        sampler_tensor,
        slots,
        memory,
        learning if samplers else max(learning, sampler_peak),
        weights,
        sampler_peak,
    )


def _engine(
    recipe: RLRecipe,
    shape: Shape,
    work: Work,
    cluster: Cluster,
    trainers: int,
    samplers: int,
    beside: int,
    kind: Shard,
) -> tuple[int, int, int, int]:
    """(GPUs of a sampler, slots, bytes of weights, bytes of cache); `beside` is what else its GPU holds.

    The weights of a colocated sampler are the trainer's own where every rank has them whole.
    """
    held = Held.of(recipe, shape, "cuda")
    gpus, free = samplers or trainers, cluster.gpu.machine.usable - beside
    found = (1, 1, 0, 0)
    for tensor in (1, 2, 4, 8):
        if gpus % tensor or tensor > min(cluster.per_node, shape.heads):
            continue
        whole = kind == "none" and not samplers and tensor == 1
        weights = 0 if whole else math.ceil(shape.parameters * held.width / tensor)
        each = _slot_bytes(shape, work, held, tensor)
        wanted = min(_slots(recipe), -(-work.rows // (gpus // tensor)))
        fitting = int(SAMPLER_SHARE * (free - weights) / each)
        slots = max(1, min(wanted, fitting))
        found = tensor, slots, weights, slots * each
        if fitting >= min(wanted, 8):
            break
    return found


def _slots(recipe: RLRecipe) -> int:
    most = recipe.rollout.max_num_seqs
    return most if isinstance(most, int) else MAX_SEQUENCES


def _slot_bytes(shape: Shape, work: Work, held: Held, tensor: int) -> int:
    """Keys, values and work space of one answer on one of `tensor` GPUs."""
    room = -(-work.longest_row // 128) * 128
    cached = 2 * shape.layers * shape.keys * room * held.width
    return math.ceil(cached / tensor) + shape.vocabulary * held.width + 24 * work.answer_tokens


def _too_large(recipe: RLRecipe, cluster: Cluster, closest: Placement | None, shard: str) -> str:
    size = cluster.gpu.machine.usable / 2**30
    where = f"{cluster.gpus} x {cluster.gpu.name} with {size:.0f} GiB each"
    if closest is None:
        return f"--shard {shard} needs nodes that are equally full on {where}: use --shard full"
    needed, who = max((closest.trainer_peak, "trainer"), (closest.sampler_peak, "sampler"))
    repair = "use more GPUs (--gpus), --roles.mode lora, or a smaller --optimizer.micro_batch_tokens"
    if shard in ("none", "hybrid"):
        repair = "use --shard full"
    elif not recipe.model.gradient_checkpointing:
        repair += ", or --model.gradient_checkpointing true"
    return f"the run does not fit on {where}: a {who} needs {needed / 2**30:.0f} GiB at least; {repair}"
