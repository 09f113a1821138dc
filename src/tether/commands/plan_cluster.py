"""The options of `tether plan` for a cluster."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tether.commands.options import count
from tether.errors import UsageError

if TYPE_CHECKING:
    from tether.config.recipes import Recipe
    from tether.plan.cluster_plan import Wanted
    from tether.plan.workload import Lengths, Shape

PER_NODE = 8  # GPUs of a node, where --nodes is not given
MAX_GPUS = 1_000_000
MAX_STEPS = 10_000
DEFAULTS = {
    "link": "400Gb",
    "gpu": "h200",
    "shard": "auto",
    "samplers": 0,
    "lag": 0,
    "spread": 1.0,
    "failures": 0.0,
    "steps": 8,
    "seed": 0,
}  # filled in after parsing, so that an option without effect is noticed
ONLY_CLUSTER = (*DEFAULTS, "nodes", "price", "answer_tokens", "stragglers")


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add what describes a cluster and its simulation."""
    group = parser.add_argument_group("a cluster (simulated)")
    group.add_argument("--gpus", type=count, metavar="N", help="plan for N GPUs")
    group.add_argument("--nodes", type=count, metavar="N", help="in N nodes (default: nodes of 8 GPUs)")
    group.add_argument("--link", metavar="SPEED", help="network of a node: 400Gb (default), 50GB, 8x400Gb")
    group.add_argument("--gpu", metavar="KIND", help="h200 (default), h100, h20, a100, b200, ...")
    group.add_argument("--price", type=float, metavar="P", help="price of a GPU for an hour, in any currency")
    group.add_argument("--shard", metavar="KIND", help="auto (default), none, hybrid or full (FSDP)")
    group.add_argument("--samplers", type=int, metavar="N", help="GPUs that only sample (default 0: turns)")
    group.add_argument("--lag", type=int, metavar="K", help="rollouts come from the version K steps before")
    group.add_argument("--simulate", action="store_true", help="answers of different lengths, and a curve to 1024 GPUs")
    group.add_argument("--answer-tokens", type=float, metavar="N", help="mean length (default: half the maximum)")
    group.add_argument("--spread", type=float, metavar="S", help="standard deviation of log length (default 1)")
    group.add_argument("--stragglers", metavar="P:F", help="a GPU is F times slower in a step with probability P")
    group.add_argument("--failures", type=float, metavar="R", help="failures of a sampling GPU an hour")
    group.add_argument("--steps", type=count, metavar="N", help="simulated steps (default 8)")
    group.add_argument("--seed", type=int, help="of the simulation (default 0)")
    group.add_argument("--svg", type=Path, metavar="FILE", help="write the simulated scaling curve as a picture")


def wants_cluster(options: argparse.Namespace) -> bool:
    """Whether the plan is for a cluster; an option that would have no effect is an error."""
    if options.svg and not options.simulate:
        raise UsageError("--svg is the picture of the scaling curve: add --simulate")
    if options.gpus or options.simulate:
        if options.device or options.memory or options.ranks:
            raise UsageError(
                "--device, --memory and --ranks plan for one device: leave them out with --gpus and --simulate"
            )
        for name, value in DEFAULTS.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        return True
    given = [f"--{name.replace('_', '-')}" for name in ONLY_CLUSTER if getattr(options, name) is not None]
    if given:
        raise UsageError(f"{', '.join(given)}: say how many GPUs with --gpus")
    return False


def print_cluster_plan(
    options: argparse.Namespace, recipe: Recipe, shape: Shape, prompts: Lengths
) -> int:  # fmt: skip
    """Plan for the cluster, and print it."""
    from tether.config.recipes import RLRecipe
    from tether.plan.calibration import gpu_named
    from tether.plan.cluster import Cluster, parse_link
    from tether.plan.cluster_plan import plan_cluster, scaling_curve
    from tether.plan.cluster_table import cluster_text, curve_json, curve_table
    from tether.reports.run_table import printing

    if not isinstance(recipe, RLRecipe):
        raise UsageError(f"a cluster is planned for methods that sample, not for {recipe.method}")
    gpu, link = gpu_named(options.gpu), parse_link(options.link)
    gpus, nodes = _size(options)
    cluster, wanted = Cluster(gpu, gpus, nodes, link), _wanted(options, recipe.rollout.max_new_tokens)
    plan = plan_cluster(recipe, shape, prompts, cluster, wanted)
    per_node = PER_NODE if options.nodes is None else cluster.per_node
    points = scaling_curve(recipe, shape, prompts, gpu, link, per_node, wanted) if options.simulate else []
    if options.svg:
        _write_picture(options.svg, points, f"{recipe.model.path} on {gpu.name}")
    if options.json:
        print(json.dumps(plan.as_json() | ({"scaling": curve_json(points)} if points else {})))
        return 0
    with printing() as console:
        for part in cluster_text(plan):
            console.print(part)
        if points:
            console.print()
            console.print(curve_table(points))
    return 0


def _size(options: argparse.Namespace) -> tuple[int, int]:
    """The numbers of GPUs and of nodes."""
    gpus = options.gpus or 1
    if gpus > MAX_GPUS:
        raise UsageError(f"--gpus {gpus}: a plan is for up to {MAX_GPUS:,} GPUs")
    nodes = options.nodes or -(-gpus // PER_NODE)
    if options.nodes is None and gpus % nodes:
        raise UsageError(
            f"--gpus {gpus}: without --nodes they are nodes of {PER_NODE}, the last of which would not be full; "
            f"use --gpus {nodes * PER_NODE}, or say --nodes"
        )
    return gpus, nodes


def _write_picture(path: Path, points: list, title: str) -> None:
    from tether.plan.cluster_table import curve_chart
    from tether.reports.chart_svg import render_svg

    try:
        path.write_text(render_svg(curve_chart(points, title), name="scaling", standalone=True) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(f"--svg {path}: it cannot be written ({error.strerror})") from error


def _wanted(options: argparse.Namespace, longest: int) -> Wanted:
    from tether.plan.cluster_plan import Wanted
    from tether.plan.simulate import LengthModel, Trouble

    lengths = None
    if options.simulate or options.answer_tokens is not None:
        mean = options.answer_tokens if options.answer_tokens is not None else max(1.0, longest / 2)
        if mean < 1:
            raise UsageError(f"--answer-tokens {mean:g}: an answer has at least 1 token")
        if not 0 < options.spread <= 3:
            raise UsageError(f"--spread {options.spread:g}: it is the deviation of the log length, above 0 and up to 3")
        lengths = LengthModel("lognormal", mean, longest, options.spread)
    if options.price is not None and not 0 <= options.price < float("inf"):
        raise UsageError(f"--price {options.price:g}: it must be a number, and cannot be below 0")
    if options.steps > MAX_STEPS:
        raise UsageError(f"--steps {options.steps}: up to {MAX_STEPS:,} are simulated")
    if options.lag < 0:
        raise UsageError(f"--lag {options.lag}: it cannot be below 0")
    if not 0 <= options.failures < float("inf"):
        raise UsageError(f"--failures {options.failures:g}: it must be a number, and cannot be below 0")
    share, factor = _stragglers(options.stragglers)
    return Wanted(
        samplers=options.samplers,
        lag=options.lag,
        shard=options.shard,
        lengths=lengths,
        trouble=Trouble(share, factor, options.failures),
        steps=options.steps,
        seed=options.seed,
        price=options.price,
    )


def _stragglers(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 1.0
    try:
        share, factor = (float(part) for part in text.split(":"))
    except ValueError:
        share = factor = -1.0
    if not (0 <= share <= 1 and 1 <= factor < float("inf")):
        raise UsageError(f"--stragglers {text}: write a probability and a factor, such as 0.02:1.5")
    return share, factor
