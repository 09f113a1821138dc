"""The demo's report and summary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tether.demo.pipeline import Judged
from tether.demo.rule import PARTS, rule_score
from tether.reports.charts import Chart, ChartGroup, Series, group_charts
from tether.reports.environment_rows import environment_rows
from tether.reports.report import Figure, NextStep, ReportContent, ReportFinding, Sample, ScorePart, write_report
from tether.reports.run_report import judge_overoptimisation

if TYPE_CHECKING:
    from tether.demo.pipeline import DemoRun

BETTER, NEAR, SAFE, TRUST = (
    "Did it get better?",
    "Is it still near the start?",
    "Did it learn safely?",
    "Can the reward model be trusted?",
)


def write_demo_report(run: DemoRun, judged: Judged) -> tuple[Path, dict[str, Any]]:
    """Write report.html and report.md into the demo's folder; returns the page's path and the summary."""
    summary = summarise(run, judged)
    steps = run.metrics("ppo")
    content = ReportContent(
        title="A small model learns to answer briefly and to the point",
        subtitle=f"{run.recipe.sft.model.path} went through supervised fine-tuning, a reward model and PPO. The "
        f"answers below are to {run.recipe.judging.prompts} prompts that no stage has seen.",
        headline=headline(run, judged, summary),
        findings=findings(run, judged, steps),
        charts=charts(run, steps),
        samples=samples(run, judged),
        stages=tuple(run.seconds.items()),
        recipe_text=yaml.safe_dump(run.recipe.model_dump(mode="json"), sort_keys=False),
        environment=environment_rows(run.recipe.seed),
        next_steps=next_steps(run),
        before_name="After SFT",
        after_name="After PPO",
    )
    return write_report(run.places.root, content), summary


def summarise(run: DemoRun, judged: Judged) -> dict[str, Any]:
    """The figures that a script needs."""
    rate = judged.win_rate.rate
    report = run.reward_report()
    return {
        "reward_model_accuracy": report["accuracy"],
        "reward_model_accuracy_interval": report["accuracy_interval"],
        "win_rate": rate.value,
        "win_rate_interval": [rate.low, rate.high],
        "wins": judged.win_rate.wins,
        "losses": judged.win_rate.losses,
        "ties": judged.win_rate.ties,
        "true_score": {"sft": judged.before.metrics["true"].value, "ppo": judged.after.metrics["true"].value},
        "kl": judged.after.metrics["kl_k3"].value,
        "preferences": run.preferences,
        "seconds": run.seconds,
        "seed": run.recipe.seed,
    }


def headline(run: DemoRun, judged: Judged, summary: dict[str, Any]) -> tuple[Figure, ...]:
    """The four numbers to look at first."""
    low, high = summary["win_rate_interval"]
    before, after = summary["true_score"].values()
    accuracy_low, accuracy_high = summary["reward_model_accuracy_interval"]
    return (
        Figure(
            "Win rate over the SFT model",
            f"{summary['win_rate']:.0%}",
            f"{low:.0%} to {high:.0%}, {run.recipe.judging.prompts} unseen prompts, by the true rule",
        ),
        Figure("True score", f"{before:.2f} → {after:.2f}", "mean over the same prompts; the maximum is 1"),
        Figure(
            "Reward model accuracy",
            f"{summary['reward_model_accuracy']:.0%}",
            f"{accuracy_low:.0%} to {accuracy_high:.0%} on held-out pairs",
        ),
        Figure("KL to the start", f"{judged.after.metrics['kl_k3'].value:.1f}", "nats per answer"),
    )


def findings(run: DemoRun, judged: Judged, steps: list[dict[str, Any]]) -> tuple[ReportFinding, ...]:
    """The findings as text, over-optimization first."""
    found: list[ReportFinding] = [judge_overoptimisation(points(steps, "reward/proxy"), points(steps, "reward/true"))]
    for name in PARTS:
        before, after = (side.metrics[f"true/{name}"].value for side in (judged.before, judged.after))
        level = "good" if after > before + 0.02 else "warning" if after < before - 0.1 else "note"
        word = name.replace("_", " ")
        found.append(ReportFinding(level, f"{word.capitalize()}: {before:.0%} → {after:.0%}, a mean over the answers."))
    agreement = run.preferences["agrees_with_rule"]
    found.append(
        ReportFinding(
            "note",
            f"The rater makes mistakes: {1 - agreement:.0%} of its choices went against its own rule. The reward "
            "model was trained on them unchanged.",
        )
    )
    return tuple(found)


def points(steps: list[dict[str, Any]], name: str) -> tuple[tuple[float, float], ...]:
    """One metric by step, at the steps where it was measured."""
    return tuple((float(step["step"]), float(step[name])) for step in steps if step.get(name) is not None)


def charts(run: DemoRun, steps: list[dict[str, Any]]) -> tuple[ChartGroup, ...]:
    """Curves grouped by the question they answer."""

    def curve(question: str, title: str, note: str, y_label: str, **names: str) -> Chart:
        series = tuple(Series(label, points(steps, metric)) for label, metric in names.items())
        return Chart(title=title, question=question, series=series, y_label=y_label, note=note)

    report = run.reward_report()
    margins = tuple(((b["from"] + b["to"]) / 2, b["count"]) for b in report["margins"])
    calibration = tuple((b["predicted"], b["observed"]) for b in report["calibration"])
    drawn = [
        curve(BETTER, "True score", "The rater's rule; the policy is not trained on it.", "0 to 1", true="reward/true"),
        curve(BETTER, "Proxy score", "What the policy was trained on.", "reward model", proxy="reward/proxy"),
        curve(NEAR, "KL to the SFT model", "How far the policy has moved.", "nats per answer", kl="kl_ref_k3"),
        curve(NEAR, "Length of answers", "In tokens.", "tokens", length="response_length"),
        curve(SAFE, "Entropy", "A fall to zero is mode collapse.", "nats per token", entropy="entropy"),
        curve(SAFE, "Clip fraction", "Tokens whose ratio was clipped.", "share of tokens", clipped="clip_fraction"),
        curve(
            SAFE,
            "Explained variance",
            "1 is a perfect critic, 0 is no better than the mean.",
            "of returns",
            critic="explained_variance",
        ),
        curve(SAFE, "Answers cut off", "They reached the length limit.", "share of answers", truncated="truncated"),
        Chart(
            title="Margins on held-out pairs",
            question=TRUST,
            series=(Series("pairs", margins, "bars"),),
            y_label="pairs",
            x_label="score of better minus score of worse",
            note="Left of 0 the reward model is wrong.",
        ),
        Chart(
            title="Is its confidence calibrated?",
            question=TRUST,
            series=(Series("held-out pairs", calibration, "dots"),),
            y_label="accuracy",
            x_label="confidence",
            note="On the line, accuracy equals confidence.",
            diagonal=True,
        ),
    ]
    return group_charts(drawn)


def samples(run: DemoRun, judged: Judged) -> tuple[Sample, ...]:
    """Answers side by side, evenly spaced over the prompts, not selected."""
    pairs = list(zip(judged.before.rollouts, judged.after.rollouts, strict=True))
    stride = max(1, math.ceil(len(pairs) / max(1, run.recipe.judging.samples_shown)))
    shown = []
    for before, after in pairs[::stride]:
        first, second = rule_score(before), rule_score(after)
        shown.append(
            Sample(
                prompt=before.prompt.messages[-1]["content"],
                before=before.completion.strip(),
                after=after.completion.strip(),
                before_score=first.value,
                after_score=second.value,
                parts=tuple(ScorePart(name.replace("_", " "), first.parts[name], second.parts[name]) for name in PARTS),
            )
        )
    return tuple(shown)


def next_steps(run: DemoRun) -> tuple[NextStep, ...]:
    """Suggestions for using it with your own data."""
    after, before = run.places.model("ppo"), run.places.model("sft")
    return (
        NextStep("Talk to it", "The result beside its start.", f"tether chat {after} --compare {before}"),
        NextStep("Be the rater yourself", "Choose between answers at the terminal.", "tether demo --human"),
        NextStep(
            "See it go wrong",
            "Without the KL penalty and with five times the steps the proxy is over-optimized, and the report says so.",
            f"tether demo --ppo.kl.coef 0 --ppo.run.steps {5 * run.recipe.ppo.run.steps} --name over",
        ),
        NextStep(
            "Use your own data",
            "Demonstrations and preferences are JSONL, JSON, CSV or Parquet (docs/data.md); each stage is a recipe.",
            "tether train sft --model.path MODEL --data.train demonstrations.jsonl\n"
            "tether train reward --model.path runs/sft/model --data.train preferences.jsonl",
        ),
    )
