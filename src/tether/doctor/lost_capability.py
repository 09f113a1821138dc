"""Audit of the capabilities that a run measured before its first and after its last step (`evaluation.suite`)."""

from __future__ import annotations

from tether.doctor.findings import Finding, Healthy, TooLittle, Verdict
from tether.reports.capability_table import CapabilityChange, changes_of
from tether.store.recorded import RecordedRun

WHY = (
    "Reinforcement learning pays for one score. What the score does not measure can be lost, and nothing in the run "
    "brings it back: the policy left the region in which it was a good model of language."
)
ALARM = 4.0  # margins: a loss this large is no side effect


def lost_capability(run: RecordedRun) -> Verdict:
    """Does the policy still do what it could before?"""
    changes = changes_of(run)
    judged = [change for change in changes if change.judged]
    if not judged:
        return TooLittle("a suite of capabilities, measured before and after the run (evaluation.suite)")
    lost = sorted((change for change in judged if change.is_loss), key=lambda each: -each.loss / each.margin)
    if not lost:
        worst = max(judged, key=lambda each: each.loss / each.margin)
        return Healthy(f"{len(judged)} metrics of the suite; the largest change for the worse: {_words(worst)}")
    worst = lost[0]
    return Finding(
        "capability-loss",
        "alarm" if worst.loss > ALARM * worst.margin else "warning",
        "The policy lost what it could do before",
        f"{'; '.join(map(_words, lost))}. Differences are over pairs of the same items, with 95 % intervals; each of "
        f"these also leaves out 0 after a Bonferroni correction for {len(judged)} metrics.",
        WHY,
        (
            "kl.coef: raise it, or set kl.target with kl.controller: proportional",
            "optimizer.policy_lr: lower it",
            *(("ptx.data: mix in text that the policy should not forget",) if run.method == "ppo" else ()),
            "run.steps: fewer; evaluation.keep_best keeps the model with the best held-out score",
        ),
        f"suite/{worst.name}",
        0,
        int(run.metrics[-1]["step"]) if run.metrics else 0,
    )


def _words(change: CapabilityChange) -> str:
    start, end, difference = change.texts
    return f"{change.label} went from {start} to {end}, a difference of {difference} ({change.better} is better)"
