"""What a run keeps as it goes: the record of each step, the best model so far, and checkpoints to resume from.

Their order is what makes a resume exact. A step is recorded first; the best model is saved before the checkpoint that
names it; a checkpoint gets its name only once every recorded step is on disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.config.evaluation_settings import PreferenceEvaluationSettings
from tether.config.recipes import Recipe, RecordsRecipe, RLRecipe
from tether.errors import StorageError
from tether.files import files_damage
from tether.models.save import save_model
from tether.protocols import StepHook, StepOutcome
from tether.store.checkpoints import Checkpoint, CheckpointWriter, listed, read_newest
from tether.store.database.apply import KeepRollouts
from tether.store.history import settle_history
from tether.store.recorder import RunRecorder, RunStart
from tether.train.hooks import RunContext, step_rollouts


class StepRecorder(StepHook):
    """Records the metrics, the answers and the events of a run in its store."""

    def begin(self, run: RunContext) -> None:
        """Open the store, and tell the user what the identity check found."""
        assert run.identity is not None
        self.run, store = run, run.recipe.store
        self.recorder = RunRecorder(
            run.workspace,
            run.path,
            RunStart(run.recipe.method, run.total, run.config, run.environment, run.sources),
            resumes=run.resumes,
            pieces=run.token_text,
            keep=KeepRollouts(store.rollouts_every, store.rollouts_keep or None),
            notify=run.notify,
            uid=run.identity.header.uid,
            moved=run.identity.moved,
        )
        run.record_event, run.flush = self.recorder.event, self.recorder.flush
        for text in run.identity.told:  # without a step, so that the rewind of a resumed run keeps them
            run.notify(text)
            run.event("warning", text)

    def rewind(self) -> bool:
        """Delete the records of steps that will be taken again, and restore missing ones; False if the store failed."""
        run = self.run
        self.recorder.rewind(run.done)
        if not self.recorder.flush():
            return False
        if not self.recorder.waits:  # otherwise the store is away, and the recorder said so
            assert run.identity is not None
            first = int((run.identity.header.forked or {}).get("step", 0))
            for text in settle_history(run.workspace, run.path, first, run.done).told:
                run.warn(text)
        return True

    def after_step(self, outcome: StepOutcome) -> None:
        """Queue the step for the thread that writes it."""
        self.recorder.record(outcome.step, outcome.metrics, step_rollouts(outcome))
        if self.run.taken == 1:
            self.run.folder.note_first_step()

    def close(self, error: BaseException | None) -> None:
        """Record how the attempt ended."""
        state = "done" if self.run.folder.is_finished else "stopped"
        self.recorder.close("failed" if self.run.is_failure(error) else state)


@dataclass
class BestSoFar:
    """The best value of a held-out metric. `best` is greater where better: a loss is kept with its sign turned."""

    metric: str  # such as held_out/score
    sign: float
    patience: int  # evaluations without improvement before the run ends; 0 never ends it
    keeps: bool  # whether the best model is saved
    best: float = -math.inf
    waited: int = 0  # evaluations since the best
    step: int | None = None  # steps taken at the best; None: it was the start, or there is none

    @classmethod
    def of(cls, recipe: Recipe) -> BestSoFar:
        """By the recipe; training on records compares losses by default."""
        if isinstance(recipe, RLRecipe):
            rules, name, sign = recipe.evaluation, "score", 1.0
        else:
            assert isinstance(recipe, RecordsRecipe)
            rules = recipe.evaluation
            by_accuracy = isinstance(rules, PreferenceEvaluationSettings) and rules.metric == "accuracy"
            name, sign = ("accuracy", 1.0) if by_accuracy else ("loss", -1.0)
        # A single evaluation, at the end, has nothing to choose from.
        return cls(f"held_out/{name}", sign, rules.patience, rules.keep_best and rules.every > 0)

    def update(self, done: int, metrics: Mapping[str, float]) -> bool:
        """Whether the model after `done` steps is better than every earlier one, the start included.

        A value that is not finite is never better.
        """
        start = self.sign * metrics.get(f"start/{self.metric}", math.nan)
        if math.isfinite(start):
            self.best = max(self.best, start)
        if self.metric not in metrics:
            return False
        value = self.sign * metrics[self.metric]
        if not (math.isfinite(value) and value > self.best):
            self.waited += 1
            return False
        self.best, self.waited, self.step = value, 0, done
        return True

    @property
    def is_over(self) -> bool:
        """Whether `patience` evaluations brought no improvement."""
        return bool(self.patience) and self.waited >= self.patience

    @property
    def reason(self) -> str:
        """Why the run ends early."""
        name = self.metric.replace("_", "-").replace("/", " ")
        return f"the {name} was not better in {self.waited} evaluations (evaluation.patience)"

    def values(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {"best": self.best, "waited": self.waited, "best_step": self.step}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint; a fork with another metric or patience continues from them."""
        self.best = float(values["best"])
        self.waited = int(values.get("waited", 0))
        self.step = values.get("best_step")


class BestModel(StepHook):
    """Saves the model with the best held-out metric, and ends the run when `evaluation.patience` runs out."""

    def begin(self, run: RunContext) -> None:
        """Start without a best."""
        self.run, self.best = run, BestSoFar.of(run.recipe)

    def after_step(self, outcome: StepOutcome) -> None:
        """Save a better model; end the run where none came for too long."""
        if self.best.update(self.run.done, outcome.metrics) and self.best.keeps:
            self._save()
        self._end_early()

    def state(self) -> dict[str, Any]:
        """The best value so far."""
        return self.best.values()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back the best value; a resumed run also checks the saved model."""
        self.best.restore(state)
        self._end_early()
        if self.run.resumes:
            self._check_saved()

    def _end_early(self) -> None:
        if self.best.is_over:
            self.run.end_early(self.best.reason)

    def _save(self) -> None:
        run = self.run
        whole = run.training.learner.ranks.whole()
        with run.storing("the best model so far"), whole, run.training.as_saved():
            save_model(run.training.model, run.policy.tokenizer, run.folder.best_path)

    def _check_saved(self) -> None:
        """Warn where the best model is damaged or missing; save it again where the checkpoint is of its very step."""
        run, path, kept = self.run, self.run.folder.best_path, self.best.keeps and self.best.step is not None
        assert run.identity is not None
        forked = run.identity.header.forked
        damage = files_damage(path) if path.is_dir() else f"{path} is missing" if kept and not forked else None
        if damage is None:
            return
        if kept and self.best.step == run.done:
            self._save()
            run.warn(f"{damage}: the best model is saved again, from the checkpoint of step {run.done}.")
            return
        run.warn(
            f"{damage}: put {path} back from a copy. The run continues; do not use the "
            "best model until a better one replaces it."
        )


class Checkpointer(StepHook):
    """Writes checkpoints, every `checkpoint.every` steps and at the end. Each holds the state of every hook."""

    def begin(self, run: RunContext) -> None:
        """Remove what an interrupted attempt left half written."""
        self.run, rules = run, run.recipe.checkpoint
        self.saved_at: int | None = None  # steps
        self.writer = CheckpointWriter(
            run.folder.checkpoints, keep=rules.keep, keep_every=rules.keep_every, notify=run.warn
        )

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None where the run has written none and starts over."""
        folder = self.run.folder
        checkpoint = read_newest(folder.checkpoints, self.run.warn)
        if checkpoint is None and (damaged := listed(folder.checkpoints)):
            raise StorageError(
                f"none of the {len(damaged)} checkpoints in {folder.checkpoints} is whole, so {folder.path} "
                "cannot be resumed: put one back from a copy, or remove the run and start it again"
            )
        if checkpoint is None and (origin := folder.origin) is not None:
            raise StorageError(
                f"{folder.path} began after {origin['step']} steps of {origin['run']}, and has no whole "
                "checkpoint to resume from: remove it, and fork again with "
                f"`tether fork {origin['folder']} --step {origin['step']}`"
            )
        return checkpoint

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """The checkpoint of this step exists."""
        self.saved_at = self.run.done

    def after_step(self, outcome: StepOutcome) -> None:  # noqa: ARG002
        """Save where one is due."""
        every = self.run.recipe.checkpoint.every
        if (every and self.run.done % every == 0) or self.run.is_over:
            self.save()

    def save(self) -> None:
        """Start to write a checkpoint. It gets its name once every recorded step is on disk."""
        self.writer.wait()  # before there is a second copy in memory
        values: dict[str, Any] = {}
        for hook in self.run.hooks:
            values |= hook.state()
        if self.run.ended_early:
            values["ended_early"] = self.run.ended_early
        ranks = self.run.training.learner.ranks
        captured = self.run.training.capture(self.run.done, values)
        self.writer.save(ranks.write_shares(self.writer.folder, captured), self._flush_records)
        self.saved_at = self.run.done

    def _flush_records(self) -> None:
        """A run that resumes from a checkpoint does not record the steps before it again, so they must be on disk."""
        if not self.run.flush():
            raise OSError("the steps before it could not be recorded")

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        self.writer.wait()

    def stop(self) -> None:
        """Leave a checkpoint to resume from, before the last step; raises StorageError where it cannot be written."""
        run, folder = self.run, self.run.folder
        if self.saved_at != run.done:
            self.save()
        self.wait()
        if run.done not in (0, *(step for step, _ in listed(folder.checkpoints))):
            raise StorageError(
                f"stopped after {run.done} steps, but no checkpoint of them could be written to "
                f"{folder.checkpoints}: make room; `tether resume {folder.path}` continues from the last one"
            )

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Wait for the last checkpoint."""
        self.wait()
