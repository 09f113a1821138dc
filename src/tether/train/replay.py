"""Replaying a step: its stored rollouts through the same mathematics, under the same settings or others."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from tether.algorithms.algorithm import Coefficients
from tether.algorithms.select import build_algorithm
from tether.config.load import change_settings, recipe_from_record
from tether.config.recipes import ReinforceRecipe, RLRecipe
from tether.errors import ConfigError
from tether.ops.advantages import MovingAverage
from tether.ops.masks import masked_mean, masked_variance
from tether.reports.run_table import open_for, printing
from tether.store.database.schema import without_infinities
from tether.store.read import read_run
from tether.store.recorded import RecordedRun, StoredRollout
from tether.store.tokens import padded_columns, stored_experience
from tether.types import EvaluatedBatch, Experience, TokenOutputs, columns_of

LOSSES = ("policy_loss", "value_loss", "clip_fraction", "approx_kl")


@dataclass(frozen=True)
class Replayed:
    """The experience of a step, as stored and as computed now, with summary statistics."""

    step: int
    stored: Experience
    now: Experience
    stored_numbers: dict[str, float]
    numbers: dict[str, float]
    staleness: int = 0  # in steps: how much older the policy that sampled is than that of the step

    @property
    def same_advantages(self) -> bool:
        """Whether they are equal to the bit."""
        return torch.equal(self.stored.advantages, self.now.advantages)

    @property
    def largest_difference(self) -> float:
        """The largest difference between two advantages."""
        return float((self.stored.advantages - self.now.advantages).abs().max())


def replay(options: argparse.Namespace) -> int:
    """Replay one step of a run and print what changed."""
    with open_for(options) as opened:
        run = read_run(opened, options.run)
        before = recipe_from_record(run.config)
        if not isinstance(before, RLRecipe):
            raise ConfigError(f"{options.run} learned from records ({before.method}): only rollouts can be replayed")
        _check_flags(options.flags, before.method)
        _check_algorithm(before, options.run)
        result = replay_step(run, before, change_settings(before, options.flags), _step(run, options.step))
    if options.json:
        print(json.dumps(without_infinities(_as_json(result)), allow_nan=False))
    else:
        with printing() as console:
            console.print(_table(result))
            same = "equal to the bit" if result.same_advantages else f"up to {result.largest_difference:.3g} apart"
            console.print(f"Advantages: {same}.")
    return 0


def _check_algorithm(recipe: RLRecipe, run: str) -> None:
    """Refuse a run of the user's own algorithm: replaying runs no named code, and the method's would be another."""
    passed = [name.partition(" ")[2] for name in recipe.run.objects if name.startswith("algorithm ")]
    for name in [*([recipe.algorithm] if recipe.algorithm is not None else []), *passed]:
        raise ConfigError(
            f"{run} trained with an algorithm of its own ({name}), and replay computes with those of Tether alone"
        )


def replay_step(run: RecordedRun, before: RLRecipe, after: RLRecipe, step: int) -> Replayed:
    """Advantages and losses of a step's stored rollouts under the recipe `after`.

    The KL coefficient is the one which the step had, unless `after` asks for another than the run began with.
    """
    rollouts = run.rollouts(step)
    if not rollouts:
        kept = ", ".join(map(str, run.rollout_steps)) or "none"
        raise ConfigError(f"--step: the answers of step {step} were not kept (kept: {kept}); see store.rollouts_every")
    metrics = next(row for row in run.metrics if int(row["step"]) == step)
    stored = stored_experience(rollouts)
    columns = columns_of(stored)
    evaluated = EvaluatedBatch(**{name: columns[name] for name in EvaluatedBatch.__dataclass_fields__})
    coefficients = _coefficients(after, before, metrics)
    if isinstance(after, ReinforceRecipe):
        coefficients = replace(coefficients, baseline=_baseline(after, before, run.metrics, step))
    now, _ = build_algorithm(after).advantages(evaluated, coefficients.reference, coefficients.baseline)
    outputs = _outputs(stored, rollouts)
    return Replayed(
        step,
        stored,
        now,
        _credit_numbers(stored) | _losses(before, stored, outputs, step, _coefficients(before, before, metrics)),
        _credit_numbers(now) | _losses(after, now, outputs, step, coefficients),
        rollouts[0].staleness,
    )


def _coefficients(recipe: RLRecipe, before: RLRecipe, metrics: Mapping[str, float]) -> Coefficients:
    """The controllers' weights at that step; a changed KL begins with its own."""
    start = build_algorithm(recipe).controllers.coefficients()
    reference = metrics.get("kl_coef", start.reference) if recipe.kl == before.kl else start.reference
    return Coefficients(reference, metrics.get("penalty_coef", start.old))


def _baseline(
    recipe: ReinforceRecipe, before: RLRecipe, rows: Sequence[Mapping[str, float]], step: int
) -> float:  # fmt: skip
    """The moving average at that step: the recorded one, or one over the returns that earlier steps recorded."""
    wanted = recipe.reinforce
    if wanted.baseline != "moving_average":
        return 0.0
    recorded = {int(row["step"]): row for row in rows}
    if isinstance(before, ReinforceRecipe) and before.reinforce == wanted:
        return recorded[step].get("baseline", 0.0)
    average = MovingAverage(wanted.baseline_decay)
    for earlier in range(step):
        number = recorded.get(earlier, {}).get("mean_return")
        if number is None:
            raise ConfigError(
                f"reinforce.baseline moving_average is of the mean returns of all earlier steps, and the run recorded "
                f"none for step {earlier}"
            )
        average = average.after(number)
    return average.value


def _losses(
    recipe: RLRecipe, experience: Experience, outputs: TokenOutputs | None, step: int, coefficients: Coefficients
) -> dict[str, float]:
    """The losses of the update's last pass over each token."""
    if outputs is None:
        return {}
    loss = build_algorithm(recipe).objective_at(step, coefficients)(outputs, experience)
    return {name: value for name, value in loss.metrics.values().items() if name in LOSSES}


def _outputs(experience: Experience, rollouts: Sequence[StoredRollout]) -> TokenOutputs | None:
    """The outputs of the update's last pass over each token; None where they were not stored."""
    ratio = padded_columns(rollouts).get("ratio")
    if ratio is None:
        return None
    ratio = ratio.masked_fill(~experience.response_mask, 1.0)
    return TokenOutputs(experience.old_logprobs + ratio.log(), torch.zeros_like(ratio), experience.values)


def _credit_numbers(experience: Experience) -> dict[str, float]:
    mask = experience.response_mask
    numbers: dict[str, float] = {}
    named: dict[str, Tensor | None] = {
        "reward": experience.rewards,
        "advantage": experience.advantages,
        "return": experience.returns,
    }
    for name, column in named.items():
        if column is not None:
            numbers[f"{name} mean"] = float(masked_mean(column, mask))
            numbers[f"{name} deviation"] = math.sqrt(float(masked_variance(column, mask)))
    return numbers


def _check_flags(flags: Sequence[str], method: str) -> None:
    """Raise ConfigError for settings that would have changed the answers or the model: these are fixed."""
    sections = (method, "kl", "reward")
    for flag in flags:
        if flag.startswith("--") and flag.removeprefix("--").partition(".")[0] not in sections:
            raise ConfigError(f"flag {flag}: only {', '.join(sections)} can be changed: the answers are fixed")


def _step(run: RecordedRun, step: int | None) -> int:
    if step is not None:
        return step
    if not run.rollout_steps:
        raise ConfigError(f"{run.name} kept no answers to replay: see store.rollouts_every")
    return run.rollout_steps[-1]


def _as_json(result: Replayed) -> dict[str, Any]:
    return {
        "step": result.step,
        "policy_version": result.step - result.staleness,
        "staleness": result.staleness,
        "same_advantages": result.same_advantages,
        "largest_difference": result.largest_difference,
        "stored": result.stored_numbers,
        "replayed": result.numbers,
    }


def _table(result: Replayed) -> Table:
    title = f"step {result.step}; losses of the update's last pass over each token"
    if result.staleness:
        plural = "s" if result.staleness > 1 else ""
        version = result.step - result.staleness
        title += f"\nsampled by policy version {version}, {result.staleness} step{plural} before"
    table = Table("", "as it was", "replayed", box=None, title=title, title_justify="left")
    for name in dict.fromkeys((*result.stored_numbers, *result.numbers)):
        values = (result.stored_numbers.get(name), result.numbers.get(name))
        table.add_row(name, *("" if value is None else f"{value:.6g}" for value in values))
    return table
