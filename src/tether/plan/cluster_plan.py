"""The plan for a cluster: memory by rank, seconds and tokens by phase, communication, cost, and placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tether.config.recipes import RLRecipe
from tether.errors import ConfigError, UsageError
from tether.plan.calibration import Gpu, calibrated_pace, network, prompt_reading_is_measured
from tether.plan.cluster import Cluster, Placement, place, share_of
from tether.plan.memory import Held
from tether.plan.simulate import ClusterJob, LengthModel, Simulated, Trouble, reading_of, simulate
from tether.plan.timing import Decoder, PassCosts, adapted_matrices, stepping_seconds
from tether.plan.workload import Lengths, Shape, Work, critic_shape_of, work_of

WORTH = 0.95  # a split that reads stale answers must take less than this fraction of the time


@dataclass(frozen=True)
class Wanted:
    """What the options say, beside the recipe and the cluster."""

    samplers: int = 0
    lag: int = 0
    shard: str = "auto"
    lengths: LengthModel | None = None  # None: every answer has its maximum length
    trouble: Trouble = field(default_factory=Trouble)
    steps: int = 8
    seed: int = 0
    price: float | None = None  # of a GPU for an hour


@dataclass(frozen=True)
class Layout:
    """Another use of the same GPUs."""

    samplers: int
    lag: int
    seconds: float


@dataclass(frozen=True)
class ClusterPlan:
    """All values of the table."""

    recipe: RLRecipe
    shape: Shape
    prompts: Lengths
    work: Work
    cluster: Cluster
    wanted: Wanted
    placement: Placement
    simulated: Simulated
    layouts: tuple[Layout, ...]

    @property
    def job(self) -> ClusterJob:
        """What was simulated."""
        return self.simulated.job

    @property
    def seconds(self) -> dict[str, float]:
        """Mean seconds of each phase, and of a step."""
        phases = ("rollout", "scores", "evaluation", "update", "handover")
        return {name: self.simulated.mean(name) for name in phases} | {"step": self.simulated.step_seconds}

    @property
    def communication(self) -> dict[str, float]:
        """Seconds of communication in a step."""
        job = self.job
        passes = -(-job.rows // job.groups) * self.work.row_tokens / job.micro_batch_tokens
        models = int(job.passes.policy) + bool(job.passes.critic)
        steps = -(-job.rows // job.minibatch) * job.passes.epochs
        gathers = passes * (models * (1 + 3 * job.passes.epochs) + int(job.passes.reference) + job.passes.rewards)
        return {
            "gather_and_reduce": gathers * job.gather,
            "split_layers": gathers * job.exposed,
            "gradients_between_copies": steps * _between_copies(self.cluster, self.placement),
            "handover": job.handover,
        }

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Tokens a second of the whole cluster, by phase."""
        seconds, mean = self.seconds, self.simulated.mean
        reading = reading_of(self.job)
        rows = mean("trained")
        found = {
            "prompts": self.work.prompts * self.work.prompt_tokens / reading if reading else 0.0,
            "decode": mean("answers") / max(1e-9, seconds["rollout"] - reading),
            "scores": rows / seconds["scores"] if seconds["scores"] else 0.0,
            "evaluation": rows / seconds["evaluation"],
            "update": rows * self.work.epochs / seconds["update"],
            "step": rows / seconds["step"],
        }
        return {name: rate for name, rate in found.items() if rate}

    @property
    def gpu_hours(self) -> tuple[float, float]:
        """GPU-hours of a step and of the run."""
        one = self.seconds["step"] * self.cluster.gpus / 3600.0
        return one, one * self.recipe.run.steps

    @property
    def advice(self) -> str:
        """Which of the layouts to use."""
        best = min(self.layouts, key=lambda each: each.seconds, default=None)
        turns = next((each.seconds for each in self.layouts if not each.samplers), None)
        if best is None:
            return "Only this placement was tried."
        if turns is None:
            return f"Taking turns does not fit. Use {_split(self.cluster, best)}: {best.seconds:.3g} s a step."
        if best.samplers and best.seconds < WORTH * turns:
            gain = turns / best.seconds
            return (
                f"Separate: {_split(self.cluster, best)} takes {best.seconds:.3g} s a step, {gain:.2f} times as fast "
                f"as taking turns ({turns:.3g} s). Answers are then {best.lag} version{'s' * (best.lag > 1)} old."
            )
        return f"Colocate: all GPUs take turns ({turns:.3g} s a step). No split is 5 % faster."

    def assumptions(self) -> list[str]:
        """What the figures rest on."""
        gpu, job = self.cluster.gpu, self.job
        reading = "measured" if prompt_reading_is_measured() else "assumed equal to a training pass (not measured)"
        lengths = f"every answer has {job.lengths.longest} tokens"
        if job.lengths.kind != "fixed":
            lengths = f"answers are {job.lengths.kind}, {job.lengths.mean:g} tokens in the mean before the cut at "
            lengths += f"{job.lengths.longest}"
        return [
            f"{gpu.name}: {gpu.machine.basis}, {gpu.nvlink / 1e9:.0f} GB/s to the GPUs of its node",
            "fractions of these rates: those of one H200 (docs/performance.md); other GPUs are assumed to reach them",
            f"prompt reading: {reading}",
            f"network: {self.cluster.link / 1e9:.0f} GB/s between nodes, {network().efficiency:.0%} of it used, "
            f"{network().latency * 1e6:.0f} µs for each doubling of a group; not measured",
            lengths,
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain data, sizes in bytes."""
        one, whole = self.gpu_hours
        price = self.wanted.price
        return {
            "simulated": True,
            "method": self.recipe.method,
            "model": {"path": self.recipe.model.path, "parameters": self.shape.parameters},
            "cluster": {"gpu": self.cluster.gpu.name, "gpus": self.cluster.gpus, "nodes": self.cluster.nodes}
            | {"link_bytes_per_second": self.cluster.link},
            "placement": placement_json(self.placement),
            "seconds": self.seconds,
            "communication_seconds": self.communication,
            "tokens_per_second": self.tokens_per_second,
            "layouts": [asdict(each) for each in self.layouts],
            "advice": self.advice,
            "gpu_hours": {"step": one, "run": whole, "steps": self.recipe.run.steps},
            "cost": None if price is None else {"step": one * price, "run": whole * price},
            "lag": self.job.lag,
            "steps_simulated": len(self.simulated.ends),
            "seed": self.wanted.seed,
            "assumptions": self.assumptions(),
        }


def placement_json(placement: Placement) -> dict[str, Any]:
    """The placement as plain data."""
    found = {name: value for name, value in vars(placement).items() if name != "trainer"}
    roles = [asdict(role) for role in placement.trainer.roles]
    return found | {"roles_by_rank": roles, "phase_bytes_by_rank": placement.trainer.phases}


def _split(cluster: Cluster, found: Layout) -> str:
    return f"{cluster.gpus - found.samplers} GPUs to train and {found.samplers} to sample (lag {found.lag})"


def plan_cluster(recipe: RLRecipe, shape: Shape, prompts: Lengths, cluster: Cluster, wanted: Wanted) -> ClusterPlan:
    """Place the recipe, simulate it, and compare the other uses of the same GPUs."""
    if wanted.lag and not wanted.samplers:
        raise UsageError(f"--lag {wanted.lag}: GPUs that take turns gain nothing from a lag; set --samplers as well")
    work, critic = work_of(recipe, prompts), critic_shape_of(recipe)
    if wanted.lengths is not None and wanted.lengths.mean > work.answer_tokens:
        raise UsageError(f"--answer-tokens {wanted.lengths.mean:g}: rollout.max_new_tokens is {work.answer_tokens}")
    placement = place(
        recipe, shape, work, cluster, samplers=wanted.samplers, shard=wanted.shard, critic=critic
    )  # fmt: skip
    job = job_of(recipe, shape, work, cluster, placement, wanted, critic)
    simulated = simulate(job, wanted.steps, wanted.seed)
    others = tuple(layouts(recipe, shape, work, cluster, wanted, critic))
    return ClusterPlan(recipe, shape, prompts, work, cluster, wanted, placement, simulated, others)


def layouts(
    recipe: RLRecipe, shape: Shape, work: Work, cluster: Cluster, wanted: Wanted, critic: Shape | None
) -> Iterator[Layout]:
    """Taking turns, and splits of the GPUs at eighths with a lag; what does not fit is left out."""
    lag = max(1, wanted.lag)
    eighths = {round(cluster.gpus * part / 8) for part in range(1, 8)}
    for samplers in sorted({0, wanted.samplers, *eighths} - {cluster.gpus}):
        own = replace(wanted, samplers=samplers, lag=lag if samplers else 0)
        try:
            placement = place(
                recipe, shape, work, cluster, samplers=samplers, shard=wanted.shard, critic=critic
            )  # fmt: skip
        except ConfigError:
            continue
        job = job_of(recipe, shape, work, cluster, placement, own, critic)
        seconds = simulate(job, min(wanted.steps, lag + 3), wanted.seed).step_seconds
        yield Layout(samplers, own.lag, seconds)


def job_of(
    recipe: RLRecipe,
    shape: Shape,
    work: Work,
    cluster: Cluster,
    placement: Placement,
    wanted: Wanted,
    critic: Shape | None = None,
) -> ClusterJob:
    """What the simulator reads."""
    held, pace, machine = Held.of(recipe, shape, "cuda"), calibrated_pace(), cluster.gpu.machine
    decoder = Decoder.of(shape, held.width, pace, adapted=adapted_matrices(recipe, shape), general=not shape.packed)
    if placement.sampler_tensor > 1:
        collectives = 2 * shape.layers * network().latency * (placement.sampler_tensor - 1).bit_length()
        decoder = replace(decoder, overhead=decoder.overhead + collectives)
    policy = next(role for role in placement.trainer.roles if role.role == "policy")
    whole = policy.gradients * placement.shards * placement.tensor  # bytes of the trained weights
    backbone = shape.backbone * held.width / placement.tensor
    tokens = recipe.optimizer.micro_batch_tokens
    own = share_of(work, placement.groups)
    stepping = stepping_seconds(own, placement.trainer, held, machine) / max(1, own.steps)
    split = 0.0
    if placement.tensor > 1:
        split = 2 * shape.layers * cluster.all_reduce(tokens * shape.hidden * held.width, placement.tensor)
    handover = cluster.gather(whole, placement.shards)
    if placement.samplers:
        handover += cluster.send(whole, placement.samplers)
    return ClusterJob(
        machine=machine,
        pace=pace,
        decoder=decoder,
        passes=PassCosts.of(recipe, shape, work, held, critic),
        rows=work.rows,
        samples=recipe.rollout.samples_per_prompt,
        prompt_tokens=work.prompt_tokens,
        lengths=wanted.lengths or LengthModel("fixed", work.answer_tokens, work.answer_tokens),
        minibatch=work.minibatch,
        micro_batch_tokens=tokens,
        trainers=placement.trainers,
        samplers=placement.samplers,
        trainer_tensor=placement.tensor,
        sampler_tensor=placement.sampler_tensor,
        slots=placement.slots,
        lag=wanted.lag,
        gather=cluster.gather(backbone, placement.shards) if placement.shard != "none" else 0.0,
        exposed=split,
        sync=stepping + _between_copies(cluster, placement),
        handover=handover,
        trouble=wanted.trouble,
    )


def _between_copies(cluster: Cluster, placement: Placement) -> float:
    """Seconds to add the gradients of whole copies, or of the groups of an HSDP."""
    gradients = sum(role.gradients for role in placement.trainer.roles) * placement.shards
    copies = placement.groups // placement.shards
    if copies <= 1:
        return 0.0
    group = placement.trainers if placement.shard == "none" else cluster.per_node * copies
    return cluster.all_reduce(gradients, min(group, placement.trainers))


# -- scaling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalePoint:
    """One size of the cluster; no seconds where nothing fits."""

    gpus: int
    turns: float | None  # seconds of a step where all GPUs take turns
    split: float | None  # of the best split with a lag
    samplers: int
    tokens: float  # in the rows of a step


def scaling_curve(
    recipe: RLRecipe, shape: Shape, prompts: Lengths, gpu: Gpu, link: float, per_node: int, wanted: Wanted,
    sizes: Sequence[int] = tuple(2**n for n in range(11)),
) -> list[ScalePoint]:  # fmt: skip
    """The same recipe on more and more GPUs, in nodes of `per_node`."""
    work, critic = work_of(recipe, prompts), critic_shape_of(recipe)
    found: list[ScalePoint] = []
    for gpus in sizes:
        cluster = Cluster(gpu, gpus, max(1, gpus // per_node), link)
        few = replace(wanted, samplers=0, lag=wanted.lag or 1, steps=4)
        options = list(layouts(recipe, shape, work, cluster, few, critic))
        turns = next((each.seconds for each in options if not each.samplers), None)
        split = min((each for each in options if each.samplers), key=lambda each: each.seconds, default=None)
        seconds, samplers = (split.seconds, split.samplers) if split else (None, 0)
        found.append(ScalePoint(gpus, turns, seconds, samplers, work.tokens))
    return found
