"""What `tether show` prints: reading is done here, the tables are in `show_text`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tether.errors import UsageError
from tether.reports.run_options import open_for, printing
from tether.reports.run_table import diff_table, run_tables, sample_tables, step_table
from tether.reports.runs_table import summary_as_json
from tether.store.database.schema import without_infinities
from tether.store.notes import config_diff
from tether.store.read import RunSummary, find_run, read_run
from tether.store.recorded import RecordedRun, StoredRollout


def show(options: argparse.Namespace) -> int:
    """Print a run, a step or a sample, as the options say."""
    if options.diff:
        return show_diff(options)
    with open_for(options) as opened:
        summary, run = find_run(opened, options.run), read_run(opened, options.run)
        step = _step(run, options)
        rollouts = run.rollouts(step) if step is not None else ()
    chosen = _sample(rollouts, options.sample)
    if options.json:
        print(json.dumps(without_infinities(_as_json(summary, run, step, rollouts, chosen))))
        return 0
    with printing() as console:
        if chosen is not None:
            parts = sample_tables(run, chosen)
        elif step is not None:
            parts = step_table(run, step, rollouts)
        else:
            parts = run_tables(summary, run)
        for part in parts:
            console.print(part)
    return 0


def show_diff(options: argparse.Namespace) -> int:
    """Print the settings in which runs differ, a column a run, and their last metrics below."""
    if options.step is not None or options.sample is not None:
        raise UsageError("--diff compares whole runs: leave --step and --sample out")
    with open_for(options) as opened:
        compared = [find_run(opened, words) for words in (options.run, *options.diff)]
    differing = config_diff([run.config for run in compared])
    if options.json:
        rows = {"runs": [summary_as_json(run) for run in compared], "differing": differing}
        print(json.dumps(without_infinities(rows)))
        return 0
    with printing() as console:
        console.print(diff_table(compared, differing))
    return 0


def _step(run: RecordedRun, options: argparse.Namespace) -> int | None:
    """The step that is meant; None for the whole run."""
    if options.step is None and options.sample is None:
        return None
    if not run.rollout_steps:
        raise UsageError(f"--step: no answers of {run.name} were kept; `tether show {run.name}` shows its metrics")
    step = run.rollout_steps[-1] if options.step in (None, -1) else options.step
    if step not in run.rollout_steps:
        nearest = min(run.rollout_steps, key=lambda kept: abs(kept - step))
        raise UsageError(f"--step: the answers of step {step} were not kept; the nearest that were are of {nearest}")
    return step


def _sample(rollouts: Sequence[StoredRollout], row: int | None) -> StoredRollout | None:
    if row is None:
        return None
    found = [rollout for rollout in rollouts if rollout.row == row]
    if not found:
        raise UsageError(f"--sample: step {rollouts[0].step} has samples 0 to {rollouts[-1].row}, and no {row}")
    return found[0]


def _as_json(
    summary: RunSummary,
    run: RecordedRun,
    step: int | None,
    rollouts: Sequence[StoredRollout],
    chosen: StoredRollout | None,
) -> dict[str, Any]:
    if chosen is not None:
        return rollout_as_json(chosen)
    if step is not None:
        return {"run": run.name, "step": step, "samples": [rollout_head(rollout) for rollout in rollouts]}
    return {
        **summary_as_json(summary),
        "config": dict(summary.config),
        "environment": dict(summary.environment),
        "metrics": dict(run.metrics[-1]) if run.metrics else {},
        "events": [dataclasses.asdict(event) for event in run.events],
        "rollout_steps": list(run.rollout_steps),
    }


def rollout_head(rollout: StoredRollout) -> dict[str, Any]:
    """A rollout without its tokens."""
    return {
        "step": rollout.step,
        "sample": rollout.row,
        "prompt_id": rollout.prompt_id,
        "group_id": rollout.group_id,
        "sample_id": rollout.sample_id,
        "prompt": rollout.prompt_text,
        "completion": rollout.completion,
        "finish": rollout.finish,
        "score": rollout.score,
        "parts": dict(rollout.parts),
        "temperature": rollout.temperature,
        "final_value": rollout.final_value,
    }


def rollout_as_json(rollout: StoredRollout) -> dict[str, Any]:
    """A rollout with every column as a list over its tokens, the derived KL and the top_logprobs included."""
    columns = {name: column.tolist() for name, column in rollout.columns.items()}
    if rollout.kl is not None:
        columns["kl"] = rollout.kl.tolist()
    others = {} if rollout.top_logprobs is None else {"top_logprobs": rollout.top_logprobs.at_each()}
    return rollout_head(rollout) | {"piece": list(rollout.pieces)} | columns | others
