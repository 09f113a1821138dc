"""Audits of the update and the critic: do the weights change, how far does a step go, and is the critic useful?"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

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
    setting,
    solved,
)
from tether.reports.charts import short
from tether.store.recorded import RecordedRun

MIN_ITERATIONS = 5  # iterations

FEW_HOLD = 0.4  # fraction of all |advantage| on 5 % of the answers; 5 % if equal, 13 % if normally distributed

CLIP_WARNING = 0.3  # fraction of the tokens: PPO's authors and practitioners see 0.05 to 0.2
CLIP_ALARM = 0.5
NEVER_CLIPPED = 1e-4
HARDLY_MOVED = 1e-6  # KL(old || new) per token: ratios within a thousandth of 1

STOPPED_PART = 0.8  # fraction of the updates that stopped early

SPIKE = 10.0  # times the median of the previous steps
ABOVE_START = 3.0  # times the maximum of the first steps: a converged run may fluctuate near 0
SPIKE_WINDOW = 20

WHY_DOMINATED = "The step then follows a handful of answers: it is as noisy as a batch of that size."
WHY_CLIPPED = (
    "A clipped token has no gradient. If many are clipped, the policy has left the region in which old data is valid, "
    "and most of the batch is wasted."
)
WHY_IDLE = "The policy hardly changes between two iterations: the run spends its time sampling from the same policy."
WHY_STOPPED = "The rest of each update is skipped: answers are sampled and scored for nothing."
WHY_SPIKES = (
    "Clipping limits the length of such a step, not its direction, and it stays in Adam's moments for many steps."
)
WHY_SKIPPED = "A loss or gradient that is not finite is skipped, and the batch is lost. It is rarely a coincidence."
WHY_STILL = "The weights do not change: the run only samples."


def dominated_advantages(run: RecordedRun) -> Verdict:
    """Do a few answers decide the step?"""
    share = curve(run, "advantage_top_share")
    if len(share) < 2:
        return TooLittle("advantages of 16 answers or more from two steps (stored rollouts, or advantage_top_share)")
    late = share.half()
    middle = float(np.median(late.values))
    if middle < FEW_HOLD:
        return Healthy(f"5 % of the answers have {percent(middle)} of all |advantage|")
    if solved(run):
        return Healthy(f"{percent(middle)} on 5 % of the answers: the few that are not solved yet")
    return Finding(
        "dominated-advantages",
        "warning",
        "A few answers have most of the advantage",
        f"Since step {late.first_step} 5 % of the answers have {percent(middle)} of all |advantage| (median); an equal "
        "share would be 5 %.",
        WHY_DOMINATED,
        (
            "reward.clip: limit extreme scores",
            "rollout.prompts_per_step: more answers per step",
            "task.prompts: prompts with more than a few good answers, or partial credit in the reward",
        ),
        "advantage_top_share",
        late.first_step,
        late.last_step,
    )


def clip(run: RecordedRun) -> Verdict:
    """Does the clip act too often, or never?"""
    clipped, taken, moved = curve(run, "clip_fraction"), curve(run, "steps"), curve(run, "approx_kl")
    if len(clipped) < MIN_ITERATIONS:
        return TooLittle(f"clip_fraction of {MIN_ITERATIONS} iterations (objective: clip)")
    late = clipped.half()
    middle, several = float(np.median(late.values)), len(taken) > 0 and float(np.median(taken.values)) > 1.0
    if middle > CLIP_WARNING:
        return Finding(
            "clip",
            "alarm" if middle > CLIP_ALARM else "warning",
            "The clip removes a large part of the gradient",
            f"Since step {late.first_step} {percent(middle)} of the tokens are clipped (median; maximum "
            f"{percent(float(late.values.max()))}).",
            WHY_CLIPPED,
            (
                "optimizer.policy_lr: lower it, by a factor of three to ten",
                f"{algorithm(run)}.epochs: fewer passes over each batch",
                f"{algorithm(run)}.target_kl: 0.02 stops an update before it goes too far",
            ),
            "clip_fraction",
            late.first_step,
            late.last_step,
        )
    idle = float(clipped.values.max()) < NEVER_CLIPPED and len(moved) and 0.0 < moved.values.max() < HARDLY_MOVED
    if several and idle and not curve(run, "score").rose() and not solved(run):
        return Finding(
            "clip",
            "note",
            "The clip never acts: updates are too small to reach it",
            f"In {len(clipped)} iterations no token was clipped, and KL(old || new) was at most "
            f"{short(float(moved.values.max()))} per token.",
            WHY_IDLE,
            (
                f"optimizer.policy_lr: raise it (it is {setting(run, 'optimizer.policy_lr', 1e-5):g})",
                f"{algorithm(run)}.epochs: more passes over each batch",
            ),
            "clip_fraction",
            clipped.first_step,
            clipped.last_step,
        )
    return Healthy(f"{percent(middle)} of the tokens are clipped in the second half")


def early_stop(run: RecordedRun) -> Verdict:
    """Does every update stop early?"""
    stopped, taken = curve(run, "early_stop"), curve(run, "steps")
    if len(stopped) < MIN_ITERATIONS:
        return TooLittle(f"early_stop of {MIN_ITERATIONS} iterations")
    late = stopped.half()
    part = float(late.values.mean())
    if part <= STOPPED_PART:
        return Healthy(f"{percent(part)} of the updates stopped early in the second half")
    size = max(1, int(setting(run, f"{algorithm(run)}.minibatch_size", 64)))
    planned = int(setting(run, f"{algorithm(run)}.epochs", 1)) * math.ceil(rows_per_step(run) / size)
    mean = float(taken.half().values.mean()) if len(taken) else math.nan
    limit = setting(run, f"{algorithm(run)}.target_kl", math.nan)
    return Finding(
        "early-stop",
        "alarm" if mean < 0.5 else "warning",
        "Every update stops early",
        f"Since step {late.first_step} {percent(part)} of the updates were stopped by the limit on KL(old || new) "
        f"({limit:g} per token), after {short(mean)} of {planned} optimizer steps on average.",
        WHY_STOPPED,
        (
            "optimizer.policy_lr: lower it, so that all steps of an update stay under the limit",
            f"{algorithm(run)}.epochs: fewer",
            f"{algorithm(run)}.target_kl: raise it; 0.01 to 0.05 is usual",
        ),
        "early_stop",
        late.first_step,
        late.last_step,
    )


def gradient_spikes(run: RecordedRun) -> Verdict:
    """Does the gradient norm jump?"""
    names = sorted(name for name in run.series if name.startswith("grad_norm/"))
    curves = [found for name in names if len(found := curve(run, name)) >= 2 * MIN_ITERATIONS]
    if not curves:
        return TooLittle(f"grad_norm of {2 * MIN_ITERATIONS} steps")
    worst, places = max(((found, _spikes(found)) for found in curves), key=lambda pair: len(pair[1]))
    if not places:
        return Healthy(f"no norm of {', '.join(found.name for found in curves)} above {SPIKE:g} times those before it")
    bound = setting(run, "optimizer.max_grad_norm", None)
    shown = ", ".join(f"step {int(worst.steps[place])} ({short(float(worst.values[place]))})" for place in places[:5])
    return Finding(
        "gradient-spikes",
        "warning" if len(places) > 1 or bound is None else "note",
        "The gradient norm has spikes",
        f"{worst.name} was more than {SPIKE:g} times the median of the steps before it at {shown}; the run's median "
        f"is {short(float(np.median(worst.values)))}.",
        WHY_SPIKES,
        (
            "optimizer.max_grad_norm: 1.0 or below"
            + ("" if bound is not None else " (it is null: nothing is clipped)"),
            "reward.clip: limit the scores of extreme batches",
            "optimizer.policy_lr and optimizer.critic_lr: lower the one whose norm spikes",
        ),
        worst.name,
        int(worst.steps[places[0]]),
        int(worst.steps[places[-1]]),
    )


def _spikes(found: Curve) -> list[int]:
    """The steps whose norm is far above the previous ones and above those of the start."""
    values, first = found.values, float(found.values[:MIN_ITERATIONS].max())
    before = np.concatenate([np.full(SPIKE_WINDOW, np.nan), values])  # NaN for steps before the first
    high = MIN_ITERATIONS + np.flatnonzero(
        values[MIN_ITERATIONS:] > ABOVE_START * first
    )  # only a few candidates, so that medians are cheap
    usual = np.nanmedian(sliding_window_view(before, SPIKE_WINDOW)[high], axis=1)
    return high[values[high] > SPIKE * usual].tolist()


def not_finite(run: RecordedRun) -> Verdict:
    """Were updates skipped because a loss or gradient was not finite?"""
    skipped, taken = curve(run, "skipped_steps"), curve(run, "steps")
    if not len(skipped):
        return TooLittle("skipped_steps")
    number = float(skipped.values.clip(min=0.0).sum())
    total = number + float(taken.values.sum())
    if number == 0:
        return Healthy("every loss and gradient was finite")
    places = skipped.steps[skipped.values > 0]
    return Finding(
        "not-finite",
        "alarm" if number > 0.1 * total else "warning",
        "Updates were skipped: loss or gradient not finite",
        f"{number:.0f} of {total:.0f} optimizer steps, first at step {int(places[0])}, last at step {int(places[-1])}.",
        WHY_SKIPPED,
        (
            "optimizer.policy_lr and optimizer.critic_lr: lower them",
            "reward.clip: limit the scores",
            "model.dtype: float32",
        ),
        "skipped_steps",
        int(places[0]),
        int(places[-1]),
    )


def not_training(run: RecordedRun) -> Verdict:
    """Do the weights change?"""
    group, key = ("reward", "critic_lr") if run.method == "reward" else ("policy", "policy_lr")
    norm, taken, moved = curve(run, f"grad_norm/{group}"), curve(run, "steps"), curve(run, "approx_kl")
    change, length = curve(run, f"weight_change/{group}"), len(run.metrics)
    if length < MIN_ITERATIONS:
        return TooLittle(f"{MIN_ITERATIONS} steps")
    adapters = setting(run, "roles.mode", "separate") == "lora"
    several = len(taken) > 0 and float(np.median(taken.values)) > 1.0
    warming = algorithm(run) == "ppo" and int(setting(run, "ppo.critic_warmup", 0)) >= length
    if warming:
        return TooLittle("an iteration after ppo.critic_warmup")
    still = len(norm) >= MIN_ITERATIONS and not np.any(norm.values)
    if still and solved(run):
        return Healthy("there is no gradient, because every answer has the maximum score: the task is solved")
    if float(setting(run, f"optimizer.{key}", 1e-5)) == 0.0 and algorithm(run) != "trpo":
        saw, cure = f"optimizer.{key} is 0 in all {length} steps.", f"optimizer.{key}: above 0"
    elif still:
        what = "the adapters" if adapters else "the weights"
        saw, cure = (
            f"grad_norm/{group} is exactly 0 at all {len(norm)} steps: no gradient reaches {what}.",
            (
                "roles.lora_targets: name layers that the model has"
                if adapters
                else "roles.mode: separate, to check whether the mode froze the weights"
            ),
        )
    elif len(taken) >= MIN_ITERATIONS and not np.any(taken.values):
        saw = f"No optimizer step was taken in {len(taken)} iterations: all were skipped, rejected or stopped early."
        cure = "see not-finite and early-stop; with TRPO raise trpo.max_kl or trpo.damping"
    elif len(change) and float(np.abs(change.values).max()) == 0.0:
        saw, cure = f"weight_change/{group} is exactly 0 at all {len(change)} steps.", f"optimizer.{key}: raise it"
    elif several and len(moved) >= MIN_ITERATIONS and float(moved.values.max()) == 0.0 and algorithm(run) != "trpo":
        saw = f"KL(old || new) is exactly 0 in all {len(moved)} updates, though each takes several steps."
        cure = f"optimizer.{key}: raise it (it is {setting(run, f'optimizer.{key}', 1e-5):g})"
    else:
        return Healthy(f"gradients reach the weights, and {float(taken.values.sum()):.0f} steps were taken")
    return Finding(
        "not-training",
        "alarm",
        "The adapters do not train" if adapters else "The weights do not train",
        saw,
        WHY_STILL,
        (cure,),
        f"grad_norm/{group}",
        int(run.metrics[0]["step"]),
        int(run.metrics[-1]["step"]),
    )


RATE_STEPS = 10  # iterations after which a critic that overshoots is visible
CRITIC_STEPS = 20  # iterations after which a critic that has learned nothing is worth a note ...
CRITIC_SURE = 40  # ... and a warning: some need thirty to start
NO_BETTER = 0.05  # explained fraction of the variance of the returns: no better than their mean
WORSE = -0.2  # worse than the mean: the critic overshoots
OVERSHOT = 20.0  # times the variance of the scores: values are then further off than any constant guess
OFTEN = 3  # steps that overshoot; the first update of a fresh critic may
SPREAD_LEFT = 0.2  # fraction of the usual spread of scores; below it there is little to explain
RELATIVE_SPREAD = 0.02  # or fraction of the score itself
NO_SPREAD = 1e-6  # all scores are alike

WHY_CRITIC = (
    "Advantages are returns minus values. A critic that explains nothing leaves them as noisy as the returns: learning "
    "is slow, and PPO is then REINFORCE with the cost of a second model."
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
        return Healthy("no better than the mean, because its learning rate is too high: see critic-rate")
    rate = setting(run, "optimizer.critic_lr", 1e-5)
    return Finding(
        "critic",
        "warning" if len(explained) >= CRITIC_SURE else "note",
        "The critic is no better than the mean",
        f"Since step {late.first_step} it explains {percent(middle)} of the variance of the returns (median); its "
        f"maximum was {percent(float(explained.values.max()))}.",
        WHY_CRITIC,
        (
            f"optimizer.critic_lr: it is {rate:g}" + ("; above 0" if rate == 0 else "; try three times as much"),
            "ppo.critic_warmup: train only the critic for the first iterations",
            "roles.critic_init: initialize it from the reward model",
            "or use tether train rloo or grpo, which need no critic",
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
    saw = f"Explained variance is {short(middle)} since step {late.first_step} (0 is no better than the mean)."
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
            "reward.clip or reward.whiten: if the size of the scores is far from 1",
        ),
        "value_loss" if len(over) >= OFTEN else "explained_variance",
        over[0] if len(over) >= OFTEN else late.first_step,
        late.last_step,
    )


def _overshoots(run: RecordedRun) -> list[int]:
    """The steps after warm-up whose value loss is far above the variance of the scores, the loss of a constant."""
    warmup = _warmup(run)
    loss, spread = curve(run, "value_loss").since(warmup), curve(run, "score_std").since(warmup)
    if not len(loss) or len(spread) != len(loss):
        return []
    usual = float(np.quantile(spread.values, 0.75))
    variance = np.maximum(spread.values, SPREAD_LEFT * usual) ** 2
    return [int(step) for step in loss.steps[loss.values > OVERSHOT * np.maximum(variance, NO_SPREAD)]]


def _warmup(run: RecordedRun) -> int:
    """The number of iterations that train only the critic; the policy does not use it there."""
    return int(setting(run, "ppo.critic_warmup", 0))


def _where_scores_vary(run: RecordedRun) -> Curve:
    """Explained variance after the critic's warm-up, at the steps whose scores vary.

    Where all answers score alike, returns differ only by rounding and the metric is meaningless.
    """
    explained = curve(run, "explained_variance").since(_warmup(run))
    spread, score = curve(run, "score_std"), curve(run, "score")
    if not len(spread) or len(score) != len(spread):
        return explained
    usual = float(np.quantile(spread.values, 0.75))  # robust against one extreme batch
    enough = np.maximum(SPREAD_LEFT * usual, RELATIVE_SPREAD * np.abs(score.values))
    varied = spread.steps[spread.values > np.maximum(enough, NO_SPREAD)]
    kept = np.isin(explained.steps, varied)
    return Curve(explained.name, explained.steps[kept], explained.values[kept])
