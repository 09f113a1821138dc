"""A plan as a person reads it, alone before a run or beside what was measured after it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tether.plan.advice import Change
from tether.plan.measured import Measured
from tether.plan.plan import GIB, Plan
from tether.reports.safe_text import duration

COLUMNS = ("weights", "gradients", "optimizer", "activations", "cache")


def plan_text(
    plan: Plan, *, alone: Sequence[Change] = (), together: Sequence[Change] = (), measured: Measured | None = None
) -> list[RenderableType]:
    """The whole of it: memory by role, then steps, tokens and seconds, then what to change."""
    return [_roles(plan), Text(), _numbers(plan, measured), *_verdict(plan, measured), *_changes(alone, together)]


def size(number: int | float) -> str:
    """Bytes for people."""
    if number == 0:
        return ""
    if number < 2**20:
        return f"{number / 1024:.0f} KiB"
    return f"{number / 2**20:.0f} MiB" if number < GIB / 10 else f"{number / GIB:.2f} GiB"


def _roles(plan: Plan) -> Table:
    millions = plan.shape.parameters / 1e6
    count = f"{millions / 1e3:.2f} billion" if millions >= 1e3 else f"{millions:.1f} million"
    title = f"{plan.method} with {plan.model} ({count} parameters, {plan.dtype}) on {plan.machine.name}"
    table = Table("role", "what it is", *COLUMNS, box=None, title=title, title_justify="left", pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for role in plan.memory.roles:
        table.add_row(role.role, role.what, *(size(getattr(role, name)) for name in COLUMNS))
    sums = [sum(getattr(role, name) for role in plan.memory.roles) for name in COLUMNS]
    table.add_section()
    table.add_row("in all", "", *map(size, sums))
    return table


def _numbers(plan: Plan, measured: Measured | None) -> Table:
    heads = ("", "predicted") if measured is None else ("", "predicted", "measured")
    table = Table(*heads, "", box=None, pad_edge=False, show_header=measured is not None)
    rows: list[tuple[str, str, str | None, str]] = []
    found = measured
    for phase, number in plan.memory.phases.items():
        seen = found.bytes.get(phase) if found else None
        rows.append((f"memory at most, {phase}", size(number), size(seen) if seen else None, ""))
    peak = size(found.peak) if found and found.peak else None
    device = f"in the {plan.memory.peak_phase}; the device has {size(plan.machine.memory)}"
    rows.append(("memory at most", size(plan.memory.peak), peak, device))
    steps = f"{found.steps:g}" if found else None
    rows.append(("optimiser steps", str(plan.work.steps), steps, plan.work.why))
    rows.append(
        ("tokens learned from", f"{plan.work.tokens:,}", f"{found.tokens:,.0f}" if found else None, _rows(plan))
    )
    if plan.work.sampled:
        sampled = f"{found.sampled:,.0f}" if found else None
        rows.append(("of which sampled", f"{plan.work.sampled:,}", sampled, "every answer at full length"))
    for phase, seconds in (*plan.seconds.items(), ("iteration", plan.seconds_in_all)):
        took = found.seconds.get(phase) if found else None
        note = plan.machine.basis if phase == "iteration" else ""
        rows.append((f"seconds, {phase}", duration_short(seconds), duration_short(took) if took else None, note))
    for name, predicted, seen, note in rows:
        cells = (name, predicted) if measured is None else (name, predicted, seen or "-")
        table.add_row(*cells, Text(note, "dim"))
    return table


def duration_short(seconds: float) -> str:
    """Seconds with as many digits as they deserve."""
    return f"{seconds:.2f} s" if seconds < 10 else duration(seconds)


def _rows(plan: Plan) -> str:
    work, lengths = plan.work, plan.lengths
    micro = f"{plan.memory.micro_rows} rows at a time"
    if not work.prompts:
        return f"{work.rows} rows of {work.longest_row} ({lengths.source}), {micro}"
    return f"{work.rows} rows of {lengths.mean:.0f} + {work.answer_tokens} ({lengths.source}), {micro}"


def _verdict(plan: Plan, measured: Measured | None) -> list[RenderableType]:
    if measured is not None:
        return []
    left = plan.machine.usable - plan.memory.peak
    if left >= 0:
        return [Text(f"\nIt fits: {size(left)} to spare.", "green")]
    return [Text(f"\nIt does not fit: {size(-left)} too much.", "red")]


def _changes(alone: Sequence[Change], together: Sequence[Change]) -> list[RenderableType]:
    if not alone:
        return []
    table = Table(
        "change", "saves", "then", "", box=None, pad_edge=False, title="what would help", title_justify="left"
    )
    for change in alone:
        then = f"{size(change.peak)}{', fits' if change.fits else ''}"
        table.add_row(f"--{change.key} {change.value}", size(change.saves), then, Text(change.note, "dim"))
    flags = " ".join(f"--{change.key} {change.value}" for change in together)
    last = (
        f"It would fit with: {flags}" if together else "Nothing here makes it fit: take a smaller model or device more."
    )
    return [table, Text(last)]
