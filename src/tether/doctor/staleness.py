"""The audit of asynchronous training: how far the policy moved between sampling and training (`rollout.lag`)."""

from __future__ import annotations

import numpy as np

from tether.doctor.findings import Finding, Healthy, TooLittle, Verdict, curve, percent, setting
from tether.reports.charts import short
from tether.store.recorded import RecordedRun

UNCORRECTED = 0.1  # nats per token: a typical weight is 10 % off, half of the usual clip range, and nothing corrects it
FAR = 0.5  # nats per token: a typical weight is 1.6 or 0.6, so few tokens decide the step
CAPPED = 0.1  # fraction of the tokens whose weight the cap limits

WHY = (
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
        WHY,
        change,
        "logprob_diff",
        int(stale[0]),
        int(stale[-1]),
    )
