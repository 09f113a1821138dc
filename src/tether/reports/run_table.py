"""A run, a step and an answer as tables for the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tether.reports.runs_table import STYLES
from tether.reports.safe_text import duration, visible
from tether.store.read import RunSummary
from tether.store.recorded import RecordedRun, StoredRollout

SHOWN_COLUMNS = {
    "behavior_logprob": "behaviour",
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
    """A run in short: how far it came, what it was told, where it came from, what it measured last, what happened."""
    style = STYLES.get(summary.state, "red") or "none"
    head = Text.assemble((visible(summary.name), "bold"), "  ", summary.method, "  ", (summary.state, style))
    head.append(f"  {summary.steps_done} of {summary.steps_target} steps")
    head.append(f", begun {time.strftime('%Y-%m-%d %H:%M', time.localtime(summary.created))}", "dim")
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
    """The settings in which runs differ, a column a run; then what each measured last."""
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
    """A heading and its pairs of name and value, in so many columns side by side."""
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
    """The answers of a step, a line each."""
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
    """One answer, token by token: green where the advantage says more of this, red where it says less."""
    head = Text.assemble((visible(run.name), "bold"), f", step {rollout.step}, sample {rollout.row}")
    head.append(f"  score {_number(rollout.score)}, {visible(rollout.finish)}, temperature {rollout.temperature:g}")
    for name, value in rollout.parts.items():
        head.append(f"\n  {visible(name)} {_number(value)}", "dim")
    columns = dict(rollout.columns) | ({} if rollout.kl is None else {"kl": rollout.kl})
    shown = [name for name in SHOWN_COLUMNS if name in columns]
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("token", justify="right", style="dim")
    table.add_column("piece", no_wrap=True, max_width=24, overflow="ellipsis")
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
    """From red over grey to green, as strong as the advantage is beside the answer's largest."""
    if not math.isfinite(advantage):
        return "bold magenta"
    share = max(-1.0, min(1.0, float(advantage) / largest))
    strong, weak = 120 + round(110 * abs(share)), round(120 * (1 - abs(share)) + 40)
    red, green = (weak, strong) if share > 0 else (strong, weak)
    return f"rgb({red},{green},{weak})"


def in_one_line(text: str, *, marks: bool = False) -> str:
    """Text in one line; `marks` shows line ends and tabs as signs, for a token that is nothing else."""
    if marks:
        return visible(text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·"))
    return " ".join(visible(text).split())


def _fixed(value: float) -> str:
    """Four places, so that a column's points stand below one another."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.3g}"


def _number(value: float) -> str:
    """Four digits, and no more places than they need."""
    return str(value) if not math.isfinite(value) else f"{value:.4g}"
