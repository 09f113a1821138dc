"""The report of one run, whatever its method: what it measured, in curves and plain words."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import yaml

from tether.reports.chart_scale import short
from tether.reports.charts import Chart, ChartGroup, Series, group_charts
from tether.reports.overoptimisation import judge_overoptimisation
from tether.reports.report import Figure, NextStep, ReportContent, ReportFinding, Sample, ScorePart, write_report
from tether.reports.run_options import open_for
from tether.reports.runs_table import origin
from tether.store.read import RunSummary, find_run, read_run
from tether.store.recorded import RecordedRun, StoredRollout

BETTER, NEAR, SAFE, FAST = (
    "Did it get better?",
    "Is it still near the start?",
    "Did it learn safely?",
    "Where did the time go?",
)
CURVES: tuple[tuple[str, str, str, str, str], ...] = (
    (BETTER, "score", "Score", "a step's mean", "What the policy was trained on."),
    (BETTER, "held_out/score", "Held-out score", "mean", "On prompts that are never trained on."),
    (BETTER, "accuracy", "Accuracy", "share of pairs", "Pairs ranked as the data has them."),
    (BETTER, "loss", "Loss", "a step's mean", ""),
    (NEAR, "kl_ref_k3", "KL to the reference", "nats an answer", "How far the policy has moved."),
    (NEAR, "kl_coef", "KL coefficient", "", "How strongly it is held."),
    (NEAR, "response_length", "Length of answers", "tokens", ""),
    (SAFE, "entropy", "Entropy", "nats a token", "A fall to zero is mode collapse."),
    (SAFE, "clip_fraction", "Clip fraction", "share of tokens", "Tokens whose step was cut short."),
    (SAFE, "explained_variance", "Explained variance", "of returns", "1 is a perfect critic, 0 knows nothing."),
    (SAFE, "approx_kl", "KL to the sampler", "nats a token", "How far one update moves."),
    (SAFE, "grad_norm/policy", "Gradient of the policy", "norm", ""),
    (SAFE, "grad_norm/critic", "Gradient of the critic", "norm", ""),
    (SAFE, "truncated", "Answers cut off", "share of answers", "They ran into the length limit."),
    (FAST, "seconds/step", "Seconds a step", "seconds", ""),
    (FAST, "seconds/rollout", "Seconds of sampling", "seconds", ""),
)
MAX_SAMPLES = 8
MAX_ERRORS = 5  # of each kind
STEPS_LOOKED_AT = 5  # kept steps at either end of the run in which answers to one prompt are looked for


def report(options: argparse.Namespace) -> int:
    """Write the report of the run that the options name."""
    with open_for(options) as opened:
        summary, run = find_run(opened, options.run), read_run(opened, options.run)
        folder = Path(options.to).expanduser() if options.to else summary.folder
        page = write_report(folder, run_content(summary, run))
    print(json.dumps({"report": str(page)}) if options.json else f"Report: {page}")
    return 0


def run_content(summary: RunSummary, run: RecordedRun) -> ReportContent:
    """What the report of a run says."""
    came_from = origin(summary)
    return ReportContent(
        title=f"Run {summary.name}",
        subtitle=f"{summary.method}, {summary.steps_done} of {summary.steps_target} steps, {summary.state}."
        + (f" It started from {came_from}." if came_from else ""),
        headline=headline(run),
        findings=findings(summary, run),
        charts=charts(run),
        samples=samples(run),
        recipe_text=yaml.safe_dump(dict(summary.config), sort_keys=False),
        environment={name: str(value) for name, value in summary.environment.items() if value is not None},
        next_steps=next_steps(summary, run),
        before_name="In the first steps",
        after_name="In the last steps",
    )


def points(run: RecordedRun, name: str) -> tuple[tuple[float, float], ...]:
    """One metric by step, where it was finite."""
    return tuple((float(step), value) for step, value in zip(*run.column(name), strict=True) if math.isfinite(value))


def headline(run: RecordedRun) -> tuple[Figure, ...]:
    """First and last values of what matters most."""
    names = {"score": "Score", "held_out/score": "Held-out score", "accuracy": "Accuracy", "loss": "Loss"}
    figures: list[Figure] = []
    for name, label in names.items():
        found = points(run, name)
        if found and not (name == "loss" and figures):  # of RL, the loss says nothing
            few = max(1, len(found) // 20)
            first, last = (sum(value for _, value in part) / few for part in (found[:few], found[-few:]))
            figures.append(Figure(label, f"{short(first)} → {short(last)}", f"mean of the first and the last {few}"))
    if found := points(run, "kl_ref_k3"):
        figures.append(Figure("KL to the reference", short(found[-1][1]), "nats an answer, last step"))
    if found := points(run, "response_length"):
        figures.append(Figure("Length of answers", short(found[-1][1]), f"tokens; {short(found[0][1])} at first"))
    return tuple(figures[:4])


def findings(summary: RunSummary, run: RecordedRun) -> tuple[ReportFinding, ...]:
    """What the run showed, in words."""
    found: list[ReportFinding] = []
    proxy, truth = points(run, "score"), points(run, "held_out/score") or points(run, "reward/true")
    if len(truth) > 2 and proxy:
        found.append(judge_overoptimisation(points(run, "reward/proxy") or proxy, truth))
    if summary.steps_done < summary.steps_target:
        text = f"The run is not finished. It has {summary.steps_done} of {summary.steps_target} steps."
        found.append(ReportFinding("note", text))
    for kind, words in (("failed", "The run ended with an error"), ("reward", "The reward could not score an answer")):
        told = [event for event in run.events if event.kind == kind]
        found += [
            ReportFinding("warning", f"{words} at step {event.step}. {event.text}") for event in told[-MAX_ERRORS:]
        ]
    broken = sorted({name for row in run.metrics for name, value in row.items() if not math.isfinite(value)})
    if broken:
        found.append(ReportFinding("warning", f"Some values were not finite. They are of {', '.join(broken[:8])}."))
    return tuple(found)


def charts(run: RecordedRun) -> tuple[ChartGroup, ...]:
    """The curves that the run has points for, by the question they answer."""
    drawn: list[Chart] = []
    for question, name, title, unit, note in CURVES:
        curve = points(run, name)
        if curve and not (name == "loss" and points(run, "score")):
            series = (Series(title.lower(), curve),)
            drawn.append(Chart(title=title, question=question, series=series, y_label=unit, note=note))
    parts = sorted({name for row in run.metrics for name in row if name.startswith("reward/")})
    if len(parts) > 1:
        every = tuple(Series(name.removeprefix("reward/"), points(run, name)) for name in parts)
        drawn.insert(1, Chart(title="Parts of the score", question=BETTER, series=every, note="Before their weights."))
    return group_charts(drawn)


def samples(run: RecordedRun) -> tuple[Sample, ...]:
    """Answers to prompts that came up both early and late, among the steps whose answers were kept."""
    early = _by_prompt(run, run.rollout_steps[:STEPS_LOOKED_AT])
    late = _by_prompt(run, run.rollout_steps[STEPS_LOOKED_AT:][-STEPS_LOOKED_AT:][::-1])
    both = [(early[prompt], late[prompt]) for prompt in early if prompt in late]
    stride = max(1, math.ceil(len(both) / MAX_SAMPLES))
    return tuple(
        Sample(
            prompt=first.prompt_text,
            before=first.completion.strip(),
            after=last.completion.strip(),
            before_score=first.score,
            after_score=last.score,
            parts=tuple(
                ScorePart(name, first.parts[name], last.parts[name]) for name in first.parts if name in last.parts
            ),
        )
        for first, last in both[::stride]
    )


def _by_prompt(run: RecordedRun, steps: Sequence[int]) -> dict[str, StoredRollout]:
    found: dict[str, StoredRollout] = {}
    for step in steps:
        for rollout in run.rollouts(step):
            found.setdefault(rollout.prompt_id, rollout)
    return found


def next_steps(summary: RunSummary, run: RecordedRun) -> tuple[NextStep, ...]:
    """What to look at next."""
    steps: list[NextStep] = []
    if (summary.folder / "model").is_dir() and summary.method != "reward":
        steps.append(NextStep("Talk to it", "The model that the run ended with.", f"tether chat {summary.folder}"))
    if run.rollout_steps:
        command = f"tether show {summary.name} --step {run.rollout_steps[-1]} --sample 0"
        steps.append(NextStep("Look at an answer", "Token by token, with its advantages.", command))
    export = f"tether export {summary.name} --metrics metrics.csv"
    return (*steps, NextStep("Take it elsewhere", "Metrics, answers or the model, for other tools.", export))
