"""A list of runs, for people as a table and for programs as JSON."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tether.reports.run_options import open_for, printing
from tether.reports.safe_text import duration, visible
from tether.store.database.schema import without_infinities
from tether.store.read import RunSummary, list_runs

STYLES = {"running": "green", "done": "", "stopped": "yellow", "interrupted": "yellow", "failed": "red"}


def print_runs(options: argparse.Namespace) -> int:
    """Print every run of a workspace."""
    with open_for(options) as opened:
        everything = list_runs(opened)
    found = [run for run in everything if is_wanted(run, options.tag or (), options.group)]
    if options.json:
        print(json.dumps([summary_as_json(run) for run in found]))
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("run", "method", "state"):
        table.add_column(heading, no_wrap=heading == "run")
    for heading in ("steps", "score", "KL", "age"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("came from")
    labelled = any(run.tags or run.group for run in found)
    if labelled:
        table.add_column("group and tags")
    for run in found:
        style = STYLES.get(run.state, "red")
        table.add_row(
            escape(visible(run.name)),
            escape(run.method),
            f"[{style}]{escape(run.state)}[/{style}]" if style else escape(run.state),
            f"{run.steps_done}/{run.steps_target}",
            _score(run),
            _number(run.latest.get("kl_ref_k3")),
            duration(max(0.0, time.time() - run.updated)),
            escape(visible(origin(run))),
            *([escape(visible(labels_of(run)))] if labelled else []),
        )
    with printing() as console:
        if found:
            console.print(table)
        elif everything:
            console.print(f"None of the {len(everything)} runs in {opened.workspace.place} fits.", markup=False)
        else:
            console.print(f"No runs in {opened.workspace.place} yet.", markup=False)
    return 0


def is_wanted(run: RunSummary, tags: Sequence[str], group: str | None) -> bool:
    """Whether a run has all of these tags and is in this group."""
    return set(tags) <= set(run.tags) and group in (None, run.group)


def labels_of(run: RunSummary) -> str:
    """The group and the tags of a run, in one line."""
    return "  ".join([*([run.group] if run.group else []), *(f"#{tag}" for tag in run.tags)])


def summary_as_json(run: RunSummary) -> dict[str, Any]:
    """A run without its steps; what was not finite is null."""
    return {
        "name": run.name,
        "method": run.method,
        "state": run.state,
        "steps_done": run.steps_done,
        "steps_target": run.steps_target,
        "created": run.created,
        "updated": run.updated,
        "latest": without_infinities(dict(run.latest)),
        "lineage": [
            {"role": one.role, "source": one.source, "run": one.run, "sha256": one.sha256} for one in run.lineage
        ],
        "folder": str(run.folder),
        "note": run.note,
        "tags": list(run.tags),
        "group": run.group,
    }


def origin(run: RunSummary) -> str:
    """The runs that this one was made from, or else the model."""
    runs = [f"{one.run} ({one.role})" for one in run.lineage if one.run]
    models = [one.source for one in run.lineage if one.role == "model"]
    return ", ".join(runs or models)


def _score(run: RunSummary) -> str:
    """The score; where there is none, the loss by name, for more of it is not better."""
    if "score" in run.latest:
        return _number(run.latest["score"])
    name = next((name for name in ("accuracy", "loss") if name in run.latest), None)
    return "" if name is None else f"{name} {_number(run.latest[name])}"


def _number(value: float | None) -> str:
    return "" if value is None else "not finite" if not math.isfinite(value) else f"{value:.3g}"
