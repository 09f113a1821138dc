"""A plan as a table, alone before a run or beside the measured values after it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tether.plan.plan import GIB, Change, Plan
from tether.reports.safe_text import duration

PHASES = ("rollout", "scores", "evaluation", "update")


class Measured:
    """Means over the iterations seen; the first, which compiles and warms up, counts only if it is the only one."""

    def __init__(self, *, on_cpu: bool) -> None:
        self.iterations = 0
        self.peak = 0
        self.bytes: dict[str, int] = {}
        self._sums: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._base = _reset_process_peak() if on_cpu else None

    def see(self, metrics: Mapping[str, float]) -> None:
        """Add one iteration."""
        taken = ("seconds/", "tokens/")
        numbers = {name: value for name, value in metrics.items() if name == "steps" or name.startswith(taken)}
        if self.iterations == 0:
            self._first = numbers
        else:
            for name, value in numbers.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
        self.iterations += 1
        for phase in PHASES:
            if (gib := metrics.get(f"memory/{phase}")) is not None:
                self.bytes[phase] = max(self.bytes.get(phase, 0), round(gib * GIB))
        self.peak = max(self.bytes.values(), default=0)

    def finish(self) -> None:
        """Read the peak memory of the process, where there is no device to ask."""
        if self._base is not None:
            self.peak = max(0, _process_peak() - self._base)

    def mean(self, name: str) -> float:
        """The mean of one metric over the iterations."""
        count = self.iterations - 1
        return self._sums.get(name, 0.0) / count if count > 0 else self._first.get(name, 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase and of an iteration."""
        found = {phase: self.mean(f"seconds/{phase}") for phase in PHASES}
        return {phase: took for phase, took in found.items() if took} | {"iteration": self.mean("seconds/step")}

    @property
    def steps(self) -> float:
        """Optimizer steps per iteration."""
        return self.mean("steps")

    @property
    def tokens(self) -> float:
        """Tokens trained on per iteration."""
        return self.mean("tokens/learned")

    @property
    def sampled(self) -> float:
        """Tokens sampled per iteration."""
        return self.mean("tokens/sampled")

    def as_json(self) -> dict[str, Any]:
        """Plain data, sizes in bytes."""
        return {
            "iterations": self.iterations,
            "peak_bytes": self.peak,
            "phase_bytes": self.bytes,
            "optimizer_steps": self.steps,
            "tokens": {"learned_from": self.tokens, "sampled": self.sampled},
            "seconds": self.seconds,
        }


def _reset_process_peak() -> int:
    """Reset Linux's peak memory of the process; returns its current memory in bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS") or _process_peak()


def _process_peak() -> int:
    """The peak memory of the process."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM") or (most if sys.platform == "darwin" else most * 1024)


def _status(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


COLUMNS = ("weights", "gradients", "optimizer", "activations", "cache")


def plan_text(
    plan: Plan, *, alone: Sequence[Change] = (), together: Sequence[Change] = (), measured: Measured | None = None
) -> list[RenderableType]:
    """The whole report: memory by role, then steps, tokens and seconds, then what to change."""
    return [_roles(plan), Text(), _numbers(plan, measured), *_verdict(plan, measured), *_changes(alone, together)]


def size(number: int | float) -> str:
    """Bytes as text for people."""
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
    table.add_row("total", "", *map(size, sums))
    return table


def _numbers(plan: Plan, measured: Measured | None) -> Table:
    heads = ("", "predicted") if measured is None else ("", "predicted", "measured")
    table = Table(*heads, "", box=None, pad_edge=False, show_header=measured is not None)
    rows: list[tuple[str, str, str | None, str]] = []
    found = measured
    for phase, number in plan.memory.phases.items():
        seen = found.bytes.get(phase) if found else None
        rows.append((f"peak memory, {phase}", size(number), size(seen) if seen else None, ""))
    peak = size(found.peak) if found and found.peak else None
    device = f"in the {plan.memory.peak_phase}; the device has {size(plan.machine.memory)}"
    rows.append(("peak memory", size(plan.memory.peak), peak, device))
    steps = f"{found.steps:g}" if found else None
    rows.append(("optimizer steps", str(plan.work.steps), steps, plan.work.why))
    rows.append(("tokens trained on", f"{plan.work.tokens:,}", f"{found.tokens:,.0f}" if found else None, _rows(plan)))
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
    """Seconds with a suitable number of digits."""
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
        f"It would fit with: {flags}"
        if together
        else "No change here makes it fit: use a smaller model or more memory."
    )
    return [table, Text(last)]
