"""The report of one run of any method, and a check for over-optimisation (Gao et al. 2022).

The check tells whether the true score fell behind the proxy that the policy was trained on. Both curves are smoothed
with a moving mean, and the jumps from point to point give an estimate of the noise. Only a change larger than the noise
counts, so a single lucky evaluation does not decide. The curves may have different scales and different steps.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from tether.reports.capability_table import CapabilityChange, capability_table, changes_of
from tether.reports.charts import Chart, ChartGroup, Series, drawable, group_charts, short
from tether.reports.report import Figure, NextStep, ReportContent, ReportFinding, Sample, ScorePart, write_report
from tether.reports.run_table import open_for, origin
from tether.store.read import RunSummary, find_run, read_run
from tether.store.recorded import RecordedRun, StoredRollout

# -- over-optimisation --------------------------------------------------------------------------------------------

MIN_POINTS = 6  # with fewer points in either curve there is no verdict
ERRORS = 4.0  # a change counts if it is this many standard errors of the difference of two smoothed points
PART = 0.10  # and at least this fraction of the range of the smoothed curve
LEVEL_PART = 0.25  # minimum length of a plateau, as a fraction of the run

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Smooth:
    """A smoothed curve, and the smallest difference between two of its points that counts."""

    steps: list[float]
    values: list[float]
    margin: float
    rose: bool  # from the first third of the run to its last

    def at(self, step: float) -> float:
        """The value at a step, by linear interpolation."""
        place = bisect.bisect_left(self.steps, step)
        if place == 0 or place == len(self.steps):
            return self.values[min(place, len(self.values) - 1)]
        low, high = self.steps[place - 1], self.steps[place]
        part = (step - low) / (high - low)
        return self.values[place - 1] * (1.0 - part) + self.values[place] * part

    def change(self, start: float) -> int:
        """The direction from a step to the end: 1 for a rise, -1 for a fall, 0 for neither."""
        difference = self.values[-1] - self.at(start)
        return 0 if abs(difference) <= self.margin else (1 if difference > 0.0 else -1)


Outcome = Literal["too_little", "fell", "both_fell", "never_followed", "unclear", "levelled", "kept_pace", "no_change"]


@dataclass(frozen=True)
class Judgment(ReportFinding):
    """What two curves of scores show, in a word and in a paragraph."""

    outcome: Outcome


@dataclass(frozen=True)
class ScoreNames:
    """What the two scores are called in a judgment, and what follows where the second one falls behind."""

    proxy: str = "the proxy"
    true: str = "the true score"
    over: str = "the policy is over-optimised"
    repair: str = "stop there, raise the KL coefficient, or improve the reward model"
    learned: str = "What the policy learned is not what the true rule rewards"

    @property
    def first(self) -> str:
        """The proxy at the start of a sentence."""
        return self.proxy[0].upper() + self.proxy[1:]

    @property
    def second(self) -> str:
        """The true score at the start of a sentence."""
        return self.true[0].upper() + self.true[1:]


def judge_overoptimisation(proxy: Curve, true: Curve, names: ScoreNames = ScoreNames()) -> Judgment:  # noqa: B008 (frozen)
    """The verdict on over-optimisation from two curves of (step, score); the numbers in it are smoothed."""
    proxy, true = _known(proxy), _known(true)
    if min(len(proxy), len(true)) < MIN_POINTS:
        return Judgment(
            "note",
            f"Too little data to judge over-optimisation. It takes at least {MIN_POINTS} measurements of both scores, "
            f"and there are {len(proxy)} of {names.proxy} and {len(true)} of {names.true}.",
            "too_little",
        )
    start, end = max(proxy[0][0], true[0][0]), min(proxy[-1][0], true[-1][0])
    if start >= end:
        return Judgment(
            "note",
            "Too little data to judge over-optimisation. The two scores were not measured over the same steps.",
            "too_little",
        )
    near, far = _smooth(proxy), _smooth(true)
    peak = max(range(len(far.values)), key=lambda place: far.values[place])
    if far.change(far.steps[peak]) < 0:
        return _fell(near, far, peak, names)
    if near.rose and not far.rose:
        return _did_not_follow(near, far, start, names)
    if near.rose and (levelled := _levelled_at(near, far)) is not None:
        return Judgment(
            "note",
            f"{names.second} began to fall behind {names.proxy}: it levelled off at about {short(far.values[-1])} from "
            f"step {_step(levelled)}. Since then only {names.proxy} has risen, from {_span(near, levelled)}, so more "
            f"steps improve nothing but {names.proxy}. {names.second} has not fallen ({_margin(far)}).",
            "levelled",
        )
    if far.rose:
        return Judgment(
            "good",
            f"{names.second} kept pace with {names.proxy}. {names.second} rose from {_span(far, start)}; {names.proxy} "
            f"went from {_span(near, start)}. {names.second} ends near its peak ({_margin(far)}).",
            "kept_pace",
        )
    return Judgment(
        "note",
        f"Neither score moved by more than its noise, so over-optimisation cannot be judged. {names.first} went from "
        f"{_span(near, start)} ({_margin(near)}), {names.true} from {_span(far, start)} "
        f"({_margin(far)}).",
        "no_change",
    )


def _fell(near: _Smooth, far: _Smooth, peak: int, names: ScoreNames) -> Judgment:
    """The verdict if the true score ends well below its peak."""
    step, top, last = far.steps[peak], far.values[peak], far.values[-1]
    fall = (
        f"fell, smoothed, from its peak of {short(top)} at step {_step(step)} to {short(last)} at step "
        f"{_step(far.steps[-1])}, a loss of {short(top - last)} ({_margin(far)})"
    )
    direction = near.change(step)
    if direction < 0:
        return Judgment(
            "warning",
            f"Both scores fell, so this is not over-optimisation: training became unstable. {names.second} {fall}; "
            f"{names.proxy} fell over the same steps from {_span(near, step)}. Look at KL, entropy and the learning "
            "rate.",
            "both_fell",
        )
    went = "kept rising" if direction > 0 else "held"
    return Judgment(
        "warning",
        f"{names.second} fell behind {names.proxy}: {names.over}. {names.second} {fall}, while {names.proxy} "
        f"{went}, from {_span(near, step)}. The best model is near step {_step(step)}: {names.repair}.",
        "fell",
    )


def _did_not_follow(near: _Smooth, far: _Smooth, start: float, names: ScoreNames) -> Judgment:
    """The verdict if only the proxy clearly rose."""
    rose = f"{names.first} rose from {_span(near, start)}, {names.true} went from {_span(far, start)}"
    if far.values[-1] - far.at(start) > far.margin / 2.0:
        return Judgment(
            "note",
            f"{names.second} seems to follow {names.proxy}, but the change is within the noise. {rose} "
            f"({_margin(far)}). Use more held-out prompts or more evaluations to decide.",
            "unclear",
        )
    return Judgment(
        "warning",
        f"{names.second} fell behind {names.proxy}: it never followed. {rose} ({_margin(far)}). {names.learned}.",
        "never_followed",
    )


def _levelled_at(near: _Smooth, far: _Smooth) -> float | None:
    """The step from which the true score stayed level while the proxy still rose; None if there is none.

    Had the true score kept pace, its gain since any step would be the same fraction of its total gain as the proxy's.
    The result is the step with the largest shortfall. The shortfall must exceed the noise, and the gain since that step
    must not.
    """
    first, end = max(near.steps[0], far.steps[0]), far.steps[-1]
    whole, true_whole = near.values[-1] - near.at(first), far.values[-1] - far.at(first)
    steps = [step for step in far.steps if step >= first and end - step >= LEVEL_PART * (end - first)]
    if whole <= 0.0 or true_whole <= 0.0 or not steps:
        return None
    gained = {step: far.values[-1] - far.at(step) for step in steps}
    lack = {step: true_whole * (near.values[-1] - near.at(step)) / whole - gained[step] for step in steps}
    step = max(lack, key=lambda step: lack[step])
    stood = lack[step] > far.margin and abs(gained[step]) <= far.margin and near.change(step) > 0
    return step if stood else None


def _known(curve: Curve) -> list[tuple[float, float]]:
    """The finite points in order of step; the last one of a step that occurs twice."""
    return sorted({float(step): float(value) for step, value in curve if drawable(step) and drawable(value)}.items())


def _smooth(curve: list[tuple[float, float]]) -> _Smooth:
    """A centred moving mean over about an eighth of the points, at least three; shorter at the ends.

    The noise is estimated from second differences, in which a constant slope cancels: their mean square is 6 σ². A
    difference of two means of w points then has the standard error σ √(2/w); at the ends w is the shorter count. With
    few differences the estimate is uncertain, so σ is increased.
    """
    steps, raw = [step for step, _ in curve], [value for _, value in curve]
    half = max(1, len(raw) // 16)
    values = [_mean(raw[max(0, place - half) : place + half + 1]) for place in range(len(raw))]
    bends = [one - 2.0 * two + three for one, two, three in zip(raw, raw[1:], raw[2:], strict=False)]
    noise = math.sqrt(_mean([bend * bend for bend in bends]) / 6.0) * (1.0 + 2.0 / len(bends))
    error = noise * math.sqrt(1.0 / (half + 1) + 1.0 / (2 * half + 1))
    reach = max(values) - min(values)
    third = len(raw) // 3
    gain = _mean(raw[-third:]) - _mean(raw[:third])
    rose = gain > max(ERRORS * noise * math.sqrt(2.0 / third), PART * reach)
    return _Smooth(steps, values, max(ERRORS * error, PART * reach), rose)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _span(curve: _Smooth, step: float) -> str:
    return f"{short(curve.at(step))} at step {_step(step)} to {short(curve.values[-1])}"


def _margin(curve: _Smooth) -> str:
    return f"a change counts from {short(curve.margin)}" if curve.margin > 0.0 else "any change counts"


def _step(step: float) -> str:
    return f"{step:,.0f}" if step == int(step) else short(step)


# -- the report ---------------------------------------------------------------------------------------------------

BETTER, NEAR, SAFE, FAST = (
    "Did it get better?",
    "Is it still near the start?",
    "Did it learn safely?",
    "Where did the time go?",
)
CURVES: tuple[tuple[str, str, str, str, str], ...] = (
    (BETTER, "score", "Score", "mean per step", "The score that the policy was trained on."),
    (BETTER, "held_out/score", "Held-out score", "mean", "On prompts that are never trained on."),
    (BETTER, "accuracy", "Accuracy", "share of pairs", "Pairs ranked as in the data."),
    (BETTER, "loss", "Loss", "mean per step", ""),
    (NEAR, "kl_ref_k3", "KL to the reference", "nats per answer", "How far the policy has moved."),
    (NEAR, "kl_coef", "KL coefficient", "", "The weight of the KL penalty."),
    (NEAR, "response_length", "Length of answers", "tokens", ""),
    (SAFE, "entropy", "Entropy", "nats per token", "A fall to zero is mode collapse."),
    (SAFE, "clip_fraction", "Clip fraction", "share of tokens", "Tokens whose gradient the clip removed."),
    (SAFE, "explained_variance", "Explained variance", "of returns", "1 is a perfect critic, 0 predicts nothing."),
    (SAFE, "approx_kl", "KL to the sampler", "nats per token", "How far one update moves."),
    (SAFE, "grad_norm/policy", "Gradient of the policy", "norm", ""),
    (SAFE, "grad_norm/critic", "Gradient of the critic", "norm", ""),
    (SAFE, "truncated", "Answers cut off", "share of answers", "They reached the length limit."),
    (FAST, "seconds/step", "Seconds per step", "seconds", ""),
    (FAST, "seconds/rollout", "Seconds of sampling", "seconds", ""),
)
MAX_SAMPLES = 8
MAX_ERRORS = 5  # of each kind
STEPS_LOOKED_AT = 5  # kept steps at either end of the run that are searched for answers to the same prompt


def report(options: argparse.Namespace) -> int:
    """Write the report of the run that the options name."""
    with open_for(options) as opened:
        summary, run = find_run(opened, options.run), read_run(opened, options.run)
        folder = Path(options.to).expanduser() if options.to else summary.folder
        page = write_report(folder, run_content(summary, run))
    print(json.dumps({"report": str(page)}) if options.json else f"Report: {page}")
    return 0


def run_content(summary: RunSummary, run: RecordedRun) -> ReportContent:
    """The content of a run's report."""
    came_from, changes = origin(summary), changes_of(run)
    return ReportContent(
        title=f"Run {summary.name}",
        subtitle=f"{summary.method}, {summary.steps_done} of {summary.steps_target} steps, {summary.state}."
        + (f" It started from {came_from}." if came_from else ""),
        headline=headline(run),
        findings=findings(summary, run),
        charts=charts(run),
        tables=(capability_table(changes),) if changes else (),
        samples=samples(run),
        recipe_text=yaml.safe_dump(dict(summary.config), sort_keys=False),
        environment={name: str(value) for name, value in summary.environment.items() if value is not None},
        next_steps=next_steps(summary, run),
        before_name="In the first steps",
        after_name="In the last steps",
    )


def points(run: RecordedRun, name: str) -> tuple[tuple[float, float], ...]:
    """One metric by step, without values that are not finite."""
    return tuple((float(step), value) for step, value in zip(*run.column(name), strict=True) if math.isfinite(value))


def headline(run: RecordedRun) -> tuple[Figure, ...]:
    """First and last values of the most important metrics."""
    names = {"score": "Score", "held_out/score": "Held-out score", "accuracy": "Accuracy", "loss": "Loss"}
    figures: list[Figure] = []
    for name, label in names.items():
        found = points(run, name)
        if found and not (name == "loss" and figures):  # the loss is not informative for RL
            few = max(1, len(found) // 20)
            first, last = (sum(value for _, value in part) / few for part in (found[:few], found[-few:]))
            figures.append(Figure(label, f"{short(first)} → {short(last)}", f"mean of the first and the last {few}"))
    if found := points(run, "kl_ref_k3"):
        figures.append(Figure("KL to the reference", short(found[-1][1]), "nats per answer, last step"))
    if found := points(run, "response_length"):
        figures.append(Figure("Length of answers", short(found[-1][1]), f"tokens; {short(found[0][1])} at first"))
    return tuple(figures[:4])


def findings(summary: RunSummary, run: RecordedRun) -> tuple[ReportFinding, ...]:
    """The findings about a run, in words."""
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
    if changes := changes_of(run):
        found.append(capability_finding(changes))
    broken = sorted({name for row in run.metrics for name, value in row.items() if not math.isfinite(value)})
    if broken:
        found.append(ReportFinding("warning", f"Some values were not finite: {', '.join(broken[:8])}."))
    return tuple(found)


def capability_finding(changes: Sequence[CapabilityChange]) -> ReportFinding:
    """Whether the suite of capabilities found a loss."""
    lost = [change for change in changes if change.is_loss]
    if not lost:
        return ReportFinding("good", f"No loss of capability was found. The suite compared {len(changes)} metrics.")
    words = "; ".join(f"{each.label}: {each.texts[2]}" for each in lost)
    return ReportFinding(
        "warning",
        f"The policy lost capability. It got worse in {len(lost)} of {len(changes)} metrics of the suite ({words}). "
        "Raise kl.coef, lower optimizer.policy_lr, or mix in text with ptx.data.",
    )


def charts(run: RecordedRun) -> tuple[ChartGroup, ...]:
    """The curves that the run has points for, grouped by question."""
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
    """Answers to prompts that occur both early and late, among the steps whose answers were kept."""
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
    """Suggestions for what to do next."""
    steps: list[NextStep] = []
    if (summary.folder / "model").is_dir() and summary.method not in ("reward", "control"):
        steps.append(NextStep("Talk to it", "Chat with the final model of the run.", f"tether chat {summary.folder}"))
    if run.rollout_steps:
        command = f"tether show {summary.name} --step {run.rollout_steps[-1]} --sample 0"
        steps.append(NextStep("Look at an answer", "Token by token, with its advantages.", command))
    export = f"tether export {summary.name} --metrics metrics.csv"
    return (*steps, NextStep("Use it elsewhere", "Metrics, answers or the model, for other tools.", export))
