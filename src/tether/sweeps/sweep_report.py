"""The report of a sweep: what to choose and how sure that is, effects, interactions, and the curve of each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from tether.reports.charts import Picture, group_charts, short
from tether.reports.report import Figure, NextStep, ReportContent, ReportFinding, ReportTable, write_report
from tether.sweeps.design import differing
from tether.sweeps.manifest import SweepManifest
from tether.sweeps.ranking import KeyEffect, RankedSetting, best_of, main_effects, ranked
from tether.sweeps.results import TrialResult
from tether.sweeps.sweep_pictures import effect_charts, interaction_charts, setting_curves
from tether.sweeps.sweep_table import chance_in_words, state_in_words, with_interval
from tether.sweeps.variation import in_words, shown, value_in

MAX_ROWS = 60


def write_sweep_report(
    manifest: SweepManifest, judged: Sequence[RankedSetting], results: Sequence[TrialResult]
) -> Path:
    """Write report.html and report.md into the sweep's folder; returns the path of the page."""
    return write_report(manifest.folder, sweep_content(manifest, judged, results))


def sweep_content(
    manifest: SweepManifest, judged: Sequence[RankedSetting], results: Sequence[TrialResult]
) -> ReportContent:
    """The report as values."""
    own = own_values(manifest)
    effects = sorted(main_effects(manifest, judged, own), key=lambda effect: -effect.span)
    return ReportContent(
        title=f"Sweep {manifest.name}",
        subtitle=_subtitle(manifest, results),
        headline=_headline(manifest, judged, results, own),
        findings=tuple(_finding(effect) for effect in effects if effect.best is not None) + _endings(manifest, results),
        tables=tuple(table for table in (_choices(effects), _settings(manifest, judged, own)) if table.rows),
        charts=group_charts(_pictures(manifest, judged, results, effects, own)),
        recipe_text=yaml.safe_dump(dict(manifest.recipe), sort_keys=False),
        environment=_environment(manifest),
        next_steps=_next_steps(manifest, judged),
    )


def own_values(manifest: SweepManifest) -> dict[str, Any]:
    """The recipe's own value of every varied key."""
    base = manifest.base
    return {variation.key: value_in(base, variation.key) for variation in manifest.variations}


def _pictures(
    manifest: SweepManifest,
    judged: Sequence[RankedSetting],
    results: Sequence[TrialResult],
    effects: Sequence[KeyEffect],
    own: Mapping[str, Any],
) -> list[Picture]:
    return [
        *effect_charts(manifest, judged, effects),
        *interaction_charts(manifest, judged, effects),
        *setting_curves(manifest, judged, results, own),
    ]


# -- words --------------------------------------------------------------------------------------------------------

SAMPLERS = {
    "grid": "every combination of the listed values",
    "one-at-a-time": "one key at a time, the others as in the recipe",
    "random": "settings drawn at random",
    "tpe": "settings proposed by the TPE sampler from earlier results",
}


def _subtitle(manifest: SweepManifest, results: Sequence[TrialResult]) -> str:
    done = sum(result.state == "done" for result in results)
    better = "lower" if manifest.direction == "min" else "higher"
    return (
        f"{Path(manifest.source).name}: {SAMPLERS[manifest.sampler]}; {len(manifest.settings)} settings with "
        f"{len(manifest.seeds)} seeds each, {done} of {len(results)} trials complete. A setting is judged by "
        f"{manifest.metric}, the mean over the last quarter of its steps; {better} is better. Intervals are 95 % t "
        "intervals over seeds."
    )


def _headline(
    manifest: SweepManifest, judged: Sequence[RankedSetting], results: Sequence[TrialResult], own: Mapping[str, Any]
) -> tuple[Figure, ...]:
    best = best_of(judged, manifest.direction)
    base = next((each for each in judged if dict(each.values) == dict(own)), None)
    figures: list[Figure] = []
    if best is not None and best.interval is not None:
        words = differing(best.values, own) if best is not base else "the recipe's own"
        figures.append(Figure("Best setting", short(best.interval.mean), f"{words}; {with_interval(best.interval)}"))
        figures.append(
            Figure("Chance that it is the best", chance_in_words(best.chance), "over resamples of the seeds")
        )
    if base is not None and base.interval is not None:
        figures.append(Figure("The recipe itself", short(base.interval.mean), with_interval(base.interval)))
    diverged = sum(result.state == "diverged" for result in results)
    early = len(manifest.stopped)
    detail = f"{diverged} diverged, {early} settings stopped early" if early else f"{diverged} diverged"
    figures.append(Figure("Trials", str(len(results)), detail))
    return tuple(figures)


def clearly_worse(effect: KeyEffect) -> list[RankedSetting]:
    """The values whose difference to the best has an interval above 0, or with a diverged seed."""
    return [
        each
        for each in effect.values
        if each is not effect.best
        and (each.diverged or (each.behind is not None and each.behind.low is not None and each.behind.low > 0))
    ]


def _finding(effect: KeyEffect) -> ReportFinding:
    best, worse = effect.best, clearly_worse(effect)
    assert best is not None
    level = "warning" if any(each.values[effect.key] == effect.own for each in worse) else "good"
    text = f"{effect.key}: {shown(best.values[effect.key])} is the best of {len(effect.values)}"
    text += f" (chance {chance_in_words(best.chance)}). "
    if worse:
        listed = ", ".join(f"{shown(each.values[effect.key])} ({_gap(each)})" for each in worse)
        text += f"Clearly worse: {listed}. "
    alike = [each for each in effect.values if each is not best and each not in worse]
    if alike:
        listed = ", ".join(shown(each.values[effect.key]) for each in alike)
        text += f"Not told apart from it by these seeds: {listed}. "
    if level == "warning":
        text += f"The recipe has {shown(effect.own)}."
    return ReportFinding(level if len(effect.values) > 1 else "note", text.strip())


def _gap(each: RankedSetting) -> str:
    if each.diverged:
        return f"{each.diverged} of {len(each.seeds)} seeds diverged"
    return f"by {with_interval(each.behind)}"


def _endings(manifest: SweepManifest, results: Sequence[TrialResult]) -> tuple[ReportFinding, ...]:
    """Findings about trials that did not end well."""
    found: list[ReportFinding] = []
    for state, words in (("diverged", "diverged"), ("failed", "failed; resuming tries again")):
        mine = [result for result in results if result.state == state]
        if mine:
            first, many = mine[0], f"{len(mine)} trial{'s' * (len(mine) > 1)}"
            named = f"{first.trial.name} ({in_words(manifest.settings[first.trial.setting])})"
            text = f"{many} {words}. The first is {named}: {first.reason}"
            found.append(ReportFinding("warning", text))
    left = sum(result.state not in ("done", "diverged", "early", "failed") for result in results)
    if left:
        found.append(ReportFinding("note", f"{left} trials are not complete. Values are those of the complete ones."))
    return tuple(found)


# -- tables -------------------------------------------------------------------------------------------------------


def _choices(effects: Sequence[KeyEffect]) -> ReportTable:
    rows: list[tuple[str, ...]] = []
    for effect in effects:
        best = effect.best
        if best is None or len(effect.values) < 2:
            continue
        others = [each for each in effect.values if each is not best and each.behind is not None]
        second = min(others, key=lambda each: each.behind.mean if each.behind else 0.0, default=None)
        mine = next((each for each in effect.values if each.values[effect.key] == effect.own), None)
        rows.append(
            (
                effect.key,
                shown(best.values[effect.key]),
                with_interval(best.interval),
                chance_in_words(best.chance),
                f"{shown(second.values[effect.key])}, behind by {with_interval(second.behind)}" if second else "–",
                _own_in_words(effect, mine),
            )
        )
    return ReportTable(
        "What to choose, and how sure that is",
        ("key", "choose", "value", "chance of best", "runner-up", "the recipe's own"),
        tuple(rows),
        "Keys with the largest effect first. The chance is the share of resamples of the seeds in which the value is "
        "the best of its key; with fewer than five seeds it is too sure of itself, so read the intervals too. An "
        "interval that contains 0 means that these seeds do not tell the two apart; among "
        "twenty comparisons one such interval misses by chance.",
    )


def _own_in_words(effect: KeyEffect, mine: RankedSetting | None) -> str:
    if mine is None:
        return f"{shown(effect.own)}, not run"
    if mine is effect.best:
        return "the same"
    return f"{shown(effect.own)}, behind by {with_interval(mine.behind)}"


def _settings(manifest: SweepManifest, judged: Sequence[RankedSetting], own: Mapping[str, Any]) -> ReportTable:
    rows: list[tuple[str, ...]] = []
    for each in ranked(judged, manifest.direction)[:MAX_ROWS]:
        alone = manifest.sampler == "one-at-a-time"
        name = (differing(each.values, own) if dict(each.values) != dict(own) else "the recipe itself") if alone else ""
        rows.append(
            (
                name or in_words(each.values),
                with_interval(each.interval),
                with_interval(each.behind),
                chance_in_words(each.chance),
                state_in_words(manifest, each),
            )
        )
    more = f" {len(judged) - MAX_ROWS} more are in table.json." if len(judged) > MAX_ROWS else ""
    return ReportTable(
        "All settings",
        ("setting", manifest.metric, "behind the best", "chance of best", "rests on"),
        tuple(rows),
        f"The best first. Differences are taken seed by seed.{more}",
    )


# -- the rest -----------------------------------------------------------------------------------------------------


def _environment(manifest: SweepManifest) -> dict[str, str]:
    return {
        "Sampler": manifest.sampler,
        "Seeds": ", ".join(map(str, manifest.seeds)),
        "Metric": f"{manifest.metric} ({manifest.direction})",
        "Threads of a trial": str(manifest.threads),
    }


def _next_steps(manifest: SweepManifest, judged: Sequence[RankedSetting]) -> tuple[NextStep, ...]:
    steps = [NextStep("See the runs", "Every trial is an ordinary run.", f"tether runs --group {quote(manifest.name)}")]
    best = best_of(judged, manifest.direction)
    if best is not None:
        method = manifest.recipe["method"]
        flags = " ".join(f"--{key}={quote(shown(value))}" for key, value in best.values.items())
        source = "" if manifest.source == method else f" {quote(manifest.source)}"
        command = f"tether {'control' if method == 'control' else f'train {method}'}{source} {flags}"
        steps.append(NextStep("Train with the best setting", "The recipe with these values.", command))
    if manifest.sampler != "tpe" and not manifest.prune:
        more = 2 * len(manifest.seeds)
        steps.append(
            NextStep(
                "Be surer",
                "The command of this sweep with more seeds adds them to what is there.",
                f"tether sweep {quote(manifest.source)} ... --seeds {more}",
            )
        )
    return tuple(steps)
