"""`tether runs` and `tether show`: runs, steps and answers as tables for the terminal and as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tether.errors import UsageError
from tether.reports.safe_text import duration, visible
from tether.store.database.schema import without_infinities
from tether.store.read import RunSummary, config_diff, find_run, list_runs, read_run
from tether.store.recorded import RecordedRun, StoredRollout

if TYPE_CHECKING:
    from rich.console import Console

    from tether.store.read import OpenWorkspace


def open_for(options: argparse.Namespace) -> OpenWorkspace:
    """Open the workspace that the options name, for reading."""
    from tether.store.read import open_workspace, store_of

    return open_workspace(*store_of(getattr(options, "run", ""), options.workspace))


@contextmanager
def printing() -> Iterator[Console]:
    """A console whose text is printed at the end in one piece; rich itself would exit on a closed pipe."""
    from rich.console import Console

    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if wide else 140, highlight=False)
    with console.capture() as captured:
        yield console
    print(captured.get(), end="")


# -- the list of runs ---------------------------------------------------------------------------------------------

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
            _cell_number(run.latest.get("kl_ref_k3")),
            duration(max(0.0, time.time() - run.updated)),
            escape(visible(origin(run))),
            *([escape(visible(labels_of(run)))] if labelled else []),
        )
    with printing() as console:
        if found:
            console.print(table)
        elif everything:
            console.print(f"None of the {len(everything)} runs in {opened.workspace.place} matches.", markup=False)
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
    """A run without its steps; values that are not finite are null."""
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
    """The score; without one, the loss with its name, because a higher loss is not better."""
    if "score" in run.latest:
        return _cell_number(run.latest["score"])
    name = next((name for name in ("accuracy", "loss") if name in run.latest), None)
    return "" if name is None else f"{name} {_cell_number(run.latest[name])}"


def _cell_number(value: float | None) -> str:
    return "" if value is None else "not finite" if not math.isfinite(value) else f"{value:.3g}"


# -- a run, a step, an answer -------------------------------------------------------------------------------------

SHOWN_COLUMNS = {
    "behavior_logprob": "behavior",
    "old_logprob": "old",
    "ref_logprob": "reference",
    "kl": "KL",
    "value": "value",
    "reward": "reward",
    "advantage": "advantage",
    "return": "return",
    "ratio": "ratio",
    "entropy": "entropy",
}
HIGHLIGHTS = (
    *(
        "model.path",
        "task.name",
        "task.prompts",
        "data.train",
        "run.seed",
        "run.steps",
        "roles.mode",
        "rollout.prompts_per_step",
    ),
    *("rollout.samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature", "kl.apply_to", "kl.coef"),
    *("ppo.clip_range", "ppo.epochs", "ppo.gamma", "ppo.lam", "optimizer.policy_lr", "optimizer.critic_lr"),
)
MAX_EVENTS = 12


def run_tables(summary: RunSummary, run: RecordedRun) -> list[RenderableType]:
    """A summary of a run: progress, settings, origin, last metrics, events."""
    style = STYLES.get(summary.state, "red") or "none"
    head = Text.assemble((visible(summary.name), "bold"), "  ", summary.method, "  ", (summary.state, style))
    head.append(f"  {summary.steps_done} of {summary.steps_target} steps")
    head.append(f", started {time.strftime('%Y-%m-%d %H:%M', time.localtime(summary.created))}", "dim")
    said = {"note": summary.note, "group": summary.group, "tags": ", ".join(summary.tags)}
    settings = {key: value for key in HIGHLIGHTS if (value := _setting(summary.config, key)) is not None}
    parts: list[RenderableType] = [head, *_section("notes", {name: text for name, text in said.items() if text})]
    parts += _section("settings", settings)
    parts += _section("came from", {one.role: _ancestor(one) for one in summary.lineage})
    parts += _section("made with", {name: value for name, value in summary.environment.items() if value is not None})
    last = dict(run.metrics[-1]) if run.metrics else {}
    step = last.pop("step", None)
    parts += _section(f"metrics of step {step}", {name: _number(value) for name, value in last.items()}, columns=3)
    if run.rollout_steps:
        kept = f"{len(run.rollout_steps)} steps, {run.rollout_steps[0]} to {run.rollout_steps[-1]}"
        parts += _section("answers kept", {kept: f"tether show {summary.name} --step {run.rollout_steps[-1]}"})
    return parts + _events(run, summary.created)


def diff_table(compared: Sequence[RunSummary], differing: dict[str, list[Any]]) -> Table:
    """The settings that differ, one column per run, and the last metrics of each."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("setting" if differing else "no setting differs")
    for run in compared:
        table.add_column(escape(visible(run.name)), overflow="fold")
    for key, values in differing.items():
        table.add_row(Text(key), *(Text(visible(value if isinstance(value, str) else str(value))) for value in values))
    for name in dict.fromkeys(name for run in compared for name in run.latest):
        values = [_number(run.latest[name]) if name in run.latest else "" for run in compared]
        table.add_row(Text(f"last {name}", "dim"), *values)
    return table


def _ancestor(one: Any) -> str:
    text = f"{one.source}  (run {one.run})" if one.run else one.source
    return f"{text}  sha256 {one.sha256[:16]}" if one.sha256 else text


def _events(run: RecordedRun, began: float) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    for event in run.events[-MAX_EVENTS:]:
        step = "" if event.step is None else f"step {event.step}"
        after = duration(max(0.0, event.time - began))
        table.add_row(Text(after, "dim"), Text(step), Text(visible(event.kind), "cyan"), Text(visible(event.text)))
    if not run.events:
        return []
    left = len(run.events) - MAX_EVENTS
    title = "events" if left <= 0 else f"events (the last {MAX_EVENTS} of {len(run.events)})"
    return [Text(f"\n{title}", "bold"), Padding(table, (0, 0, 0, 2), expand=False)]


def _section(title: str, rows: dict[str, Any], columns: int = 1) -> list[RenderableType]:
    """A heading and its pairs of name and value, in `columns` columns."""
    if not rows:
        return []
    table = Table.grid(padding=(0, 2))
    cells = [(Text(visible(name), "dim"), Text(visible(str(value)))) for name, value in rows.items()]
    height = math.ceil(len(cells) / columns)
    for place in range(height):
        table.add_row(*(cell for pair in cells[place::height] for cell in pair))
    return [Text(f"\n{title}", "bold"), Padding(table, (0, 0, 0, 2), expand=False)]


def _setting(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def step_table(run: RecordedRun, step: int, rollouts: Sequence[StoredRollout]) -> list[RenderableType]:
    """The answers of a step, one line each."""
    table = Table(
        title=f"{escape(visible(run.name))}, step {step}", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for heading in ("sample", "score", "KL", "advantage", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    table.add_column("prompt", no_wrap=True, ratio=1, overflow="ellipsis")
    table.add_column("answer", no_wrap=True, ratio=2, overflow="ellipsis")
    for rollout in rollouts:
        advantage = rollout.answer("advantage") if "advantage" in rollout.columns else np.zeros(0)
        table.add_row(
            str(rollout.row),
            _number(rollout.score),
            "" if rollout.kl is None else _number(float(rollout.kl.sum())),
            _number(float(advantage.mean())) if len(advantage) else "",
            str(int(rollout.columns["response"].sum())),
            visible(rollout.finish),
            Text(in_one_line(rollout.prompt_text)),
            Text(in_one_line(rollout.completion)),
        )
    return [table]


def sample_tables(run: RecordedRun, rollout: StoredRollout) -> list[RenderableType]:
    """One answer, token by token: green for a positive advantage, red for a negative one."""
    head = Text.assemble((visible(run.name), "bold"), f", step {rollout.step}, sample {rollout.row}")
    head.append(f"  score {_number(rollout.score)}, {visible(rollout.finish)}, temperature {rollout.temperature:g}")
    for name, value in rollout.parts.items():
        head.append(f"\n  {visible(name)} {_number(value)}", "dim")
    columns = dict(rollout.columns) | ({} if rollout.kl is None else {"kl": rollout.kl})
    shown = [name for name in SHOWN_COLUMNS if name in columns]
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("token", justify="right", style="dim")
    table.add_column("text", no_wrap=True, max_width=24, overflow="ellipsis")
    for name in shown:
        table.add_column(SHOWN_COLUMNS[name], justify="right", no_wrap=True)
    if "clipped" in columns:
        table.add_column("clipped")
    answer = np.flatnonzero(columns["response"]).tolist()
    largest = _largest(columns["advantage"][answer]) if "advantage" in columns else 0.0
    colours = [_colour(columns["advantage"][place], largest) if largest else "" for place in answer]
    whole = Text()
    for place, colour in zip(answer, colours, strict=True):
        piece = rollout.pieces[place] if place < len(rollout.pieces) else f"#{columns['token'][place]}"
        whole.append(visible(piece), colour)
        cells = [Text(str(place), "dim"), Text(in_one_line(piece, marks=True), colour)]
        cells += [Text(_fixed(float(columns[name][place])), colour if name == "advantage" else "") for name in shown]
        if "clipped" in columns:
            cells.append(Text("clipped" if columns["clipped"][place] else "", "yellow"))
        table.add_row(*cells)
    prompt = Text.assemble(("\nprompt  ", "bold"), visible(rollout.prompt_text))
    return [head, prompt, Text.assemble(("\nanswer  ", "bold"), whole, "\n"), table]


def _largest(advantages: Any) -> float:
    finite = np.abs(advantages[np.isfinite(advantages)])
    return float(finite.max()) if finite.size else 0.0


def _colour(advantage: float, largest: float) -> str:
    """From red through grey to green, by the advantage relative to the answer's largest."""
    if not math.isfinite(advantage):
        return "bold magenta"
    share = max(-1.0, min(1.0, float(advantage) / largest))
    strong, weak = 120 + round(110 * abs(share)), round(120 * (1 - abs(share)) + 40)
    red, green = (weak, strong) if share > 0 else (strong, weak)
    return f"rgb({red},{green},{weak})"


def in_one_line(text: str, *, marks: bool = False) -> str:
    """Text in one line; `marks` shows line ends and tabs as symbols, for a token that is only those."""
    if marks:
        return visible(text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·"))
    return " ".join(visible(text).split())


def _fixed(value: float) -> str:
    """Four decimals, so that the decimal points of a column align."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3g}"


def _number(value: float) -> str:
    """Four significant digits."""
    return str(value) if not math.isfinite(value) else f"{value:.4g}"


# -- `tether show` ------------------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> int:
    """Print a run, a step or a sample, depending on the options."""
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
    """Print the settings in which runs differ, one column per run, and their last metrics below."""
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
    """The step that the options select; None for the whole run."""
    if options.step is None and options.sample is None:
        return None
    if not run.rollout_steps:
        raise UsageError(f"--step: no answers of {run.name} were kept; `tether show {run.name}` shows its metrics")
    step = run.rollout_steps[-1] if options.step in (None, -1) else options.step
    if step not in run.rollout_steps:
        nearest = min(run.rollout_steps, key=lambda kept: abs(kept - step))
        raise UsageError(f"--step: the answers of step {step} were not kept; the nearest kept steps are {nearest}")
    return step


def _sample(rollouts: Sequence[StoredRollout], row: int | None) -> StoredRollout | None:
    if row is None:
        return None
    found = [rollout for rollout in rollouts if rollout.row == row]
    if not found:
        raise UsageError(f"--sample: step {rollouts[0].step} has samples 0 to {rollouts[-1].row}, not {row}")
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
        "policy_version": rollout.step - rollout.staleness,
        "prompt": rollout.prompt_text,
        "completion": rollout.completion,
        "finish": rollout.finish,
        "score": rollout.score,
        "parts": dict(rollout.parts),
        "temperature": rollout.temperature,
        "final_value": rollout.final_value,
    }


def rollout_as_json(rollout: StoredRollout) -> dict[str, Any]:
    """A rollout with every token column as a list, including the derived KL and the top_logprobs."""
    columns = {name: column.tolist() for name, column in rollout.columns.items()}
    if rollout.kl is not None:
        columns["kl"] = rollout.kl.tolist()
    others = {} if rollout.top_logprobs is None else {"top_logprobs": rollout.top_logprobs.at_each()}
    return rollout_head(rollout) | {"piece": list(rollout.pieces)} | columns | others
