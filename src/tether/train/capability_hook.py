"""Measures the suite before the first and after the last step of a run, and records what the run changed.

The first measurement is kept in the run's folder, so that a run that is killed keeps it and does not repeat it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

from tether.config.recipes import RLRecipe
from tether.doctor.findings import Finding
from tether.doctor.lost_capability import lost_capability
from tether.evaluation.metrics import Estimate
from tether.evaluation.suite.capability_suite import SuiteResult, compare_suites, is_finite, run_suite
from tether.evaluation.suite.suite_model import SuiteModel
from tether.protocols import StepHook, StepOutcome
from tether.reports.capability_table import EVENT, CapabilityChange
from tether.store.folder import write_whole
from tether.store.recorded import Event, RecordedRun
from tether.train.hooks import RunContext
from tether.train.training import FromRollouts

FILE = "suite.json"
SEED = 0  # of the problems and the draws: the same for every run, so that runs can be compared


class CapabilityHook(StepHook):
    """Runs `evaluation.suite`; it comes before the recorder, so that its numbers are metrics of a step."""

    def begin(self, run: RunContext) -> None:
        """Measure the policy before its first step, unless an earlier attempt did."""
        assert isinstance(run.recipe, RLRecipe)
        self.run, self.settings = run, run.recipe.evaluation
        self.end: SuiteResult | None = None
        self.start, self.first = self._kept() if run.resumes else (None, None)
        origin = run.folder.origin
        if self.start is None and not (run.resumes and origin is not None):  # then the policy is not at its start yet
            self.start, self.first = self._measured("before the first step"), int((origin or {}).get("step", 0))
            with run.storing("the suite's first measurement"):
                write_whole(run.path / FILE, {"first_step": self.first, "start": self.start.as_json()})

    def after_step(self, outcome: StepOutcome) -> None:
        """Add the first measurement to the first step's metrics, and the last one to those of the last step."""
        if outcome.step == self.first and self.start is not None:
            outcome.metrics.update(_metrics("suite/start/", self.start))
        if self.run.done == self.run.total:
            self.end = self._measured("after the last step")
            outcome.metrics.update(_metrics("suite/", self.end))

    def finish(self) -> None:
        """Measure the policy where the run ended early; record and report what changed."""
        run, start = self.run, self.start
        end = self.end or self._measured("after the last step")
        if start is None:
            run.warn(f"{run.path / FILE} is missing or damaged: the suite's measurement has nothing to compare with.")
            return
        if not (is_finite(start) and is_finite(end)):
            run.warn("The suite gave numbers that are not finite: the model has diverged, and nothing is compared.")
            return
        changes = changes_between(start, end)
        told = {"changes": [change.as_json() for change in changes], "items": start.items, "seed": start.seed}
        lost = [change.label for change in changes if change.is_loss]
        text = f"capabilities after {run.done} steps: " + (f"lost: {', '.join(lost)}" if lost else "no loss found")
        run.event(EVENT, text, step=run.done - 1, data=told)
        self._report(RecordedRun(run.name, run.recipe.method, run.config, [], [Event(0.0, EVENT, text, data=told)]))

    def _report(self, run: RecordedRun) -> None:
        verdict = lost_capability(run)
        if isinstance(verdict, Finding) and self.run.recipe.run.doctor_every:
            step = self.run.done - 1
            text = f"{verdict.title}: {verdict.saw}"
            self.run.notify(f"Doctor: {text} ({verdict.link})")
            data = dataclasses.replace(verdict, last_step=step).as_json()
            self.run.event("finding", text, step=step, data=data)

    def _measured(self, when: str) -> SuiteResult:
        run, names = self.run, self.settings.suite
        assert isinstance(run.training, FromRollouts)
        parts, began = run.training.parts, time.monotonic()
        policy = dataclasses.replace(run.policy, model=parts.roles.actor.policy)
        model = SuiteModel.of_policy(policy, parts.engine, parts.roles.actor)
        model = dataclasses.replace(model, heartbeat=lambda words: self._heartbeat(f"{words}, {when}"))
        if parts.shared is not None:
            parts.shared.clear()  # what the suite's rows leave there must not reach a step
        result = run_suite(model, names, items=self.settings.suite_items, seed=SEED)
        if parts.shared is not None:
            parts.shared.clear()
        run.notify(f"Suite {when}: {', '.join(names)} in {time.monotonic() - began:.0f} s.")
        return result

    def _heartbeat(self, words: str) -> None:
        for hook in self.run.hooks:
            if hook is not self and self.run.taken:  # before the first step no other hook has begun
                hook.heartbeat(words)

    def _kept(self) -> tuple[SuiteResult | None, int | None]:
        """The first measurement of an earlier attempt, and the step that it came before."""
        try:
            record: Mapping[str, Any] = json.loads((self.run.path / FILE).read_text(encoding="utf-8"))
            start = SuiteResult.from_json(record["start"])
            wanted = self.settings.suite, self.settings.suite_items
            return (start, int(record["first_step"])) if (start.names, start.items) == wanted else (None, None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None, None


def changes_between(start: SuiteResult, end: SuiteResult) -> list[CapabilityChange]:
    """End minus start, metric by metric."""
    return [
        CapabilityChange(
            name=name,
            label=change.metric.label,
            better=change.metric.better,
            margin=change.metric.margin,
            judged=change.metric.judged,
            start=_three(change.second),
            end=_three(change.first),
            difference=_three(change.difference),
            adjusted=change.adjusted,
            count=change.difference.count,
        )
        for name, change in compare_suites(end, start).items()
    ]


def _three(estimate: Estimate) -> tuple[float, float, float]:
    return estimate.value, estimate.low, estimate.high


def _metrics(prefix: str, result: SuiteResult) -> dict[str, float]:
    return {f"{prefix}{name}": estimate.value for name, estimate in result.estimates.items()}
