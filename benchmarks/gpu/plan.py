"""The plan's predicted peak memory against the measured one: sizes x roles x checkpointing.

    python benchmarks/gpu/plan.py [--only 1b] [--jobs 1] [--device cuda] [--iterations 2] [--json FILE]
        [--markdown FILE]

Random weights in bf16, a few short prompts, two iterations: the second has the optimizer's state. Each configuration
runs in its own process, because libraries keep memory that an earlier run allocated. The peak is the largest of the
phases' (`torch.cuda.max_memory_allocated`, plus the sampler's cache where torch does not count it). Seconds are those
of the second iteration. On a CPU the shapes are tiny, which only tests the script itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, Shape, random_model

from tether.config.load import load_recipe
from tether.models.load import LoadedModel
from tether.plan import plan as planning
from tether.plan.machine import machine_for
from tether.plan.workload import Lengths
from tether.plan.workload import Shape as PlannedShape
from tether.train.build import build_rl
from tether.train.rl import train_rl

GIB = 2**30
TINY = Shape(64, 128, 3, 4, 2, 40960, head_dim=16)


@dataclass(frozen=True)
class Case:
    """One configuration."""

    shape: str
    mode: str
    flags: dict[str, Any] = field(default_factory=dict[str, Any])
    prompts: int = 64
    prompt: int = 128
    new: int = 128

    @property
    def name(self) -> str:
        """A readable name."""
        extra = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in self.flags.items())
        return f"{self.shape} {self.mode}" + (f", {extra}" if extra else "")


AGAIN = {"model.gradient_checkpointing": True}
CASES = [
    Case("135m", "separate"),
    Case("135m", "separate", AGAIN),
    Case("135m", "lora"),
    Case("135m", "shared_backbone"),
    Case("360m", "separate"),
    Case("360m", "separate", {"roles.critic": "head"}),
    Case("360m", "lora", AGAIN),
    Case("1b", "separate"),
    Case("1b", "separate", AGAIN),
    Case("1b", "separate", {"optimizer.name": "adamw_8bit"}),
    Case("1b", "separate", {"optimizer.micro_batch_tokens": 2048}),
    Case("1b", "lora"),
    Case("1b", "lora", AGAIN),
    Case("1b", "shared_backbone"),
    Case("3b", "lora"),
    Case("3b", "lora", AGAIN),
    Case("3b", "shared_backbone"),
]


def recipe_of(case: Case, dtype: str) -> Any:
    """Default settings plus those of the case."""
    flags = {
        "model.dtype": dtype, "roles.mode": case.mode, "task.name": "smollm_shape:RandomPrompts",
        "task.options": {"count": case.prompts * 2, "length": case.prompt},
        "rollout.prompts_per_step": case.prompts, "rollout.max_new_tokens": case.new,
        "rollout.max_num_seqs": case.prompts, "ppo.epochs": 1, "ppo.minibatch_size": case.prompts,
        "optimizer.policy_lr": 1e-6, "optimizer.critic_lr": 1e-6,
    } | case.flags  # fmt: skip
    return load_recipe("ppo", None, [f"--{key}={json.dumps(value)}" for key, value in flags.items()])


def measure(case: Case, device: str, iterations: int) -> dict[str, Any]:
    """Predicted and measured, in GiB and seconds."""
    recipe = recipe_of(case, "bfloat16" if device == "cuda" else "float32")
    loaded = random_model(case.shape, device, torch.bfloat16 if device == "cuda" else torch.float32)
    lengths = Lengths.assumed(case.prompt, "as given")
    plan = planning.make_plan(recipe, PlannedShape.of(loaded.model), lengths, machine_for(device, recipe.model.dtype))
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    metrics = run(recipe, loaded, iterations)
    phases = {name: metrics.get(f"memory/{name}", 0.0) for name in ("rollout", "evaluation", "update")}
    measured, predicted = max(phases.values()), plan.memory.peak / GIB
    return {
        "name": case.name,
        "predicted_gib": round(predicted, 3),
        "measured_gib": round(measured, 3),
        "off": round(predicted / measured - 1, 4) if measured else None,
        "predicted_phases": {name: round(size / GIB, 3) for name, size in plan.memory.phases.items()},
        "measured_phases": {name: round(size, 3) for name, size in phases.items()},
        "predicted_seconds": {name: round(seconds, 3) for name, seconds in plan.seconds.items()},
        "measured_seconds": {name: round(metrics[f"seconds/{name}"], 3) for name in plan.seconds},
        "micro_batches": plan.memory.micro_batches,
        "weights_loaded_gib": round(before / GIB, 3),
    }


def run(recipe: Any, loaded: LoadedModel, iterations: int) -> dict[str, float]:
    """The last iteration's metrics."""
    parts = build_rl(recipe, loaded)
    last: dict[str, float] = {}
    for result in train_rl(parts):
        last = result.metrics
        if "out_of_memory" in last:
            raise RuntimeError("memory ran out, so smaller passes were measured: measure fewer cases at a time")
        if result.step + 1 == iterations:
            break
    return last


def markdown(results: list[dict[str, Any]]) -> str:
    """A table for docs/performance.md."""
    lines = ["| shape and roles | predicted GiB | measured GiB | off |", "|---|---|---|---|"]
    for each in results:
        off = "" if each["off"] is None else f"{100 * each['off']:+.1f} %"
        lines.append(f"| {each['name']} | {each['predicted_gib']:.2f} | {each['measured_gib']:.2f} | {off} |")
    return "\n".join(lines)


def cases_of(device: str) -> list[Case]:
    """The configurations to try on a device."""
    if device == "cuda":
        return CASES
    SHAPES["tiny"] = TINY
    modes = [("separate", {}), ("lora", {}), ("shared_backbone", {"roles.trainable_layers": 1})]
    return [Case("tiny", mode, extra, 8, 16, 8) for mode, extra in modes]


def apart(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a case in its own process."""
    flags = ["--case", case.name, "--device", options.device, "--iterations", str(options.iterations)]
    done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    found = {"name": case.name, "error": done.stderr[-300:]} if done.returncode or not lines else json.loads(lines[-1])
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """Measure each case and print the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=[], help="cases whose name contains one of these words")
    parser.add_argument("--case", help="one case, in this process")
    parser.add_argument("--jobs", type=int, default=1, help="cases measured at a time")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--markdown")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    cases = {case.name: case for case in cases_of(options.device)}
    wanted = [case for name, case in cases.items() if not options.only or any(word in name for word in options.only)]
    if not wanted or options.case not in (None, *cases):
        parser.error(f"no such case; there are: {'; '.join(cases)}")
    if options.case:
        print(json.dumps(measure(cases[options.case], options.device, options.iterations)))
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda case: apart(case, options), wanted))
    table = markdown([each for each in results if "error" not in each])
    print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    if options.markdown:
        Path(options.markdown).write_text(table + "\n")
    if any("error" in each for each in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
