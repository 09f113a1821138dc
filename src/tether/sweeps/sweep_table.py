"""The settings of a sweep as a table for the terminal, or as JSON; this module needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tether.files import read_plain_json, unsealed
from tether.reports.charts import short
from tether.sweeps.manifest import SweepManifest
from tether.sweeps.ranking import RankedSetting, judge_settings, ranked
from tether.sweeps.results import read_results
from tether.sweeps.student_t import MeanInterval
from tether.sweeps.variation import in_words, shown

TABLE = "table.json"
MAX_ROWS = 30  # on a terminal; the report has all


def with_interval(interval: MeanInterval | None, sign: str = "") -> str:
    """`0.81 [0.74, 0.88]`; the mean alone where there is one seed."""
    if interval is None:
        return "–"
    mean = f"{sign if interval.mean > 0 else ''}{short(interval.mean)}"
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} [{short(interval.low)}, {short(interval.high)}]"


def state_in_words(manifest: SweepManifest, judged: RankedSetting) -> str:
    """What the value of a setting rests on."""
    if judged.state == "early":
        return f"stopped after {manifest.stopped[judged.number]} steps"
    known = sum(value is not None for value in judged.seeds)
    if judged.state == "unfinished":
        return f"{known} of {len(judged.seeds)} seeds"
    return f"{judged.diverged} of {len(judged.seeds)} diverged" if judged.diverged else f"{known} seeds"


def chance_in_words(chance: float | None) -> str:
    """A chance in percent; never quite 0 or 1."""
    if chance is None:
        return "–"
    return "<1 %" if 0 < chance < 0.01 else ">99 %" if 0.99 < chance < 1 else f"{100 * chance:.0f} %"


def print_sweep(manifest: SweepManifest, *, json_output: bool) -> int:
    """Print the settings, the best first."""
    if json_output:
        print(json.dumps(unsealed(read_plain_json(manifest.folder / TABLE))))
        return 0
    from tether.sweeps.run_sweep import open_results

    with open_results(manifest) as opened:
        judged = judge_settings(manifest, read_results(opened, manifest))
    console = Console(highlight=False)
    console.print(_table(manifest, ranked(judged, manifest.direction)))
    if len(judged) > MAX_ROWS:
        console.print(f"and {len(judged) - MAX_ROWS} more: see the report")
    return 0


def _table(manifest: SweepManifest, rows: Sequence[RankedSetting]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    keys = [variation.key for variation in manifest.variations]
    wide = len(keys) <= 3
    for name in keys if wide else ["setting"]:
        table.add_column(name)
    table.add_column(f"{manifest.metric} [95 %]", no_wrap=True)
    table.add_column("behind the best", no_wrap=True)
    table.add_column("chance of best", justify="right")
    table.add_column("rests on", no_wrap=True)
    base = manifest.settings[0] if manifest.sampler == "one-at-a-time" else {}
    for each in rows[:MAX_ROWS]:
        changed = {key: value for key, value in each.values.items() if value != base.get(key)}
        cells = [shown(each.values[key]) for key in keys] if wide else [in_words(changed)]
        figures = [with_interval(each.interval), with_interval(each.behind), chance_in_words(each.chance)]
        table.add_row(*cells, *figures, state_in_words(manifest, each))
    return table
