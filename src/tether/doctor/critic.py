"""Audits of the critic: is it better than the mean, and does it overshoot?"""

from __future__ import annotations

import numpy as np

from tether.doctor.curves import Curve, curve, percent, setting
from tether.doctor.findings import Finding, Healthy, TooLittle, Verdict
from tether.reports.chart_scale import short
from tether.store.recorded import RecordedRun

RATE_STEPS = 10  # iterations in which a critic that overshoots shows it
CRITIC_STEPS = 20  # iterations after which a critic that has learned nothing is worth a note ...
CRITIC_SURE = 40  # ... and a warning: some take thirty to begin
NO_BETTER = 0.05  # of the variance of the returns explained: no better than their mean
WORSE = -0.2  # worse than the mean: the critic overshoots
OVERSHOT = 20.0  # times the variance of the scores: values are then further off than any guess would be
OFTEN = 3  # steps that overshoot; the first update of a fresh critic may
SPREAD_LEFT = 0.2  # part of the usual spread of scores below which there is little left to explain
RELATIVE_SPREAD = 0.02  # or part of the score itself
NO_SPREAD = 1e-6  # all scores are alike

WHY_CRITIC = (
    "Advantages are returns less values. A critic that explains nothing leaves them as noisy as the returns: learning "
    "is slow, and PPO is REINFORCE with a second model to pay for."
)
WHY_RATE = "Values that overshoot make advantages worse than having no critic at all, and the policy follows them."


def critic(run: RecordedRun) -> Verdict:
    """Is the critic better than the mean?"""
    explained = _where_scores_vary(run)
    if len(explained) < CRITIC_STEPS:
        return TooLittle(f"explained_variance of {CRITIC_STEPS} iterations whose scores differ")
    late = explained.half()
    middle = float(np.median(late.values))
    if middle >= NO_BETTER:
        return Healthy(f"it explains {percent(middle)} of the variance of the returns")
    if middle <= WORSE or len(_overshoots(run)) >= OFTEN:
        return Healthy("no better than the mean, because its rate is too high: critic-rate tells of it")
    rate = setting(run, "optimizer.critic_lr", 1e-5)
    return Finding(
        "critic",
        "warning" if len(explained) >= CRITIC_SURE else "note",
        "The critic is no better than the mean",
        f"Since step {late.first_step} it explains {percent(middle)} of the variance of the returns (median); its best "
        f"step had {percent(float(explained.values.max()))}.",
        WHY_CRITIC,
        (
            f"optimizer.critic_lr: it is {rate:g}" + ("; above 0" if rate == 0 else "; try three times as much"),
            "ppo.critic_warmup: let the critic learn alone for the first iterations",
            "roles.critic_init: start it as the reward model",
            "or leave it out: tether train rloo and grpo need no critic",
        ),
        "explained_variance",
        late.first_step,
        late.last_step,
    )


def critic_lr(run: RecordedRun) -> Verdict:
    """Is the critic's learning rate too high?"""
    explained = _where_scores_vary(run)
    if len(explained) < RATE_STEPS:
        return TooLittle(f"explained_variance of {RATE_STEPS} iterations whose scores differ")
    late, over = explained.half(), _overshoots(run)
    middle = float(np.median(late.values))
    if middle >= WORSE and len(over) < OFTEN:
        return Healthy(f"the critic explains {percent(middle)} of the variance of the returns")
    saw = f"Explained variance is {short(middle)} since step {late.first_step} (0 is what the mean would reach)."
    if len(over) >= OFTEN:
        steps = ", ".join(str(step) for step in over[:5]) + (", ..." if len(over) > 5 else "")
        saw += f" The value loss was more than {OVERSHOT:g} times the variance of the scores at steps {steps}."
    return Finding(
        "critic-rate",
        "alarm" if middle < -1.0 else "warning",
        "The critic overshoots: its learning rate is too high",
        saw,
        WHY_RATE,
        (
            f"optimizer.critic_lr: it is {setting(run, 'optimizer.critic_lr', 1e-5):g}; try a tenth",
            "optimizer.max_grad_norm: 1.0, if it is larger or null",
            "reward.clip or reward.whiten: if scores are far from 1 in size",
        ),
        "value_loss" if len(over) >= OFTEN else "explained_variance",
        over[0] if len(over) >= OFTEN else late.first_step,
        late.last_step,
    )


def _overshoots(run: RecordedRun) -> list[int]:
    """The steps after warm-up whose value loss is far above the variance of the scores, which the mean would reach."""
    warmup = _warmup(run)
    loss, spread = curve(run, "value_loss").since(warmup), curve(run, "score_std").since(warmup)
    if not len(loss) or len(spread) != len(loss):
        return []
    usual = float(np.quantile(spread.values, 0.75))
    variance = np.maximum(spread.values, SPREAD_LEFT * usual) ** 2
    return [int(step) for step in loss.steps[loss.values > OVERSHOT * np.maximum(variance, NO_SPREAD)]]


def _warmup(run: RecordedRun) -> int:
    """Iterations in which the critic learns alone: it starts from nothing there, and no policy follows it."""
    return int(setting(run, "ppo.critic_warmup", 0))


def _where_scores_vary(run: RecordedRun) -> Curve:
    """Explained variance after the critic's warm-up, at the steps whose scores leave something to explain.

    Where all answers score alike, returns differ by rounding alone and the measure means nothing.
    """
    explained = curve(run, "explained_variance").since(_warmup(run))
    spread, score = curve(run, "score_std"), curve(run, "score")
    if not len(spread) or len(score) != len(spread):
        return explained
    usual = float(np.quantile(spread.values, 0.75))  # one wild batch does not count
    enough = np.maximum(SPREAD_LEFT * usual, RELATIVE_SPREAD * np.abs(score.values))
    varied = spread.steps[spread.values > np.maximum(enough, NO_SPREAD)]
    kept = np.isin(explained.steps, varied)
    return Curve(explained.name, explained.steps[kept], explained.values[kept])
