"""Published step times beside the simulator's, each with its source: `published.json` has the rows.

A stack is one framework with one model on one kind of GPU. One row of each stack sets its factor: how much slower than
our own figures it is. Every other row of the stack is predicted with the same factor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from tether.plan.calibration import calibrated_pace, gpu_named, network
from tether.plan.cluster import Cluster, parse_link
from tether.plan.simulate import ClusterJob, Iteration, LengthModel, Simulated, simulate, timeline
from tether.plan.timing import Decoder, PassCosts
from tether.plan.workload import Shape

PHASES = ("rollout", "scores", "evaluation", "update")
STEPS, SEED = 3, 0


@dataclass(frozen=True)
class PublishedRow:
    """One row of the comparison, in seconds of a step."""

    source: str
    name: str
    gpus: int
    published: float
    predicted: float
    calibrates: bool
    phases: dict[str, float]

    @property
    def ratio(self) -> float:
        """Predicted to published."""
        return self.predicted / self.published


@cache
def published_data() -> dict[str, Any]:
    """The file, as it is."""
    return json.loads(files("tether.plan").joinpath("published.json").read_text(encoding="utf-8"))


def dense_shape(sizes: dict[str, Any]) -> Shape:
    """The shape of a Llama-like model."""
    layers, hidden, inner = sizes["layers"], sizes["hidden"], sizes["inner"]
    queries, keys = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    linears = (
        *(("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys), ("o_proj", queries, hidden)),
        *(("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden)),
    )
    embedding = sizes["vocabulary"] * hidden
    return Shape(
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        vocabulary=sizes["vocabulary"],
        context=0,
        embedding=embedding,
        output=0 if sizes["tied"] else embedding,
        layer=sum(a * b for _, a, b in linears) + 2 * hidden,
        norm=hidden,
        linears=linears,
        head_norms=False,
        packed=True,
    )


def published_job(row: dict[str, Any]) -> ClusterJob:
    """What is simulated for a row: its source's settings and its own."""
    data = published_data()
    at: dict[str, Any] = data["sources"][row["source"]]["job"] | row
    shape, gpu, pace = dense_shape(data["shapes"][at["shape"]]), gpu_named(at["gpu"]), calibrated_pace()
    samplers, trainers = at.get("samplers", 0), at["trainers"]
    per_node = min(at["per_node"], trainers + samplers)
    gpus = -(-(trainers + samplers) // per_node) * per_node
    cluster = Cluster(gpu, gpus, gpus // per_node, parse_link(at["link"]))
    decoder = Decoder.of(shape, 2, pace)
    decoder = replace(decoder, overhead=decoder.overhead + data["engine_step"])
    if at["sampler_tensor"] > 1:
        collectives = 2 * shape.layers * network().latency * (at["sampler_tensor"] - 1).bit_length()
        decoder = replace(decoder, overhead=decoder.overhead + collectives)
    roles = at["roles"]
    passes = PassCosts(
        shape,
        policy=True,
        critic=1.0 if "critic" in roles else 0.0,
        reference="reference" in roles,
        rewards=int("reward" in roles),
        epochs=1,
        times=3 + int(at["checkpointing"]),
    )
    weights = 2.0 * shape.parameters
    return ClusterJob(
        machine=gpu.machine,
        pace=pace,
        decoder=decoder,
        passes=passes,
        rows=at["rows"],
        samples=at["samples"],
        prompt_tokens=at["prompt"],
        lengths=LengthModel(at.get("lengths", "lognormal"), at["mean"], at["longest"]),
        minibatch=at["minibatch"],
        micro_batch_tokens=at["micro"],
        trainers=trainers,
        samplers=samplers,
        trainer_tensor=at["trainer_tensor"],
        sampler_tensor=at["sampler_tensor"],
        slots=at["slots"],
        lag=at.get("lag", 0),
        partial=at.get("partial", False),
        gather=cluster.gather(weights, at["shards"]),
        sync=cluster.all_reduce(2 * weights, trainers // at["trainer_tensor"]),  # gradients in float32
        handover=cluster.gather(weights, trainers) + (cluster.send(weights, samplers) if samplers else 0.0),
    )


@cache
def _iterations(place: int) -> tuple[ClusterJob, tuple[Iteration, ...]]:
    row = published_data()["rows"][place]
    job = published_job(row)
    found = simulate(job, STEPS, SEED).iterations
    if not row.get("evaluates", True):  # the samplers' log-probs are used as they are
        found = tuple(replace(each, evaluation=0.0) for each in found)
    return job, found


def _slowed(job: ClusterJob, iterations: tuple[Iteration, ...], factor: float) -> Simulated:
    slower = tuple(
        replace(each, **{phase: getattr(each, phase) * factor for phase in PHASES}) for each in iterations
    )  # fmt: skip
    return Simulated(job, slower, tuple(timeline(job, slower)))


@cache
def stack_factors() -> dict[tuple[str, str], float]:
    """How much slower than our own figures each stack is, from the row that calibrates it."""
    found: dict[tuple[str, str], float] = {}
    for place, row in enumerate(published_data()["rows"]):
        if row.get("calibrates"):
            job, iterations = _iterations(place)
            seconds = _slowed(job, iterations, 1.0).step_seconds - job.handover
            found[row["source"], row["stack"]] = (row["published"] - job.handover) / seconds
    return found


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """The whole comparison."""
    found: list[PublishedRow] = []
    for place, row in enumerate(published_data()["rows"]):
        job, iterations = _iterations(place)
        simulated = _slowed(job, iterations, stack_factors()[row["source"], row["stack"]])
        seconds = {phase: simulated.mean(phase) for phase in (*PHASES, "handover")}
        calibrates = bool(row.get("calibrates"))
        found.append(
            PublishedRow(
                row["source"], row["name"], job.gpus, row["published"], simulated.step_seconds, calibrates, seconds
            )
        )
    return tuple(found)
