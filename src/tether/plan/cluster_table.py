"""A cluster's plan as tables, and the scaling curve as a table and a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tether.plan.cluster_plan import ClusterPlan, ScalePoint
from tether.plan.table import COLUMNS, size
from tether.reports.charts import Chart, Series

NAMES = {
    "gather_and_reduce": "gather weights, reduce gradients (hidden where shorter)",
    "split_layers": "sums of split layers",
    "gradients_between_copies": "gradients between copies",
    "handover": "weights to the samplers",
}
UNMEASURED = "Simulated. No cluster was measured: docs/plan.md lists how far the simulator is off published figures."


def cluster_text(plan: ClusterPlan) -> list[RenderableType]:
    """The whole report."""
    return [_memory(plan), Text(), _phases(plan), Text(), _communication(plan), Text(), *_verdict(plan)]


def _title(plan: ClusterPlan) -> str:
    cluster, count = plan.cluster, plan.shape.parameters / 1e9
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    return (
        f"{plan.recipe.method} with {plan.recipe.model.path} ({count:.2f} billion parameters) on {cluster.gpus} x "
        + (f"{cluster.gpu.name} in {nodes}")
    )


def _memory(plan: ClusterPlan) -> Table:
    placed = plan.placement
    what = {
        "none": "every rank has whole models",
        "hybrid": f"FSDP over the {placed.shards} ranks of a node, copies between nodes",
        "full": f"FSDP over {placed.shards} ranks",
    }[placed.shard]
    if placed.tensor > 1:
        what += f", layers split over {placed.tensor}"
    table = Table(
        "memory of a rank", "", *COLUMNS[:4], box=None, title=_title(plan), title_justify="left", pad_edge=False
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for role in placed.trainer.roles:
        table.add_row(role.role, Text(role.what, "dim"), *(size(getattr(role, name)) for name in COLUMNS[:4]))
    table.add_section()
    device = size(plan.cluster.gpu.machine.memory)
    table.add_row(f"{placed.trainers} trainers", Text(what, "dim"), "peak", size(placed.trainer_peak), "of", device)
    plural = "s" * (placed.sampler_tensor > 1)
    each = f"{placed.replicas} of {placed.sampler_tensor} GPU{plural}, {placed.slots} slots each"
    who = f"{placed.samplers} samplers" if placed.samplers else "samplers: the same GPUs"
    table.add_row(who, Text(each, "dim"), "peak", size(placed.sampler_peak), "of", device)
    return table


def _phases(plan: ClusterPlan) -> Table:
    table = Table("simulated", "seconds", "tokens a second", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    rates = plan.tokens_per_second
    for phase, seconds in plan.seconds.items():
        if not seconds:
            continue
        if phase == "rollout":
            found = f"{rates['decode']:,.0f} decoded, {rates['prompts']:,.0f} of prompts read"
        else:
            found = f"{rates[phase]:,.0f}" if phase in rates else ""
        table.add_row(phase, f"{seconds:.3g}", found)
    return table


def _communication(plan: ClusterPlan) -> Table:
    table = Table("communication in a step", "seconds", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for name, seconds in plan.communication.items():
        table.add_row(NAMES[name], f"{seconds:.3g}")
    return table


def _verdict(plan: ClusterPlan) -> list[RenderableType]:
    one, whole = plan.gpu_hours
    steps = plan.recipe.run.steps
    cost = f"{one:.3g} GPU-hours a step, {whole:,.1f} for the {steps} steps of the run"
    if (price := plan.wanted.price) is not None:
        cost += f": {one * price:,.2f} a step and {whole * price:,.2f} in all, at {price:g} a GPU-hour"
    notes = [Text(f"- {each}", "dim") for each in plan.assumptions()]
    return [Text(plan.advice), Text(cost), Text(), *notes, Text(UNMEASURED, "yellow")]


# -- scaling ----------------------------------------------------------------------------------------------------------


def curve_table(points: Sequence[ScalePoint]) -> Table:
    """The scaling curve."""
    table = Table(
        "GPUs", "take turns, s", "of linear", "split, s", "samplers", "tokens/s", box=None, pad_edge=False,
        title="simulated scaling", title_justify="left",
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for point, share in zip(points, linear_shares(points), strict=True):
        best = min(filter(None, (point.turns, point.split)), default=None)
        table.add_row(
            f"{point.gpus}",
            f"{point.turns:.3g}" if point.turns else "does not fit",
            f"{share:.0%}" if share else "",
            f"{point.split:.3g}" if point.split else "",
            f"{point.samplers}" if point.split else "",
            f"{point.tokens / best:,.0f}" if best else "",
        )
    return table


def linear_shares(points: Sequence[ScalePoint]) -> list[float | None]:
    """The speed of each point by GPU, relative to the first one that fits."""
    first = next((point for point in points if point.turns), None)
    if first is None or first.turns is None:
        return [None for _ in points]
    base = first.turns * first.gpus
    return [base / (point.turns * point.gpus) if point.turns else None for point in points]


def curve_chart(points: Sequence[ScalePoint], title: str) -> Chart:
    """Steps an hour by the number of GPUs, both as powers of two."""

    def line(name: str, seconds: list[float | None]) -> Series:
        known = [(point, each) for point, each in zip(points, seconds, strict=True) if each]
        return Series(name, tuple((math.log2(point.gpus), math.log2(3600.0 / each)) for point, each in known))

    first = next((point for point in points if point.turns), None)
    linear = [first.turns * first.gpus / point.gpus if first and first.turns else None for point in points]
    series = (
        line("take turns", [point.turns for point in points]),
        line("split, with a lag", [point.split for point in points]),
        line("linear", linear),
    )
    return Chart(
        title=f"Simulated: {title}",
        question="How does it scale?",
        series=tuple(each for each in series if each.points),
        y_label="log2 of steps an hour",
        x_label="log2 of GPUs",
        note="Simulated, not measured.",
    )


def curve_json(points: Sequence[ScalePoint]) -> list[dict[str, Any]]:
    """The scaling curve as plain data."""
    return [asdict(point) | {"simulated": True} for point in points]
