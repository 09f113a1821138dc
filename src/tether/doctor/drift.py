"""Audits of where the policy goes: away from the reference, towards one answer, to ever longer ones, to no end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tether.doctor.answer_metrics import most_common_answer, repetition
from tether.doctor.findings import Curve, Finding, Healthy, TooLittle, Verdict, curve, percent, setting, solved
from tether.reports.charts import short
from tether.store.recorded import RecordedRun, StoredRollout

MIN_ITERATIONS = 10  # iterations before a trend is a trend
FAR = 0.5  # nats a token: the answers are then e^0.5 = 1.6 times less likely, token by token, under the reference
VERY_FAR = 3.0  # nats a token, and still running: the reference would hardly ever write this
LOST_SIGHT = 5.0  # nats a token, even at rest: e^5 = 150 times less likely under the reference, token by token
GREW = 1.5  # times as large as in the second quarter of the run: still running
GAIN_STEPS = 20  # iterations before "the score gained nothing in the second half" can be told from noise
OFF_TARGET = 3.0  # times kl.target that no controller should leave standing

FLAT_ENTROPY = 0.1  # nats a token: the likeliest token has about 98 %
LOST = 0.15  # part of the entropy at the start that is left

LOOPING = 0.5  # of the runs of four tokens in an answer have been in it before
MORE_LOOPING = 0.2  # more than at the start: some tasks repeat by nature
ONE_ANSWER = 0.5  # of the different prompts get one and the same answer
MIN_PROMPTS = 8  # different prompts in a step before their answers can be compared

LONGER = 1.5  # times as long as at the start, and the score likes it: hacking
MUCH_LONGER = 2.0  # times as long as at the start, whatever the score likes
MUCH_SHORTER = 0.2
TIED = 0.5  # correlation of length and score within a step

UNENDED = 0.98  # of the answers were cut off
FIXED_LENGTH = 16  # tokens: a limit this low is often meant as the length of every answer

WHY_RUNAWAY = (
    "Far from the reference the reward was never checked: answers become odd before the score shows it, and what the "
    "reference knew is lost."
)
WHY_ENTROPY = (
    "A policy that always says the same has nothing to compare: it no longer explores, and what it has missed by now "
    "it misses for good."
)
WHY_REPETITION = (
    "Loops cost nothing and some rewards like them. They are the first sign of a reward that does not read the text."
)
WHY_MODE = "One answer that pleases on every prompt is a hole in the reward, not a skill."
WHY_LENGTH = (
    "A reward that likes length is answered with length: the score rises, the answers get no better, and each step "
    "costs more."
)
WHY_ENDS = (
    "The end token is learned like any other, from answers that have it. Without one every score is that of a cut-off "
    "text, and the model will not stop when it is used."
)


def kl_runaway(run: RecordedRun) -> Verdict:
    """Does the policy leave the reference behind for nothing?"""
    kl, length, score = curve(run, "kl_ref_k1"), curve(run, "response_length"), curve(run, "score")
    if len(kl) < MIN_ITERATIONS or len(length) != len(kl):
        return TooLittle(f"the KL to the reference of {MIN_ITERATIONS} iterations (kl.apply_to: none has no reference)")
    a_token = Curve(kl.name, kl.steps, kl.values / np.maximum(length.values, 1.0))
    target, controlled = setting(run, "kl.target", 6.0), setting(run, "kl.controller", "fixed") != "fixed"
    quarter = len(kl) // 4
    middle = float(a_token.values[quarter : 2 * quarter].mean())
    growing = a_token.end > GREW * max(middle, 0.0)
    gained = score.half().rose() if len(score) else False
    if controlled and kl.end > OFF_TARGET * target:
        what, severity = f", {kl.end / target:.1f} times kl.target", "warning"
    elif a_token.end > VERY_FAR and growing:
        what, severity = "", "alarm"
    elif a_token.end > FAR and growing and not gained and len(kl) >= GAIN_STEPS:
        what, severity = ", while the score gained nothing in the second half", "warning"
    elif a_token.end > LOST_SIGHT:
        what, severity = ", as far as it could get", "warning"
    else:
        return Healthy(f"{short(kl.end)} nats an answer, {short(a_token.end)} a token at the end")
    return Finding(
        "kl-runaway",
        severity,  # pyright: ignore[reportArgumentType] (one of the two literals above)
        "The KL to the reference is running away",
        f"It stands at {short(kl.end)} nats an answer ({short(a_token.end)} a token){what}; around step "
        f"{int(kl.steps[quarter])} it was {short(float(kl.values[quarter : 2 * quarter].mean()))}.",
        WHY_RUNAWAY,
        (
            f"kl.coef: raise it (it is {setting(run, 'kl.coef', 0.05):g}); two to five times is a usual step",
            "kl.controller: proportional, with kl.target at the KL you can accept",
            "optimizer.policy_lr: lower it",
        ),
        "kl_ref_k3",
        int(kl.steps[quarter]),
        kl.last_step,
    )


def entropy_collapse(run: RecordedRun) -> Verdict:
    """Is the policy still unsure of anything?"""
    entropy, score = curve(run, "entropy"), curve(run, "score")
    if len(entropy) < MIN_ITERATIONS or not len(score):
        return TooLittle(f"entropy of {MIN_ITERATIONS} iterations")
    if entropy.end > FLAT_ENTROPY or entropy.end > LOST * entropy.start:
        return Healthy(f"{short(entropy.start)} nats a token at the start, {short(entropy.end)} at the end")
    if solved(run) or (score.rose() and score.half().rose()):
        return Healthy(f"down to {short(entropy.end)} nats a token, but the score has risen with it")
    where = int(entropy.steps[np.argmax(entropy.values < max(FLAT_ENTROPY, LOST * entropy.start))])
    grew = "and the score stands still since" if score.rose() else "and the score never rose"
    return Finding(
        "entropy-collapse",
        "warning" if score.rose() else "alarm",
        "The policy's entropy has collapsed",
        f"From {short(entropy.start)} nats a token at the start to {short(entropy.end)} at the end (small from step "
        f"{where} on), {grew}: {short(score.start)} at the start, {short(score.end)} at the end.",
        WHY_ENTROPY,
        (
            "optimizer.policy_lr: lower it, by three to ten times",
            f"{run.method}.entropy_coef: 0.001 to 0.01",
            "kl.coef: raise it, so that the reference keeps answers varied",
            "rollout.temperature: 1.0, if it is lower",
        ),
        "entropy",
        where,
        entropy.last_step,
    )


def repeating(run: RecordedRun) -> Verdict:
    """Do answers loop?"""
    rate = curve(run, "answers/repetition")
    if len(rate) < 2:
        return TooLittle("answers of 16 tokens or more from two steps (rollouts that were kept, or answers/repetition)")
    if rate.end < LOOPING or rate.end < rate.start + MORE_LOOPING:
        return Healthy(f"{percent(rate.end)} of each answer's runs of four tokens are repeats")
    return Finding(
        "repetition",
        "warning",
        "Answers repeat themselves",
        f"At step {rate.last_step} {percent(rate.end)} of the runs of four tokens in an answer have been in it before; "
        f"at the start it was {percent(rate.start)}.",
        WHY_REPETITION,
        (
            "reward.parts: add a part that marks down repetition, or mend the one that likes it",
            "kl.coef: raise it",
            "optimizer.policy_lr: lower it",
        ),
        "answers/repetition",
        rate.first_step,
        rate.last_step,
        _examples(sorted(_kept(run), key=lambda rollout: -repetition(rollout.answer("token")))[:2]),
    )


def mode_collapse(run: RecordedRun) -> Verdict:
    """Do different prompts get different answers?"""
    share, prompts = curve(run, "answers/top_share"), curve(run, "prompts/distinct")
    if len(share) < 2 or not len(prompts) or prompts.end < MIN_PROMPTS:
        return TooLittle(f"answers to {MIN_PROMPTS} different prompts from two steps")
    if share.end < ONE_ANSWER or share.start > share.end / 2.0:
        return Healthy(f"the most frequent answer was given to {percent(share.end)} of the prompts")
    rollouts = _kept(run)
    return Finding(
        "mode-collapse",
        "warning",
        "Different prompts get the same answer",
        f"At the end one answer was given to {percent(share.end)} of about {prompts.end:.0f} different prompts; at the "
        f"start the most frequent one went to {percent(share.start)}.",
        WHY_MODE,
        (
            "reward.parts: the reward does not read the prompt, or one phrase satisfies it",
            "kl.coef: raise it",
            f"{run.method}.entropy_coef: 0.001 to 0.01",
            "optimizer.policy_lr: lower it",
        ),
        "answers/top_share",
        share.first_step,
        share.last_step,
        (f"{most_common_answer(rollouts)!r}",) if rollouts else (),
    )


def length_drift(run: RecordedRun) -> Verdict:
    """Do answers get longer or shorter, and does the score pay for it?"""
    length, score = curve(run, "response_length"), curve(run, "score")
    if len(length) < MIN_ITERATIONS or length.start <= 0.0:
        return TooLittle(f"response_length of {MIN_ITERATIONS} iterations")
    growth, tie = length.end / length.start, curve(run, "length_score_correlation")
    tied = float(np.median(tie.values)) if len(tie) else 0.0
    moved = abs(length.end - length.start) > length.margin()
    went = f"from {short(length.start)} tokens to {short(length.end)}"
    if not moved or (MUCH_SHORTER < growth < LONGER) or (LONGER <= growth < MUCH_LONGER and tied < TIED):
        return Healthy(f"answers went {went}")
    hacked = growth >= LONGER and tied >= TIED and score.rose()
    cut = curve(run, "truncated")
    saw = f"Answers went {went} ({growth:.1f} times)."
    saw += f" Within a step, length and score have a correlation of {tied:.2f}." if len(tie) else ""
    saw += f" {percent(cut.end)} of them are cut off now." if len(cut) and cut.end > cut.start + 0.1 else ""
    return Finding(
        "length",
        "warning" if hacked else "note",
        "Longer answers score higher, and answers grow" if hacked else "The length of answers drifts",
        saw,
        WHY_LENGTH,
        (
            "reward.parts: add {kind: length, max: ...}, or mend the part that pays for length",
            "reward.missing_eos_penalty: a score for answers that run into the limit",
            "rollout.max_new_tokens: what a good answer needs, and no more",
        ),
        "response_length",
        length.first_step,
        length.last_step,
    )


def never_ends(run: RecordedRun) -> Verdict:
    """Is the end token ever sampled?"""
    cut, score = curve(run, "truncated"), curve(run, "score")
    if len(cut) < MIN_ITERATIONS:
        return TooLittle(f"truncated of {MIN_ITERATIONS} iterations")
    limit = int(setting(run, "rollout.max_new_tokens", 64))
    ended = 1.0 - float(cut.half().values.mean())
    if 1.0 - ended < UNENDED or (limit <= FIXED_LENGTH and (score.rose() or solved(run))):
        return Healthy(f"{percent(ended)} of the answers end by themselves, within {limit} tokens")
    return Finding(
        "never-ends",
        "warning" if limit > FIXED_LENGTH else "note",
        "Hardly any answer ends by itself",
        f"Since step {cut.half().first_step}, {percent(1.0 - ended)} of the answers were cut off at {limit} tokens.",
        WHY_ENDS,
        (
            "rollout.max_new_tokens: raise it, if good answers are longer",
            "rollout.stop_token_ids: name the token that ends a turn, if the model has another than the tokenizer's",
            "reward.missing_eos_penalty: a score below that of any answer that ends",
            "model.path: start from a model whose demonstrations had an end token (tether train sft adds it)",
        ),
        "truncated",
        cut.half().first_step,
        cut.last_step,
        _examples(_kept(run)[:1]),
    )


def _kept(run: RecordedRun) -> list[StoredRollout]:
    return list(run.rollouts(run.rollout_steps[-1])) if run.rollout_steps else []


def _examples(rollouts: Sequence[StoredRollout]) -> tuple[str, ...]:
    return tuple(f"{rollout.prompt_text!r} -> {rollout.completion!r}" for rollout in rollouts)
