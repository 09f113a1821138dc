"""The doctor: runs every audit over a finished run, or over a run in progress."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tether.doctor.answer_metrics import measured
from tether.doctor.drift import entropy_collapse, kl_runaway, length_drift, mode_collapse, never_ends, repeating
from tether.doctor.findings import SEVERITIES, Audit, Finding, Healthy, TooLittle, Verdict
from tether.doctor.learning import (
    clip,
    critic,
    critic_lr,
    dominated_advantages,
    early_stop,
    gradient_spikes,
    not_finite,
    not_training,
)
from tether.doctor.lost_capability import lost_capability
from tether.doctor.own_rules import OwnRule
from tether.doctor.sampling import negative_kl, rollout_mismatch, stale_answers
from tether.doctor.scores import few_prompts, flat_scores, held_out, over_optimisation, reward_failures, score_collapse
from tether.store.recorded import RecordedRun, StoredRollout

AUDITS: tuple[Audit, ...] = (
    Audit("not-training", "Do the weights move at all?", not_training),
    Audit("not-finite", "Was every loss and gradient finite?", not_finite),
    Audit("rollout-mismatch", "Is the ratio 1 before the first update?", rollout_mismatch),
    Audit("staleness", "Is the policy that sampled close to the one that is trained?", stale_answers),
    Audit("negative-kl", "Is the KL to the reference valid?", negative_kl),
    Audit("kl-runaway", "Does the policy stay near the reference?", kl_runaway),
    Audit("entropy-collapse", "Does the policy still explore?", entropy_collapse),
    Audit("repetition", "Do answers loop?", repeating),
    Audit("mode-collapse", "Do different prompts get different answers?", mode_collapse),
    Audit("length", "Does length drift, or raise the score?", length_drift),
    Audit("never-ends", "Do answers end by themselves?", never_ends),
    Audit("over-optimisation", "Does the true score follow the proxy?", over_optimisation),
    Audit("capability-loss", "Does it still do what it could before?", lost_capability),
    Audit("held-out", "Do held-out prompts gain too?", held_out),
    Audit("score-collapse", "Did the run keep what it had learned?", score_collapse),
    Audit("flat-scores", "Do scores differ?", flat_scores),
    Audit("reward-failures", "Does the reward score every answer?", reward_failures),
    Audit("few-prompts", "Are there enough different prompts?", few_prompts),
    Audit("critic", "Is the critic better than the mean?", critic),
    Audit("critic-rate", "Is the critic's learning rate low enough?", critic_lr),
    Audit("dominated-advantages", "Do many answers decide the step?", dominated_advantages),
    Audit("clip", "Is the clip fraction in its usual range?", clip),
    Audit("early-stop", "Are updates finished?", early_stop),
    Audit("gradient-spikes", "Are gradients steady?", gradient_spikes),
)

STEPS_READ = 12  # maximum number of steps whose rollouts are read: enough for a trend, and quick on a long run


@dataclass(frozen=True)
class Examination:
    """What every audit said of one run, by its name, and what the user's own rules found."""

    verdicts: Mapping[str, Verdict]
    of_rules: Sequence[Finding] = ()

    @property
    def findings(self) -> list[Finding]:
        """The findings, most severe first."""
        found = [verdict for verdict in self.verdicts.values() if isinstance(verdict, Finding)]
        found += self.of_rules
        return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


@dataclass(frozen=True)
class Doctor:
    """Looks at a run with each of its audits, and with the user's own rules."""

    audits: Sequence[Audit] = AUDITS
    rules: Sequence[OwnRule] = ()

    def examine(self, run: RecordedRun) -> list[Finding]:
        """The findings of a run, most severe first."""
        return self.examination(run).findings

    def examination(self, run: RecordedRun) -> Examination:
        """The verdict of every audit, including those that found nothing."""
        run = with_measures(run)
        verdicts: dict[str, Verdict] = {audit.name: audit.examine(run) for audit in self.audits}
        by_rule = [(rule.name, rule.findings(run)) for rule in self.rules]
        verdicts |= {name: Healthy("Your own rule found nothing.") for name, found in by_rule if not found}
        return Examination(verdicts, [finding for _, found in by_rule for finding in found])


def with_measures(run: RecordedRun) -> RecordedRun:
    """The run with metrics computed from its stored rollouts; a long run is sampled at a few evenly spaced steps."""
    steps = spread_out(run.rollout_steps, STEPS_READ)
    read = lru_cache(maxsize=STEPS_READ)(lambda step: tuple(run.rollouts(step)))
    kept = set(steps)
    metrics = [measured(row, read(int(row["step"]))) if int(row["step"]) in kept else row for row in run.metrics]
    return dataclasses.replace(run, metrics=metrics, rollout_steps=steps, rollouts=read)


def spread_out(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


@dataclass
class LiveDoctor:
    """Examines a run while it trains: feed it every step, and it returns only new findings.

    It keeps the first and the latest steps, and the rollouts of a few, so that memory and time per step stay constant.
    A finding is repeated only when its severity rises. An audit that raises is skipped, because the doctor must never
    stop a run.
    """

    method: str
    config: Mapping[str, Any]
    every: int = 10
    first_steps: int = 20
    latest_steps: int = 180
    kept_rollouts: int = 3  # number of latest steps whose rollouts are kept, beside the first
    doctor: Doctor = field(default_factory=Doctor)

    def __post_init__(self) -> None:
        self._first: list[Mapping[str, float]] = []
        self._latest: deque[Mapping[str, float]] = deque(maxlen=self.latest_steps)
        self._first_rollouts: tuple[int, Sequence[StoredRollout]] | None = None
        self._rollouts: deque[tuple[int, Sequence[StoredRollout]]] = deque(maxlen=self.kept_rollouts)
        self._said: dict[tuple[str, str], int] = {}
        self._steps = 0

    def add_rules(self, rules: Sequence[OwnRule]) -> None:
        """Look with these rules of the user's as well."""
        self.doctor = dataclasses.replace(self.doctor, rules=(*self.doctor.rules, *rules))

    def see(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[StoredRollout] = ()) -> list[Finding]:
        """Add one step; every `every`-th call returns new findings, other calls return nothing."""
        row = measured({"step": float(step)} | dict(metrics), rollouts)
        (self._first if len(self._first) < self.first_steps else self._latest).append(row)
        if rollouts and self._first_rollouts is None:
            self._first_rollouts = (step, rollouts)
        elif rollouts:
            self._rollouts.append((step, rollouts))
        self._steps += 1
        return self._look() if self._steps % self.every == 0 else []

    def _look(self) -> list[Finding]:
        run = self._recorded()
        found = [verdict for audit in self.doctor.audits if isinstance(verdict := _ask(audit, run), Finding)]
        found += [finding for rule in self.doctor.rules for finding in rule.findings(run)]
        new = [finding for finding in found if self._graver(finding)]
        self._said |= {_key(finding): SEVERITIES.index(finding.severity) for finding in new}
        return sorted(new, key=lambda finding: SEVERITIES.index(finding.severity))

    def _graver(self, finding: Finding) -> bool:
        return SEVERITIES.index(finding.severity) < self._said.get(_key(finding), len(SEVERITIES))

    def _recorded(self) -> RecordedRun:
        """The kept steps as a run; the metrics of rollouts are already included."""
        first = [self._first_rollouts] if self._first_rollouts is not None else []
        kept = dict([*first, *self._rollouts])
        return RecordedRun(
            name="live",
            method=self.method,
            config=self.config,
            metrics=[*self._first, *self._latest],
            rollout_steps=sorted(kept),
            rollouts=lambda step: kept.get(step, ()),
        )


def _key(finding: Finding) -> tuple[str, str]:
    """By what a finding is known again: a rule's name, empty for Tether's own, and the audit's."""
    return finding.rule, finding.audit


def _ask(audit: Audit, run: RecordedRun) -> Verdict:
    try:
        return audit.examine(run)
    except Exception as error:  # a bug in an audit must not stop the run
        return TooLittle(f"{audit.name} failed: {type(error).__name__}: {error}")
