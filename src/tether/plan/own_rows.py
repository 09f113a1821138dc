"""Our own measurements on one H200 beside what the plan predicts for them: `calibration.json` has the rows."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from tether.config.load import load_recipe
from tether.config.recipes import RLRecipe
from tether.plan.calibration import calibrated_pace, gpu_named, table
from tether.plan.memory import memory_of
from tether.plan.published import dense_shape
from tether.plan.simulate import ClusterJob, LengthModel, decode
from tether.plan.timing import Decoder, PassCosts, reading_seconds, seconds_of
from tether.plan.workload import Lengths, Shape, work_of


@dataclass(frozen=True)
class OwnRow:
    """One measured number."""

    name: str
    unit: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted to measured."""
        return self.predicted / self.measured


def own_rows() -> list[OwnRow]:
    """Every row: iterations by phase, decoding, and single decode steps."""
    data = table()["rows"]
    shapes = {name: dense_shape(sizes) for name, sizes in data["shapes"].items()}
    found = [row for each in data["iterations"] for row in _iteration(each, shapes[each["shape"]])]
    found += [_decoding(each, shapes[each["shape"]]) for each in data["decoding"]]
    machine, pace = gpu_named("h200").machine, calibrated_pace()
    for name, steps in data["steps"].items():
        decoder = Decoder.of(shapes[name], 2, pace)
        for slots, measured in steps.items():
            seconds = decoder.step(machine, pace, int(slots), int(slots) * 192)
            found.append(OwnRow(f"{name.upper()}, a decode step of {slots} slots", "ms", measured, seconds * 1e3))
    return found


def _iteration(row: dict[str, Any], shape: Shape) -> list[OwnRow]:
    """The whole iteration, then its phases."""
    machine, pace = gpu_named("h200").machine, calibrated_pace()
    flags = {
        "model.dtype": "bfloat16",
        "rollout.prompts_per_step": row["prompts"],
        "rollout.max_new_tokens": row["new"],
        "rollout.max_num_seqs": row["prompts"],
        "ppo.epochs": row["epochs"],
        "ppo.minibatch_size": row["prompts"],
        "optimizer.micro_batch_tokens": row["micro"],
    }
    recipe = load_recipe("ppo", None, [*(f"--{key}={value}" for key, value in flags.items()), *row["set"]])
    if not isinstance(recipe, RLRecipe):
        raise ValueError("the rows are of PPO")
    work = replace(work_of(recipe, Lengths.assumed(row["prompt"], "as measured")), rewards=1)
    seconds = seconds_of(recipe, shape, work, memory_of(recipe, shape, work, "cuda"), machine, pace=pace)
    found = [OwnRow(row["name"], "s", row["whole"], sum(seconds.values()))]
    return found + [OwnRow(f"{row['name']}: {name}", "s", took, seconds[name]) for name, took in row["seconds"].items()]


def _decoding(row: dict[str, Any], shape: Shape) -> OwnRow:
    """Tokens a second after the first prompts were read."""
    machine, pace, prompt = gpu_named("h200").machine, calibrated_pace(), 128
    passes = PassCosts(shape, policy=True, critic=0.0, reference=False, rewards=0, epochs=1)
    lengths = LengthModel(row["kind"], 128, row["longest"])
    job = ClusterJob(
        machine, pace, Decoder.of(shape, 2, pace), passes, row["answers"], row["samples"], prompt, lengths,
        row["answers"], 4096, 1, 0, slots=row["slots"],
    )  # fmt: skip
    drawn = lengths.draw(row["answers"], random.Random(0))  # noqa: S311
    first = min(row["slots"], row["answers"]) * prompt / row["samples"]
    seconds = decode(job, drawn).seconds - reading_seconds(shape, first, prompt, machine, pace)
    return OwnRow(row["name"], "tokens/s", row["tokens_per_second"], sum(drawn) / seconds)
