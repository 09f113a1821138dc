"""One attempt at a run: from its beginning, or from where an earlier attempt left off, to its end or its stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from tether.config.recipes import RLRecipe
from tether.doctor.own_rules import own_rules
from tether.errors import StorageError
from tether.files import recover
from tether.models.save import save_model
from tether.protocols import StepHook, StepOutcome
from tether.store.checkpoints import Checkpoint
from tether.store.database.records import steps_logged
from tether.train.capability_hook import CapabilityHook
from tether.train.checkpointing import BestModel, Checkpointer, StepRecorder
from tether.train.failures import FaultRecorder, Watchdog
from tether.train.hooks import (
    HOOK_KEY,
    AnswerMetrics,
    LiveDiagnosis,
    LogprobMismatch,
    MetricTrackers,
    RewardErrorNotices,
    RunContext,
    UserHook,
    user_hooks,
)
from tether.train.objects import Objects, name_of
from tether.train.provenance import Provenance
from tether.train.run_plan import FILE as PLAN
from tether.train.run_plan import PlanMeasurements, RunPlan


class Attempt:
    """Calls the hooks of a run around its steps, in the order of `run.hooks`; they are closed in reverse.

    The order is part of the contract. Metrics are complete before they are recorded, the step is recorded before the
    best model is saved, and both come before the checkpoint that counts on them.
    """

    def __init__(
        self,
        run: RunContext,
        hooks: Sequence[StepHook],
        *,
        check: Callable[[Checkpoint], None],
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        """`check` raises where a checkpoint cannot be resumed here; `save` writes the results and the report."""
        self.run, self._check, self._save = run, check, save
        run.hooks = hooks
        self.recorder = next(hook for hook in hooks if isinstance(hook, StepRecorder))
        self.checkpointer = next(hook for hook in hooks if isinstance(hook, Checkpointer))
        self.diagnosis = next((hook for hook in hooks if isinstance(hook, LiveDiagnosis)), None)
        self._begun: list[StepHook] = []
        self._with_heartbeat = [hook for hook in run.hooks if type(hook).heartbeat is not StepHook.heartbeat]

    def __enter__(self) -> Attempt:
        self._steps_before = steps_logged(self.run.path)  # a run that starts over clears its log
        for place in (self.run.folder.best_path, self.run.folder.model_path):
            recover(place)
        try:
            for hook in self.run.hooks:
                hook.begin(self.run)
                self._begun.append(hook)
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if error is not None and self.run.is_failure(error):
            self.run.event("failed", str(error) or type(error).__name__, step=self.run.done)
        with ExitStack() as closing:  # closes the rest where one raises
            for hook in self._begun:
                closing.callback(hook.close, error)

    # -- where it starts ----------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Restore the newest whole checkpoint, or start over where there is none; returns the steps taken."""
        run = self.run
        run.unrecorded = []  # the rewind deletes the events of this step
        unusable: Sequence[str] = ()
        checkpoint = self.checkpointer.newest()
        if checkpoint is not None:
            self._check(checkpoint)
            unusable = run.training.restore(checkpoint)
            run.ended_early = str(checkpoint.values.get("ended_early", ""))
            self._restore_hooks(checkpoint)
        if self.recorder.rewind() and self.diagnosis is not None:
            self.diagnosis.read_history()
        for text in run.unrecorded:
            run.event("warning", text, step=run.done)
        run.unrecorded = None
        if checkpoint is not None:
            self._warn_of_unused(checkpoint, unusable)
        run.event("resumed", f"resumed after {run.done} steps")
        return run.done

    def fork(self, checkpoint: Checkpoint, unusable: Sequence[str] = ()) -> int:
        """Continue from another run's checkpoint, which training has restored; it becomes this run's first."""
        self._restore_hooks(checkpoint)
        self._warn_of_unused(checkpoint, unusable)
        self.checkpointer.save()
        self.run.event("forked", f"forked after {self.run.done} steps of another run")
        return self.run.done

    def note_restart(self, fault: str, ranks: int) -> None:
        """Record and say what a fault cost, where ranks were started again after it."""
        run = self.run
        again = max(0, self._steps_before - run.done)
        place = f"the checkpoint of step {run.done}" if run.done else "the beginning"
        text = f"{fault}: started again from {place} with {ranks} ranks; {again} recorded steps are taken again"
        run.notify(text)
        run.event("restarted", text, step=run.done, data={"fault": fault, "ranks": ranks, "steps_again": again})

    def _restore_hooks(self, checkpoint: Checkpoint) -> None:
        self.run.done = checkpoint.step
        for hook in self.run.hooks:
            hook.restore(checkpoint.values)

    def _warn_of_unused(self, checkpoint: Checkpoint, unusable: Sequence[str]) -> None:
        """Warn of what a checkpoint holds that this run cannot use."""
        for text in unusable:
            self.run.warn(text)
        passed = {hook.key for hook in self.run.hooks if isinstance(hook, UserHook)}
        for key in (key for key in checkpoint.values if key.startswith(HOOK_KEY) and key not in passed):
            self.run.warn(f"{key} has state in the checkpoint and is not passed now: the run continues without it.")

    # -- step by step -------------------------------------------------------------------------------------------------

    def heartbeat(self, phase: str) -> None:
        """A phase of a step starts."""
        for hook in self._with_heartbeat:
            hook.heartbeat(phase)

    def after_step(self, outcome: StepOutcome) -> None:
        """Call the hooks with the outcome of a step."""
        self.run.done = outcome.step + 1
        self.run.taken += 1
        for hook in self.run.hooks:
            hook.after_step(outcome)

    # -- how it ends --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Leave a checkpoint to resume from."""
        self.checkpointer.stop()
        self.run.event("stopped", f"stopped after {self.run.done} steps", step=self.run.done)

    def finish(self) -> None:
        """After the last step: write the report, the plan and the model, and mark the run as finished."""
        run = self.run
        self.heartbeat("the end")
        self.checkpointer.wait()
        with run.training.learner.ranks.whole():
            report = run.training.finish()
            for hook in run.hooks:
                hook.finish()
            with run.storing("the trained model"):
                self._save(report)
        early = f"ended after {run.done} of {run.total} steps: {run.ended_early}" if run.done < run.total else ""
        run.event("done", early or f"all {run.done} steps are taken", step=run.done)
        if not run.flush():
            raise StorageError(
                f"the {run.done} steps are taken, but not all of them could be recorded in {run.path}: make "
                f"room, and let `tether resume {run.path}` end the run"
            )
        with run.storing("the note that all is done"):
            run.folder.finish(run.done)


def training_attempt(run: RunContext, planned: RunPlan, loaded: dict[str, Any], objects: Objects) -> Attempt:
    """An attempt at training a language model; `loaded` are the digests of the policy as it was loaded."""
    provenance, every = Provenance(loaded), run.recipe.run.doctor_every
    hooks: list[StepHook] = [
        provenance,
        AnswerMetrics(),
        *([CapabilityHook()] if isinstance(run.recipe, RLRecipe) and run.recipe.evaluation.suite else []),
        StepRecorder(),
        MetricTrackers(objects.trackers),
        PlanMeasurements(planned.measured),
        *([LiveDiagnosis(every, own_rules(objects.doctor_rules, "doctor_rules"))] if every else []),
        RewardErrorNotices(),
        LogprobMismatch(),
        BestModel(),
        *user_hooks(objects.hooks, name_of),
        Checkpointer(),
        FaultRecorder(run.path, run.warn),
        Watchdog(run.recipe.run.hang_timeout, run.path),
    ]

    def save(report: dict[str, Any]) -> None:
        run.folder.write("report.json", report)
        run.folder.write(PLAN, planned.as_json())
        if run.recipe.run.save:
            save_model(run.training.model, run.policy.tokenizer, run.folder.model_path)

    return Attempt(run, hooks, check=provenance.check, save=save)
