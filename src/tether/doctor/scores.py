"""Audits of the reward: can the policy learn from it, and does a higher score mean better answers?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tether.doctor.findings import (
    Curve,
    Finding,
    Healthy,
    TooLittle,
    Verdict,
    algorithm,
    curve,
    percent,
    rows_per_step,
    solved,
)
from tether.reports.charts import short
from tether.reports.run_report import MIN_POINTS, ScoreNames, judge_overoptimisation
from tether.store.recorded import RecordedRun

MIN_STEPS = 10  # iterations before a change of the score is more than chance
FELL_PART = 0.3  # fraction of the gain that was lost: less is a fluctuation
FELL_ERRORS = 4.0  # standard errors of a smoothed point

SLOW_OR_NOT = 20  # measurements below which a slowly rising true score looks constant

MIN_SPREADS = 5
NO_SPREAD = 1e-6
LITTLE_SPREAD = 0.02  # fraction of the run's usual spread (its upper quartile, robust against one extreme batch)
RELATIVE_SPREAD = 1e-3  # fraction of the score itself: scores that differ only in the third digit
FLAT_PART = 0.8  # fraction of the last third of the steps that are flat
FLAT_GROUPS = 0.9  # fraction of the groups without any advantage

SOME_FAILURES = 0.001
MANY_FAILURES = 0.01  # fraction of all answers: a loss that biases training
MAX_FAILURES = 0.05  # half of reward.max_failure_rate's default, at which a run stops

FEW_PROMPTS = 8  # in a whole run
REPEATED = 0.25  # fraction of a step's prompts that are distinct

HELD_OUT = ScoreNames(
    proxy="the training score",
    true="the held-out score",
    over="the policy is over-fitted to its prompts",
    repair="stop there, or train on more prompts",
    learned="What the policy learned holds for its prompts only",
)

WHY_OVER = (
    "The proxy only approximates the true score. Once the true score turns, every further step makes answers worse "
    "and the proxy better (Gao et al. 2022)."
)
WHY_HELD_OUT = "What is learned only on the training prompts is memorized and does not help on other prompts."
WHY_COLLAPSE = "A run that falls this far rarely recovers; each further step trains on the answers of a broken policy."
WHY_FLAT = (
    "Advantages are differences between scores. If all scores are alike there are none: the gradient is noise, "
    "amplified by whitening."
)
WHY_FAILURES = (
    "Answers without a score are left out. If the reward fails on a certain kind of answer, that kind is never scored."
)
WHY_PROMPTS = "The policy sees the same questions over and over: it learns the answers, not how to answer."


def over_optimisation(run: RecordedRun) -> Verdict:
    """Does the true score follow the proxy that is trained on?"""
    score, judged = _points(curve(run, "score")), list[str]()
    for name in true_scores(run.config):
        true = curve(run, name)
        if min(len(score), len(true)) < MIN_POINTS:
            continue
        said = judge_overoptimisation(score, _points(true))
        if said.outcome in ("fell", "never_followed"):  # score_collapse reports that both fell
            unsure = said.outcome == "never_followed" and len(true) < SLOW_OR_NOT
            return Finding(
                "over-optimisation",
                "note" if unsure else "warning",
                "The true score does not follow the proxy",
                f"{said.text} (The proxy is score, the true score is {name}.)",
                WHY_OVER,
                (
                    "evaluation.every: keep the model from before the turn (evaluation.keep_best)",
                    "kl.coef: raise it",
                    "reward.parts: a better reward model, or a part for the rule that only the true score has",
                    "run.steps: fewer",
                ),
                name,
                true.first_step,
                true.last_step,
            )
        judged.append(name)
    if judged:
        return Healthy(f"{', '.join(judged)} against score: no sign of it")
    return TooLittle(f"{MIN_POINTS} steps with a reward part of weight 0, which is measured and not trained on")


def true_scores(config: Mapping[str, Any]) -> Iterator[str]:
    """The metrics of the reward's parts of weight 0, which are only measured."""
    reward = config.get("reward")
    for part in reward.get("parts", ()) if isinstance(reward, Mapping) else ():
        if isinstance(part, Mapping) and part.get("weight") == 0:
            yield f"reward/{part.get('name') or part.get('kind')}"


def held_out(run: RecordedRun) -> Verdict:
    """Do answers to held-out prompts improve too?"""
    score, other = curve(run, "score"), curve(run, "held_out/score")
    if min(len(score), len(other)) < MIN_POINTS:
        return TooLittle(f"{MIN_POINTS} evaluations on held-out prompts (evaluation.every)")
    said = judge_overoptimisation(_points(score), _points(other), HELD_OUT)
    if said.outcome not in ("fell", "never_followed"):
        return Healthy(f"held-out score from {short(other.start)} to {short(other.end)}")
    return Finding(
        "held-out",
        "warning",
        "Held-out prompts do not improve with training prompts",
        said.text,
        WHY_HELD_OUT,
        (
            "task.prompts: more prompts, and more varied ones",
            "kl.coef: raise it",
            "run.steps: fewer; evaluation.keep_best keeps the best model",
        ),
        "held_out/score",
        other.first_step,
        other.last_step,
    )


def score_collapse(run: RecordedRun) -> Verdict:
    """Did the run lose what it had learned?"""
    score = curve(run, "score")
    if len(score) < MIN_STEPS:
        return TooLittle(f"score of {MIN_STEPS} iterations")
    smooth = score.smooth()
    peak = int(smooth.argmax())
    fall, gain = float(smooth[peak] - score.end), float(smooth[peak] - score.start)
    error = FELL_ERRORS * score.noise() * (2.0 / score.span) ** 0.5
    spread = curve(run, "score_std")
    wobble = max(FELL_PART * gain, 0.5 * float(spread.values.mean()) if len(spread) and gain <= 0.0 else 0.0)
    if fall <= error or fall <= wobble:
        return Healthy(f"score from {short(score.start)} to {short(score.end)}, best {short(float(smooth[peak]))}")
    return Finding(
        "score-collapse",
        "alarm" if fall > max(gain, 0.0) else "warning",
        "The score has fallen from its maximum",
        f"Smoothed, it fell from {short(float(smooth[peak]))} at step {int(score.steps[peak])} to {short(score.end)} "
        f"at step {score.last_step}, a loss of {short(fall)} (a change counts from {short(error)}).",
        WHY_COLLAPSE,
        (
            "optimizer.policy_lr: lower it, by a factor of three to ten",
            "optimizer.schedule: linear, so that late steps are small",
            f"{algorithm(run)}.target_kl: 0.02 stops an update before it goes too far",
            "kl.coef: raise it",
            f"go back to step {int(score.steps[peak])}: tether fork, or evaluation.keep_best",
        ),
        "score",
        int(score.steps[peak]),
        score.last_step,
    )


def flat_scores(run: RecordedRun) -> Verdict:
    """Do scores differ enough to learn from?"""
    spread, score, groups = curve(run, "score_std"), curve(run, "score"), curve(run, "zero_std_groups")
    if len(spread) < MIN_SPREADS or len(score) != len(spread):
        return TooLittle(f"score_std of {MIN_SPREADS} iterations")
    largest, usual = float(spread.values.max()), float(np.quantile(spread.values, 0.75))
    bound = np.maximum(NO_SPREAD, np.maximum(LITTLE_SPREAD * usual, RELATIVE_SPREAD * np.abs(score.values)))
    late = len(spread) - max(MIN_SPREADS, len(spread) // 3)
    flat = float((spread.values <= bound)[late:].mean())
    no_groups = len(groups) >= 2 and float(np.median(groups.half().values)) > FLAT_GROUPS
    if flat < FLAT_PART and not no_groups:
        return Healthy(f"scores spread by {short(spread.end)} around {short(score.end)}")
    if score.rose() or solved(run):
        return Healthy(f"all scores are now alike, at {short(score.end)}: the task is solved")
    if flat >= FLAT_PART:
        saw = (
            f"In {percent(flat)} of the last {len(spread) - late} steps all scores were practically equal: they spread "
            f"by {short(spread.end)} around {short(score.end)}."
        )
    else:
        saw = f"In the second half {percent(float(np.median(groups.half().values)))} of the groups had equal scores."
    return Finding(
        "flat-scores",
        "alarm" if largest <= NO_SPREAD else "warning",
        "Scores hardly differ",
        saw,
        WHY_FLAT,
        (
            "reward.parts: a reward with more than one value; partial credit where all answers fail",
            "reward.clip: raise it, if it clips all scores to the same value",
            "task.prompts: easier prompts if none is solved, harder ones if all are",
            "rollout.temperature: 1.0, so that samples differ",
        ),
        "score_std",
        int(spread.steps[late]),
        spread.last_step,
    )


def reward_failures(run: RecordedRun) -> Verdict:
    """How many answers could not be scored, and why?"""
    counts = {name: curve(run, name) for name in _failure_names(run)}
    if not counts:
        return TooLittle("dropped/unscored: the run has no rewards that could fail")
    lost = max(counts.values(), key=lambda found: float(found.values.sum()))
    number, asked = float(lost.values.sum()), rows_per_step(run) * max(len(run.metrics), 1)
    rate = number / asked
    if number < 3 or rate < SOME_FAILURES:
        return Healthy(f"{number:.0f} of {asked} answers without a score")
    reasons = {name: float(found.values.sum()) for name, found in counts.items() if "/failed/" in name}
    known = ", ".join(f"{name.removeprefix('reward/')} {total:.0f}" for name, total in sorted(reasons.items()))
    worst = int(lost.values.argmax())
    return Finding(
        "reward-failures",
        "alarm" if rate >= MAX_FAILURES else "warning" if rate >= MANY_FAILURES else "note",
        "The reward fails on some answers",
        f"{number:.0f} of {asked} answers ({percent(rate)}) have no score; the maximum is at step "
        f"{int(lost.steps[worst])} with {float(lost.values[worst]):.0f}" + (f". By reason: {known}." if known else "."),
        WHY_FAILURES,
        (
            "reward.parts: fix the part that fails; give remote parts a longer timeout and more retries",
            "reward.max_failure_rate: lower it, if a run should stop sooner",
        ),
        lost.name,
        lost.first_step,
        lost.last_step,
    )


def _failure_names(run: RecordedRun) -> list[str]:
    return [
        name for name in run.series if name == "dropped/unscored" or (name.startswith("reward/") and "/failed" in name)
    ]


def few_prompts(run: RecordedRun) -> Verdict:
    """Are there enough different prompts?"""
    distinct, asked = curve(run, "prompts/distinct"), curve(run, "prompts/asked")
    if not len(distinct) or len(asked) != len(distinct) or float(asked.values.max()) < FEW_PROMPTS:
        return TooLittle(f"the prompts of a step with {FEW_PROMPTS} or more (stored rollouts)")
    seen = {rollout.prompt_id for step in run.rollout_steps for rollout in run.rollouts(step)}
    most = max(1, len(seen), int(distinct.values.max()))
    own = float(np.median(distinct.values / np.maximum(asked.values, 1.0)))
    if most > FEW_PROMPTS and own > REPEATED:
        return Healthy(f"{int(distinct.values.max())} different prompts in a step of {int(asked.values.max())}")
    passes = len(run.metrics) * float(asked.values.mean()) / most
    return Finding(
        "few-prompts",
        "warning",
        "There are too few different prompts",
        f"A step has {asked.end:.0f} prompts, of which {distinct.end:.0f} are different; the run has seen {most}, each "
        f"about {passes:.0f} times.",
        WHY_PROMPTS,
        (
            "task.prompts: a file with hundreds of prompts or more",
            f"rollout.prompts_per_step: no more than there are prompts (a step has {asked.end:.0f})",
        ),
        "prompts/distinct",
        distinct.first_step,
        distinct.last_step,
    )


def _points(found: Curve) -> list[tuple[float, float]]:
    return [(float(step), float(value)) for step, value in zip(found.steps, found.values, strict=True)]
