"""Audits of the log-probs: do sampler and trainer agree, how old are answers, is the KL to the reference valid?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tether.config.kl_settings import START
from tether.doctor.findings import (
    Curve,
    Finding,
    Healthy,
    Severity,
    TooLittle,
    Verdict,
    curve,
    percent,
    rows_per_step,
    setting,
)
from tether.reports.charts import short
from tether.store.recorded import RecordedRun, StoredRollout

# Nats per token, (warning, alarm). In float32 both sides agree to 1e-6, and a ratio that is 5 % off before the update
# is a quarter of the usual clip range. In bfloat16 each side rounds every layer in its own order: a healthy run showed
# 0.04, and since old log-probs come from the trainer, this biases no ratio.
GAPS = {"float32": (0.01, 0.05), "bfloat16": (0.1, 0.25)}
FIRST_RATIO = 1e-3  # the trainer against itself: the same rows in the same shapes must give a ratio of 1
TOKENS_SHOWN = 5

MIN_KL = 5  # iterations with a KL
NEGATIVE_PART = 0.3  # a KL below 0 in this fraction of the iterations is more than chance
SURE = 3.0  # standard errors below 0 that chance does not explain
CUT_GAP = 1e-3  # nats per token by which top-p or top-k changed the sampling distribution
MOVED = 1e-7  # KL(old || new) above which the policy has certainly moved
FIRST_KL = 0.02  # nats per token at step 0, where the reference still equals the policy

WHY_MISMATCH = (
    "PPO divides the new policy by the one that sampled. If sampler and trainer disagree before the first update, the "
    "ratio does not start at 1: the clip acts on the disagreement, and the gradient is that of another policy."
)
WHY_NEGATIVE = (
    "A KL divergence is never below 0. If its estimate is, the penalty rewards the policy for moving away, or a "
    "controller lowers its weight for the wrong reason."
)


def rollout_mismatch(run: RecordedRun) -> Verdict:
    """Is the ratio 1 before the first update?"""
    gap = _fresh(run, curve(run, "logprob_diff"))
    first = curve(run, "first_approx_kl")
    if not len(gap) and not len(first):
        return TooLittle("logprob_diff: the run records no log-probs of the sampler")
    if len(first) and math.sqrt(2.0 * max(float(first.values.max()), 0.0)) > FIRST_RATIO:
        return _trainer_disagrees_with_itself(first)
    if not len(gap):
        return Healthy("the trainer agrees with itself on the first minibatch")
    mean, worst = float(np.median(gap.values)), int(gap.values.argmax())
    warning, alarm = _gaps_that_count(run)
    if mean <= warning:
        return Healthy(f"sampler and trainer differ by {short(mean)} nats per token (it counts from {warning})")
    off = percent(math.expm1(min(mean, 10.0)))
    peak = _fresh(run, curve(run, "logprob_diff_max"))
    largest = f", and by up to {short(float(peak.values.max()))} at one token" if len(peak) else ""
    rollouts = [rollout for rollout in _last_rollouts(run) if not rollout.staleness]
    return Finding(
        "rollout-mismatch",
        "alarm" if mean > alarm else "warning",
        "Sampler and trainer disagree about the same tokens",
        f"Before any update the ratio of new to old is off by {off} for a typical token "
        f"({short(mean)} nats, most at step {int(gap.steps[worst])} with {short(float(gap.values[worst]))}){largest}."
        + _where_it_sits(rollouts),
        WHY_MISMATCH,
        (
            "model.dtype: sample and train in the same precision (float32 if in doubt)",
            "model.attention: the same kernels in both",
            "with your own engine: pass it the new weights before every iteration, and return log-probs at "
            "rollout.temperature",
        ),
        "logprob_diff",
        gap.first_step,
        gap.last_step,
        _worst_tokens(rollouts),
    )


def _fresh(run: RecordedRun, found: Curve) -> Curve:
    """The steps whose answers the current policy sampled; on those of an older one the audit staleness reports."""
    age = curve(run, "staleness")
    fresh = ~np.isin(found.steps, age.steps[age.values > 0.0])
    return Curve(found.name, found.steps[fresh], found.values[fresh])


def _gaps_that_count(run: RecordedRun) -> tuple[float, float]:
    """The differences, in nats per token, from which a warning and an alarm start, in the run's precision."""
    return GAPS.get(str(setting(run, "model.dtype", "float32")), GAPS["float32"])


def _trainer_disagrees_with_itself(first: Curve) -> Finding:
    worst = int(first.values.argmax())
    return Finding(
        "rollout-mismatch",
        "warning",
        "The ratio is not 1 on the first minibatch",
        f"The trainer's two passes over the same tokens differ: KL(old || new) is {short(float(first.values[worst]))} "
        f"per token before the first step of the update at step {int(first.steps[worst])}, a ratio that is typically "
        f"off by {percent(math.sqrt(2.0 * float(first.values[worst])))}.",
        WHY_MISMATCH,
        (
            "model.path: turn off dropout in the model's own config",
            "model.dtype: float32, if kernels give different results for different batch shapes",
        ),
        "first_approx_kl",
        first.first_step,
        first.last_step,
    )


def _last_rollouts(run: RecordedRun) -> Sequence[StoredRollout]:
    return run.rollouts(run.rollout_steps[-1]) if run.rollout_steps else ()


def _gaps(rollout: StoredRollout) -> np.ndarray:
    """(T,) |old - sampler's| log-prob, 0 outside the answer."""
    gap = np.abs(rollout.columns["old_logprob"] - rollout.columns["untruncated_logprob"])
    return np.where(rollout.columns["response"], gap, 0.0)


def _where_it_sits(rollouts: Sequence[StoredRollout]) -> str:
    """Whether few tokens or all of them carry the difference."""
    if not rollouts:
        return ""
    gaps = np.sort(np.concatenate([_gaps(rollout)[rollout.columns["response"]] for rollout in rollouts]))[::-1]
    few = max(1, len(gaps) // 20)
    share = float(gaps[:few].sum() / max(gaps.sum(), 1e-12))
    where = "few tokens carry it" if share > 0.5 else "it is spread over the answers"
    return f" The worst 5 % of the tokens have {percent(share)} of it: {where}."


def _worst_tokens(rollouts: Sequence[StoredRollout]) -> tuple[str, ...]:
    found: list[tuple[float, str]] = []
    for rollout in rollouts:
        gaps = _gaps(rollout)
        for place in np.argsort(gaps)[::-1][:TOKENS_SHOWN]:
            old, said = (float(rollout.columns[name][place]) for name in ("old_logprob", "untruncated_logprob"))
            text = (
                f"step {rollout.step}, sample {rollout.row}, token {int(place)} {rollout.pieces[place]!r}: "
                f"sampler {short(said)}, trainer {short(old)}"
            )
            found.append((float(gaps[place]), text))
    return tuple(text for _, text in sorted(found, reverse=True)[:TOKENS_SHOWN])


@dataclass(frozen=True)
class _Negative:
    """How far below 0 the KL is: mean over the second half, its standard error, and the fraction of steps."""

    mean: float
    error: float
    part: float

    @property
    def certain(self) -> bool:
        return self.mean < -SURE * self.error


def negative_kl(run: RecordedRun) -> Verdict:
    """Is the KL to the reference below 0, or stuck at 0, and why?"""
    k1, k3 = curve(run, "kl_ref_k1"), curve(run, "kl_ref_k3")
    if min(len(k1), len(k3)) < MIN_KL or len(k1) != len(k3):
        return TooLittle(f"kl_ref_k1 and kl_ref_k3 of {MIN_KL} iterations (kl.apply_to: none has no reference)")
    length = curve(run, "response_length")
    tokens = float(length.values.mean()) if len(length) else 1.0
    named = setting(run, "kl.reference", START) != START  # a policy away from a reference that was chosen is no fault
    if not named and k1.first_step == 0 and float(k3.values[0]) / tokens > FIRST_KL:
        return _other_reference(k3, tokens)
    old = curve(run, "approx_kl")
    if not np.any(k3.values) and not np.any(k1.values):
        if len(old) and float(old.values.mean()) > MOVED:
            return _same_reference(k3, old)
        return TooLittle("a policy that moves: the KL is exactly 0 at every step")
    half, half3 = k1.half(), k3.half()
    # For a small KL the k1 of a whole answer has variance 2 KL; the curve itself may show more.
    by_theory = math.sqrt(2.0 * max(float(half3.values.mean()), 0.0) / rows_per_step(run) / len(half))
    by_curve = half.noise() / math.sqrt(len(half)) if len(half) >= 3 else 0.0
    found = _Negative(float(half.values.mean()), max(by_theory, by_curve), float((k1.values[1:] < 0.0).mean()))
    if found.mean >= 0.0 or not (found.certain or found.part > NEGATIVE_PART):
        return Healthy(f"the k1 estimate is {short(found.mean)} nats per answer in the second half of the run")
    return _with_cause(run, found, half)


def _with_cause(run: RecordedRun, found: _Negative, half: Curve) -> Finding:
    cut, gap = curve(run, "truncation_gap"), curve(run, "logprob_diff")
    severity: Severity = "warning"
    if len(cut) and float(cut.values.mean()) > CUT_GAP:
        p, k = setting(run, "rollout.top_p", 1.0), setting(run, "rollout.top_k", 0)
        cause = (
            f"Cause: truncated sampling. With top_p {p:g} and top_k {k} the sampler drew from another distribution "
            f"than the one whose log-probs are compared ({short(float(cut.values.mean()))} nats per token), so this is "
            "no longer an estimate of a KL."
        )
        change = ("rollout.top_p: 1.0 and rollout.top_k: 0 while training", "rollout.temperature: lower it instead")
    elif len(gap) and float(np.median(gap.values)) > _gaps_that_count(run)[0]:
        cause = (
            f"Cause: sampler and trainer disagree by {short(float(np.median(gap.values)))} nats per token, so the "
            "tokens do not come from the policy whose log-probs are compared."
        )
        change = (
            ("see staleness: rollout.lag, and kl.estimator: k3, which is never negative",)
            if setting(run, "rollout.lag", 0)
            else ("see rollout-mismatch: model.dtype, and the engine's weights and temperature",)
        )
    elif not found.certain:
        severity = "note"
        cause = (
            f"Cause: chance. k1 of {rows_per_step(run)} answers has a standard error of {short(found.error)} here, and "
            "the policy is still close to the reference."
        )
        change = ("kl.estimator: k3, which is never negative", "rollout.prompts_per_step: more answers, less noise")
    else:
        severity = "alarm"
        cause = (
            "Cause: the reference's log-probs are not those of the sampled tokens. The other causes are excluded: "
            f"sampling was not truncated, sampler and trainer agree, and chance explains only {short(found.error)}."
        )
        change = ("roles.mode: check that the reference reads the same tokens, mask and temperature as the policy",)
    return Finding(
        "negative-kl",
        severity,
        "The KL to the reference is negative",
        f"kl_ref_k1 is {short(found.mean)} nats per answer over steps {half.first_step} to {half.last_step}, and below "
        f"0 in {percent(found.part)} of all steps. {cause}",
        WHY_NEGATIVE,
        change,
        "kl_ref_k1",
        half.first_step,
        half.last_step,
    )


def _same_reference(k3: Curve, old: Curve) -> Finding:
    return Finding(
        "negative-kl",
        "alarm",
        "The reference moves with the policy",
        f"The KL to the reference is exactly 0 at all {len(k3)} steps, though the policy moves (KL(old || new) is "
        f"{short(float(old.values.mean()))} per token). The reference is the policy itself.",
        "Then nothing holds the policy near its start: it can drift anywhere at no cost.",
        ("roles.mode: give the reference its own weights, or adapters that can be switched off",),
        "kl_ref_k3",
        k3.first_step,
        k3.last_step,
    )


def _other_reference(k3: Curve, tokens: float) -> Finding:
    first = float(k3.values[0])
    return Finding(
        "negative-kl",
        "warning",
        "The reference is not the policy that the run started from",
        f"At step 0, before any update, the KL to the reference is {short(first)} nats per answer "
        f"({short(first / tokens)} per token); it should be 0.",
        "The policy is then held near another model, and is penalized from the start for its own initial weights.",
        ("model.path: the policy and the reference must start as the same model",),
        "kl_ref_k3",
        k3.first_step,
        k3.first_step,
    )


# -- asynchronous training: how far the policy moved between sampling and training (`rollout.lag`) ----------------

UNCORRECTED = 0.1  # nats per token: a typical weight is 10 % off, half of the usual clip range, and nothing corrects it
FAR = 0.5  # nats per token: a typical weight is 1.6 or 0.6, so few tokens decide the step
CAPPED = 0.1  # fraction of the tokens whose weight the cap limits

WHY_STALE = (
    "The gradient is that of the policy that sampled, not of the one that is trained. An importance weight corrects "
    "for that while the two are close. When they are far apart, its noise is large and its cap biases the step."
)


def stale_answers(run: RecordedRun) -> Verdict:
    """Is the policy that sampled close to the one that is trained?"""
    age, gap = curve(run, "staleness"), curve(run, "logprob_diff")
    stale = age.steps[age.values > 0.0]
    gaps = gap.values[np.isin(gap.steps, stale)]
    if not len(gaps):
        return TooLittle("answers of an older policy: rollout.lag is 0, or too few steps were taken")
    mean, lag, cap = float(np.median(gaps)), float(age.values.max()), setting(run, "rollout.importance_sampling_cap", 0)
    cut = curve(run, "importance/truncated")
    capped = float(np.median(cut.values[np.isin(cut.steps, stale)])) if len(cut) else 0.0
    off = f"the policy moved by {short(mean)} nats per token"
    lower = (f"rollout.lag: lower it (it is {setting(run, 'rollout.lag', int(lag))})", "optimizer.policy_lr: lower it")
    if not cap and mean > UNCORRECTED:
        what, change = "and no importance weight corrects for it", ("rollout.importance_sampling_cap: 2", *lower)
    elif mean > FAR:
        what, change = "too far for an importance weight to correct", lower
    elif capped > CAPPED:
        what = f"and the cap limits the weights of {percent(capped)} of the tokens"
        change = (*lower, f"rollout.importance_sampling_cap: raise it (it is {cap:g})")
    else:
        return Healthy(f"answers are up to {lag:g} steps old, and {off} between sampling and training")
    return Finding(
        "staleness",
        "warning",
        "Answers come from a policy that is too old",
        f"Answers are up to {lag:g} steps old. In that time {off}, {what}.",
        WHY_STALE,
        change,
        "logprob_diff",
        int(stale[0]),
        int(stale[-1]),
    )
