"""The report of a pipeline: the true score against the proxy, round by round, as a picture and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tether.config.pipeline_recipe import Pipeline
from tether.config.recipes import RLRecipe
from tether.files import read_plain_json, unsealed
from tether.pipeline.answers import task_with
from tether.pipeline.measure_rounds import TRUE, read_measured
from tether.pipeline.order import StagePlaces
from tether.pipeline.stage_context import DONE
from tether.reports.charts import Chart, Mark, Series, group_charts
from tether.reports.environment_rows import environment_rows
from tether.reports.report import (
    Figure,
    NextStep,
    ReportContent,
    ReportFinding,
    ReportTable,
    Sample,
    write_report,
)
from tether.store.read import open_workspace, read_run

ROUNDS, STEPS, RATERS = "Did the rounds help?", "What happened within the rounds?", "Can the reward model be trusted?"
TRUE_METRIC = "reward/true"
MAX_SAMPLES = 6

Figures = Mapping[str, Any]


def summarise(places: StagePlaces, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The figures that a script needs: one entry for each round, and those of each stage."""
    rounds: list[dict[str, Any]] = []
    for number in range(places.pipeline.settings.rounds + 1):
        measured = read_measured(places.root, number)
        if measured is not None:
            rounds.append(_round(measured))
    stages = {step.folder: stage_figures(places.folder(step)) for step in places.steps}
    return {
        "pipeline": places.pipeline.settings.name,
        "rounds": rounds,
        "stages": {name: figures for name, figures in stages.items() if figures},
        "policy": places.policy_before(places.pipeline.settings.rounds + 1),
        "seconds": dict(seconds),
        "seed": places.pipeline.settings.seed,
    }


def stage_figures(folder: Path) -> dict[str, Any]:
    """What a stage noted: of sampling, or the evaluation of a reward model."""
    for name in (DONE, "report.json"):
        try:
            found = read_plain_json(folder / name)
            return dict(unsealed(found)) if name == DONE else {"accuracy": found["accuracy"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def _round(measured: Figures) -> dict[str, Any]:
    metrics = measured.get("metrics", {})
    found: dict[str, Any] = {"round": measured["round"]}
    for name, key in ((TRUE, "true_score"), ("kl_k3", "kl"), ("length", "length"), ("ended", "ended")):
        if name in metrics:
            found[key] = metrics[name]["value"]
            found[f"{key}_interval"] = [metrics[name]["low"], metrics[name]["high"]]
    for key in ("proxy", "agreement"):
        if measured.get(key):
            found[key] = {name: value["value"] for name, value in measured[key].items()}
    return found


def write_pipeline_report(places: StagePlaces, summary: Mapping[str, Any]) -> Path:
    """Write report.html and report.md into the pipeline's folder; returns the page's path."""
    pipeline, rounds = places.pipeline, summary["rounds"]
    stages = ", ".join(stage.name for stage in pipeline.each_round)
    content = ReportContent(
        title=f"{pipeline.settings.name}: {pipeline.settings.rounds} rounds",
        subtitle=f"Each round ran {stages}. Round 0 is the policy before the rounds; the true score and the KL are of "
        "answers to held-out prompts, which no stage trains on.",
        headline=headline(rounds),
        findings=findings(rounds),
        tables=tables(rounds),
        charts=group_charts([*round_charts(rounds), *step_charts(places), *rater_charts(rounds)]),
        samples=samples(places),
        stages=tuple(summary["seconds"].items()),
        recipe_text=yaml.safe_dump(pipeline.record(), sort_keys=False),
        environment=environment_rows(pipeline.settings.seed),
        next_steps=next_steps(places),
        before_name="Before the rounds",
        after_name=f"After round {pipeline.settings.rounds}",
    )
    return write_report(places.root, content)


def headline(rounds: Sequence[Figures]) -> tuple[Figure, ...]:
    """The numbers to look at first."""
    scored = [each for each in rounds if "true_score" in each]
    if not scored:
        return ()
    first, last = scored[0], scored[-1]
    low, high = last["true_score_interval"]
    figures = [
        Figure(
            "True score",
            f"{first['true_score']:.2f} → {last['true_score']:.2f}",
            f"{low:.2f} to {high:.2f} after round {last['round']}",
        ),
        Figure("KL to the first reference", f"{last['kl']:.1f}", "nats per answer"),
    ]
    if "after" in last.get("agreement", {}):
        figures.append(
            Figure("Agreement with held-out ratings", f"{last['agreement']['after']:.0%}", "the last reward model")
        )
    return tuple(figures)


def findings(rounds: Sequence[Figures]) -> tuple[ReportFinding, ...]:
    """One sentence for each round: did the true score follow the proxy?"""
    found: list[ReportFinding] = []
    for before, after in pairwise(rounds):
        if "true_score" not in before or "true_score" not in after:
            continue
        gain = after["true_score"] - before["true_score"]
        low, high = after["true_score_interval"]
        clear = not low <= before["true_score"] <= high
        word = "rose" if gain > 0 else "fell" if gain < 0 else "stayed the same"
        level = "good" if clear and gain > 0 else "warning" if clear and gain < 0 else "note"
        text = f"Round {after['round']}: the true score {word}, {before['true_score']:.2f} → {after['true_score']:.2f}."
        proxy = after.get("proxy", {})
        if "before" in proxy:
            text += f" Its reward model scored the policy {proxy['before']:.2f} before and {proxy['after']:.2f} after."
            if proxy["after"] > proxy["before"] and gain <= 0:
                level = "warning" if clear else "note"
                text += " The proxy rose and the true score did not."
        found.append(ReportFinding(level, text))
    return tuple(found)


def tables(rounds: Sequence[Figures]) -> tuple[ReportTable, ...]:
    """Every figure by round."""
    columns = ("Round", "True score", "95 % interval", "KL to the first reference", "Proxy before", "Proxy after")
    columns += ("Agreement before refresh", "after refresh", "Length")

    def cell(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    rows = tuple(
        (
            str(each["round"]),
            cell(each.get("true_score"), ".3f"),
            " to ".join(cell(end) for end in each.get("true_score_interval", ())),
            cell(each.get("kl")),
            cell(each.get("proxy", {}).get("before")),
            cell(each.get("proxy", {}).get("after")),
            cell(each.get("agreement", {}).get("before"), ".0%"),
            cell(each.get("agreement", {}).get("after"), ".0%"),
            cell(each.get("length"), ".1f"),
        )
        for each in rounds
    )
    note = (
        "Proxy: the score of the round's own reward model on the policy before and after the round. Agreement: the "
        "share of this round's held-out pairs that the last round's reward model and this round's order as the raters."
    )
    return (ReportTable("Round by round", columns, rows, note),) if rows else ()


def round_charts(rounds: Sequence[Figures]) -> list[Chart]:
    """The true score against the proxy, and both by round."""
    scored = [each for each in rounds if "true_score" in each]
    if not scored:
        return []
    ends = tuple(
        Series(
            f"round {after['round']}",
            ((after["proxy"]["before"], before["true_score"]), (after["proxy"]["after"], after["true_score"])),
        )
        for before, after in pairwise(scored)
        if "before" in after.get("proxy", {})
    )
    by_round = tuple((float(each["round"]), each["true_score"]) for each in scored)
    bounds = [tuple((float(each["round"]), each["true_score_interval"][end]) for each in scored) for end in (0, 1)]
    found = [
        Chart(
            title="True score by round",
            question=ROUNDS,
            series=(Series("mean", by_round), Series("lower end", bounds[0]), Series("upper end", bounds[1])),
            x_label="round",
            y_label="true score",
            note="With the ends of its 95 % interval. Nothing was trained on it.",
        ),
        Chart(
            title="True score against KL",
            question=ROUNDS,
            series=(Series("rounds", tuple((each["kl"], each["true_score"]) for each in scored)),),
            x_label="KL to the first reference, nats per answer",
            y_label="true score",
            note="One corner per round; a true score that falls as the KL grows is over-optimization.",
        ),
    ]
    if ends:
        chart = Chart(
            title="True score against proxy",
            question=ROUNDS,
            series=ends,
            x_label="score of the round's reward model",
            y_label="true score",
            note="One line per round, from the policy before it to the policy after it, both scored by the reward "
            "model of that round. A line that goes right and not up is a proxy that was exploited.",
        )
        found.insert(0, chart)
    return found


def step_charts(places: StagePlaces) -> list[Chart]:
    """Proxy, true score and KL over the steps of every RL stage, one round after another."""
    steps = [step for step in places.steps if step.round and isinstance(step.stage.settings, RLRecipe)]
    if not steps:
        return []
    points: dict[str, list[tuple[float, float]]] = {TRUE_METRIC: [], "score": [], "kl_ref_k3": []}
    marks: list[Mark] = []
    offset = 0.0
    with open_workspace(places.root.parent) as opened:
        for step in steps:
            rows = [dict(row) for row in read_run(opened, f"{places.root.name}/{step.folder}").metrics]
            marks.append(Mark("x", offset, f"round {step.round}"))
            for name, curve in points.items():
                curve += [(offset + float(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
            offset += len(rows)
    drawn = (
        ("True score of the training answers", "reward/true; it has no weight.", "true score", TRUE_METRIC),
        ("Score of the training answers", "What the policy was trained on.", "score", "score"),
        ("KL to the reference", "To the reference of the stage (kl.reference).", "nats per answer", "kl_ref_k3"),
    )
    return [
        Chart(
            title=title,
            question=STEPS,
            series=(Series("mean", tuple(points[name])),),
            x_label="RL steps, all rounds",
            y_label=label,
            note=note,
            marks=tuple(marks),
        )
        for title, note, label, name in drawn
        if points[name]
    ]


def rater_charts(rounds: Sequence[Figures]) -> list[Chart]:
    """Agreement of the reward models with held-out ratings, before and after the refresh."""
    series = tuple(
        Series(
            name,
            tuple(
                (float(each["round"]), each["agreement"][key]) for each in rounds if key in each.get("agreement", {})
            ),
        )
        for key, name in (("after", "this round's reward model"), ("before", "the last round's"))
    )
    series = tuple(each for each in series if each.points)
    if not series:
        return []
    return [
        Chart(
            title="Agreement with held-out ratings",
            question=RATERS,
            series=series,
            x_label="round",
            y_label="share of pairs",
            note="On the ratings of the round that no reward model was trained on. One half is chance.",
            y_range=(None, 1.0),
        )
    ]


def samples(places: StagePlaces) -> tuple[Sample, ...]:
    """Answers before the rounds and after them, evenly spaced over the prompts."""
    first, last = (read_measured(places.root, number) for number in (0, places.pipeline.settings.rounds))
    if first is None or last is None or "answers" not in first or "answers" not in last:
        return ()
    texts = _prompt_texts(places.pipeline)
    each = places.pipeline.settings.truth.samples
    before, after = first["answers"][::each], last["answers"][::each]  # the first answer to every prompt
    stride = max(1, -(-len(before) // MAX_SAMPLES))

    def score(side: Figures, place: int) -> float | None:
        """The score of the answer; with several answers only their mean is known."""
        return side["true_scores"][place] if each == 1 else None

    return tuple(
        Sample(
            prompt=texts.get(before[place]["id"], ""),
            before=before[place]["text"].strip(),
            after=after[place]["text"].strip(),
            before_score=score(first, place),
            after_score=score(last, place),
        )
        for place in range(0, len(before), stride)
    )


def _prompt_texts(pipeline: Pipeline) -> dict[str, str]:
    return {prompt.id: prompt.messages[-1]["content"] for prompt in task_with(pipeline.settings.task).held_out()}


def next_steps(places: StagePlaces) -> tuple[NextStep, ...]:
    """Suggestions, with commands."""
    settings = places.pipeline.settings
    last, first = places.policy_before(settings.rounds + 1), places.policy_before(1)
    found = [
        NextStep(
            "Add rounds",
            "The rounds that are done stay as they are.",
            f"tether resume {places.root} --rounds {settings.rounds + 1}",
        )
    ]
    if last and first and last != first:
        found.insert(0, NextStep("Talk to it", "The result beside its start.", f"tether chat {last} --compare {first}"))
    return tuple(found)
