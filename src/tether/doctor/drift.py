"""Audits of policy drift: away from the reference, to one answer, to longer answers, to answers without an end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tether.doctor.answer_metrics import most_common_answer, repetition
from tether.doctor.findings import (
    Curve,
    Finding,
    Healthy,
    TooLittle,
    Verdict,
    algorithm,
    curve,
    percent,
    setting,
    solved,
)
from tether.reports.charts import short
from tether.store.recorded import RecordedRun, StoredRollout

MIN_ITERATIONS = 10  # iterations needed for a trend
FAR = 0.5  # nats per token: each token is then e^0.5 = 1.6 times less probable under the reference
VERY_FAR = 3.0  # nats per token, and still growing: the reference would almost never write this
LOST_SIGHT = 5.0  # nats per token, even if constant: e^5 = 150 times less probable under the reference, per token
GREW = 1.5  # times its value in the second quarter of the run: the KL is still growing
GAIN_STEPS = 20  # iterations needed to tell "no gain in the second half" from noise
OFF_TARGET = 3.0  # times kl.target; a working controller stays below

FLAT_ENTROPY = 0.1  # nats per token: the most probable token has about 98 %
LOST = 0.15  # remaining fraction of the initial entropy

LOOPING = 0.5  # fraction of repeated 4-grams in an answer
MORE_LOOPING = 0.2  # increase over the start: some tasks repeat by nature
ONE_ANSWER = 0.5  # fraction of the distinct prompts that get the same answer
MIN_PROMPTS = 8  # distinct prompts in a step needed to compare their answers

LONGER = 1.5  # times the initial length, with score correlated to length: reward hacking
MUCH_LONGER = 2.0  # times the initial length, at any correlation
MUCH_SHORTER = 0.2
TIED = 0.5  # correlation of length and score within a step

UNENDED = 0.98  # fraction of truncated answers
FIXED_LENGTH = 16  # tokens: a limit this low is often the intended length of every answer

WHY_RUNAWAY = (
    "The reward was never checked far from the reference: answers degrade before the score shows it, and what the "
    "reference knew is lost."
)
WHY_ENTROPY = (
    "If all answers are the same, their scores do not differ and the policy stops exploring: it cannot find better "
    "answers any more."
)
WHY_REPETITION = (
    "Loops are easy to produce and some rewards score them high. They are an early sign of a reward that does not "
    "check the text."
)
WHY_MODE = "One answer that scores well on every prompt is a flaw in the reward, not a skill."
WHY_LENGTH = (
    "If longer answers score higher, the policy writes longer answers: the score rises, the answers do not improve, "
    "and each step costs more."
)
WHY_ENDS = (
    "The end token is learned like any other, from answers that have it. Without one, every score is that of a "
    "truncated text, and the model will not stop when it is used."
)


def kl_runaway(run: RecordedRun) -> Verdict:
    """Does the policy move away from the reference without gaining score?"""
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
        what, severity = ", which is very far even if it no longer grows", "warning"
    else:
        return Healthy(f"{short(kl.end)} nats per answer, {short(a_token.end)} per token at the end")
    return Finding(
        "kl-runaway",
        severity,  # pyright: ignore[reportArgumentType] (one of the two literals above)
        "The KL to the reference is running away",
        f"It is {short(kl.end)} nats per answer ({short(a_token.end)} per token){what}; around step "
        f"{int(kl.steps[quarter])} it was {short(float(kl.values[quarter : 2 * quarter].mean()))}.",
        WHY_RUNAWAY,
        (
            f"kl.coef: raise it (it is {setting(run, 'kl.coef', 0.05):g}), by a factor of two to five",
            "kl.controller: proportional, with kl.target at the KL you can accept",
            "optimizer.policy_lr: lower it",
        ),
        "kl_ref_k3",
        int(kl.steps[quarter]),
        kl.last_step,
    )


def entropy_collapse(run: RecordedRun) -> Verdict:
    """Has the policy's entropy collapsed?"""
    entropy, score = curve(run, "entropy"), curve(run, "score")
    if len(entropy) < MIN_ITERATIONS or not len(score):
        return TooLittle(f"entropy of {MIN_ITERATIONS} iterations")
    if entropy.end > FLAT_ENTROPY or entropy.end > LOST * entropy.start:
        return Healthy(f"{short(entropy.start)} nats per token at the start, {short(entropy.end)} at the end")
    if solved(run) or (score.rose() and score.half().rose()):
        return Healthy(f"down to {short(entropy.end)} nats per token, but the score has risen with it")
    where = int(entropy.steps[np.argmax(entropy.values < max(FLAT_ENTROPY, LOST * entropy.start))])
    grew = "and the score has not changed since" if score.rose() else "and the score never rose"
    return Finding(
        "entropy-collapse",
        "warning" if score.rose() else "alarm",
        "The policy's entropy has collapsed",
        f"From {short(entropy.start)} nats per token at the start to {short(entropy.end)} at the end (small from step "
        f"{where} on), {grew}: {short(score.start)} at the start, {short(score.end)} at the end.",
        WHY_ENTROPY,
        (
            "optimizer.policy_lr: lower it, by a factor of three to ten",
            f"{algorithm(run)}.entropy_coef: 0.001 to 0.01",
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
        return TooLittle("answers of 16 tokens or more from two steps (stored rollouts, or answers/repetition)")
    if rate.end < LOOPING or rate.end < rate.start + MORE_LOOPING:
        return Healthy(f"{percent(rate.end)} of each answer's 4-grams are repeats")
    return Finding(
        "repetition",
        "warning",
        "Answers repeat themselves",
        f"At step {rate.last_step} {percent(rate.end)} of the 4-grams in an answer are repeats; at the start it was "
        f"{percent(rate.start)}.",
        WHY_REPETITION,
        (
            "reward.parts: add a part that penalizes repetition, or fix the one that rewards it",
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
            f"{algorithm(run)}.entropy_coef: 0.001 to 0.01",
            "optimizer.policy_lr: lower it",
        ),
        "answers/top_share",
        share.first_step,
        share.last_step,
        (f"{most_common_answer(rollouts)!r}",) if rollouts else (),
    )


def length_drift(run: RecordedRun) -> Verdict:
    """Do answers get longer or shorter, and does the score reward that?"""
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
    saw += f" {percent(cut.end)} of them are now truncated." if len(cut) and cut.end > cut.start + 0.1 else ""
    return Finding(
        "length",
        "warning" if hacked else "note",
        "Longer answers score higher, and answers grow" if hacked else "The length of answers drifts",
        saw,
        WHY_LENGTH,
        (
            "reward.parts: add {kind: length, max: ...}, or fix the part that rewards length",
            "reward.missing_eos_penalty: a score for answers that reach the limit",
            "rollout.max_new_tokens: no more than a good answer needs",
        ),
        "response_length",
        length.first_step,
        length.last_step,
    )


def never_ends(run: RecordedRun) -> Verdict:
    """Do answers end with the end token?"""
    cut, score = curve(run, "truncated"), curve(run, "score")
    if len(cut) < MIN_ITERATIONS:
        return TooLittle(f"truncated of {MIN_ITERATIONS} iterations")
    limit = int(setting(run, "rollout.max_new_tokens", 64))
    ended = 1.0 - float(cut.half().values.mean())
    if 1.0 - ended < UNENDED or (limit <= FIXED_LENGTH and (score.rose() or solved(run))):
        return Healthy(f"{percent(ended)} of the answers end with an end token, within {limit} tokens")
    return Finding(
        "never-ends",
        "warning" if limit > FIXED_LENGTH else "note",
        "Almost no answer has an end token",
        f"Since step {cut.half().first_step}, {percent(1.0 - ended)} of the answers were truncated at {limit} tokens.",
        WHY_ENDS,
        (
            "rollout.max_new_tokens: raise it, if good answers are longer",
            "rollout.stop_token_ids: name the token that ends a turn, if it is not the tokenizer's end token",
            "reward.missing_eos_penalty: a score below that of any answer with an end token",
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
