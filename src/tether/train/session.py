"""Everything around a run's steps: recording them, checkpoints, the best model, the doctor, the watchdog."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from shlex import quote
from types import TracebackType
from typing import Any

from safetensors import SafetensorError

from tether.config.recipes import Recipe
from tether.data.records import tokenizer_digest
from tether.doctor.answer_metrics import step_measures
from tether.doctor.doctor import LiveDoctor
from tether.errors import ConfigError, StorageError, TetherError
from tether.files import files_damage, recover
from tether.models.load import LoadedModel
from tether.models.save import save_model
from tether.protocols import Tracker
from tether.store.checkpoints import Checkpoint, CheckpointWriter, listed, read_newest
from tether.store.database.apply import KeepRollouts
from tether.store.database.open import workspace_at
from tether.store.database.records import RecordSource
from tether.store.folder import RunFolder, recipe_record
from tether.store.header import RunHeader, origin_trouble, read_header
from tether.store.history import Identity, runs_by_id, settle_history, take_over
from tether.store.lineage import describe_environment, models_of, sources_of
from tether.store.read import open_workspace, read_run
from tether.store.recorded import StoredRollout
from tether.store.recorder import RunRecorder, RunStart
from tether.store.tokens import StepRollouts, token_pieces
from tether.store.trackers import NamedTracker, TrackedRun, open_trackers
from tether.train.best import BestSoFar
from tether.train.failure_record import FaultRecorder
from tether.train.logprob_mismatch import Agreement
from tether.train.provenance import changes, other_models
from tether.train.rl import StepResult
from tether.train.run_plan import FILE as PLAN
from tether.train.run_plan import RunPlan
from tether.train.training import Taken, Training
from tether.train.watchdog import Watchdog

MAX_REWARD_ERRORS = 20  # different errors of rewards that a attempt tells and keeps
BITS_DEPEND_ON = ("torch", "threads", "processor", "device")  # of what the environment is described by


class Session:
    """One attempt of a run: from its beginning, or from where an earlier attempt left off, to its end or its stop."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        training: Training,
        policy: LoadedModel,
        *,
        planned: RunPlan,
        loaded: dict[str, Any],
        resumes: bool,
        notify: Callable[[str], None],
        trackers: Sequence[Tracker | NamedTracker] = (),
    ) -> None:
        self.recipe, self.folder, self.training, self.policy = recipe, folder, training, policy
        self.notify, self.planned = notify, planned
        self.resumes = resumes
        self.done = 0  # steps taken
        self.taken = 0  # of them, in this attempt
        self.best = BestSoFar.of(recipe)
        self.agreement = Agreement()
        self._saved_at: int | None = None
        self._reward_errors: set[str] = set()  # told in this attempt
        self.workspace = workspace = workspace_at(recipe.run.directory, recipe.store.url)
        config = recipe_record(recipe)
        for place in (folder.best_path, folder.model_path):
            recover(place)
        identity = self._identify(config)
        sources = [*origin_of(folder), *sources_of(config, workspace)]
        device = str(policy.model.device)
        self._environment = describe_environment(seed=recipe.run.seed, device=device)
        self._environment["tokenizer"] = tokenizer_digest(policy.tokenizer)
        self._ground = loaded | {"models": other_models(list(models_of(config)))}
        self._stands_on = {
            "model": loaded["weights"],
            **{f"{source.role} {source.source}": source.sha256 for source in sources if source.sha256 is not None},
        }
        self._pieces = token_pieces(policy.tokenizer)
        keep = KeepRollouts(recipe.store.rollouts_every, recipe.store.rollouts_keep or None)
        start = RunStart(recipe.method, recipe.run.steps, config, self._environment, sources)
        self.recorder = RunRecorder(
            workspace,
            folder.path,
            start,
            resumes=resumes,
            pieces=self._pieces,
            keep=keep,
            notify=notify,
            uid=identity.header.uid,
            moved=identity.moved,
        )
        for text in identity.told:
            self._trouble(text)
        place = TrackedRun(self.recorder.name, folder.path, config)
        self.trackers = open_trackers(recipe.store.trackers, place, notify, trackers)
        rules = recipe.checkpoint
        self.checkpoints = CheckpointWriter(
            folder.checkpoints, keep=rules.keep, keep_every=rules.keep_every, notify=self._trouble
        )
        self.faults = training.learner.on_fault = FaultRecorder(folder.path, self._trouble)
        self.doctor = LiveDoctor(recipe.method, config, every=max(recipe.run.doctor_every, 1))
        self._watchdog = Watchdog(recipe.run.hang_timeout, folder.path)
        self._open = ExitStack()

    def _identify(self, config: dict[str, Any]) -> Identity:
        """The run by its own id; one that goes on brings its records along, and may find that it is a copy."""
        path, told = self.folder.path, list[str]()
        found = read_header(path, told.append)
        origin = self.folder.origin or {}
        header = found or RunHeader(secrets.token_hex(8), config, origin)
        if not self.resumes:
            self.header = header
            return Identity(header, runs_by_id(self.workspace.directory, path))
        identity = take_over(self.workspace, path, header, is_new=found is None)
        if found is not None and (trouble := origin_trouble(path, found)):
            told.append(trouble)
        self.header = identity.header
        if told or self.header != found:  # damaged, a copy, or of a Tether that wrote none
            with self._storing("run.json"):
                self.header.write(path)
        return Identity(identity.header, identity.moved, (*told, *identity.told))

    def __enter__(self) -> Session:
        self._open.enter_context(self._watchdog)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state = "done" if self.folder.is_finished else "stopped"
        if error is not None and not (self.resumes and self.taken == 0):  # a run that was refused is as it was
            state = "failed"
            self.recorder.event("failed", str(error) or type(error).__name__, step=self.done)
        self._open.close()
        self.checkpoints.wait()
        self.trackers.close()
        self.recorder.close(state)

    # -- where it starts ----------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Become what the newest whole checkpoint holds, or start over where there is none; the steps taken."""
        checkpoint = read_newest(self.folder.checkpoints, self._trouble)
        if checkpoint is not None:
            self._check_ground(checkpoint)
            self.training.restore(checkpoint)
            self._start_from(checkpoint)
            self._check_best(checkpoint)
        elif damaged := listed(self.folder.checkpoints):
            raise StorageError(
                f"none of the {len(damaged)} checkpoints in {self.folder.checkpoints} is whole, so {self.folder.path} "
                "cannot go on: put one back from a copy, or remove the run and start it again"
            )
        elif (origin := self.folder.origin) is not None:
            raise StorageError(
                f"{self.folder.path} began after {origin['step']} steps of {origin['run']}, and has no whole "
                "checkpoint to go on from: remove it, and fork again with "
                f"`tether fork {origin['folder']} --step {origin['step']}`"
            )
        self.recorder.rewind(self.done)
        if self.recorder.flush():
            self._settle_history()
            self._tell_doctor()
        self.recorder.event("resumed", f"goes on after {self.done} steps")
        return self.done

    def fork(self, checkpoint: Checkpoint) -> int:
        """Take over from another run's checkpoint, which training has become, and keep it as one's first."""
        self._start_from(checkpoint)
        self.save_checkpoint()
        self.recorder.event("forked", f"begins after {self.done} steps of another run")
        return self.done

    def _start_from(self, checkpoint: Checkpoint) -> None:
        self.done = self._saved_at = checkpoint.step
        self.best.restore(checkpoint.values)
        self.agreement = Agreement(float(checkpoint.values.get("worst_gap", 0.0)))

    def _check_ground(self, checkpoint: Checkpoint) -> None:
        """The model and the data that a run goes on with must be those that it began with."""
        if changed := self.ground_changes(checkpoint):
            raise ConfigError(
                f"{', '.join(changed)} changed since the run {self.folder.path} began, so it cannot go on as it was: "
                "put the old one back, or start a new run"
            )
        before = checkpoint.values["stands_on"]
        changed = [role for role, digest in before.items() if self._stands_on.get(role) != digest]
        if changed:
            models = [role for role in changed if role.partition(" ")[0] in ("critic", "reward")]
            repair = "or start a new run"
            if not models:  # records and prompts: where they were repaired, what was learned so far is still good
                more = f" --run.steps {2 * checkpoint.step}" if checkpoint.step >= self.training.total else ""
                repair = (
                    f"or go on with the new one as a run of its own: tether fork {quote(str(self.folder.path))}{more}"
                )
            raise ConfigError(
                f"what the recipe names as {changed[0]} changed since the run {self.folder.path} began, so it cannot "
                f"go on as it was: put the old one back, {repair}"
            )
        before = checkpoint.values["environment"]
        changed = [name for name in BITS_DEPEND_ON if before.get(name) != self._environment.get(name)]
        if changed:
            words = ", ".join(f"{name} {before.get(name)} -> {self._environment.get(name)}" for name in changed)
            self._trouble(f"Since the run was stopped its ground has changed ({words}): the last bits may differ.")
        if "device" in changed:
            self._trouble(f"The run was begun in {self.recipe.model.dtype} and goes on in it.")

    def ground_changes(self, checkpoint: Checkpoint) -> list[str]:
        """What of the models changed since a checkpoint, in words."""
        return ground_changes(checkpoint, self._ground, self._environment)

    def _check_best(self, checkpoint: Checkpoint) -> None:
        """The best model so far must be what was saved; where the run stands at its very step, it is saved again."""
        path, kept = self.folder.best_path, self.best.keeps and self.best.step is not None
        damage = (
            files_damage(path) if path.is_dir() else f"{path} is missing" if kept and not self.header.forked else None
        )
        if damage is None:
            return
        if kept and self.best.step == checkpoint.step:
            with self._storing("the best model so far"), self.training.as_saved():
                save_model(self.training.model, self.policy.tokenizer, path)
            self._trouble(f"{damage}: the best model is saved again, from the checkpoint of step {checkpoint.step}.")
            return
        self._trouble(
            f"{damage}: put {path} back from a copy. The run goes on; a better model replaces it, and until then the "
            "best model is not to be trusted."
        )

    def _settle_history(self) -> None:
        """Have the store hold every step that was taken; tell what was missing or damaged."""
        if self.recorder.waits:
            return  # the store is away, and that was told
        first = int((self.header.forked or {}).get("step", 0))
        for text in settle_history(self.workspace, self.folder.path, first, self.done).told:
            self._trouble(text)

    # -- step by step -------------------------------------------------------------------------------------------------

    def heartbeat(self, words: str) -> None:
        """There is progress."""
        self._watchdog.beat(words)
        self.faults.step = self.done

    def keep(self, taken: Taken) -> None:
        """Record a step, look at it, and keep the model where it is the best so far."""
        rollouts = step_rollouts(taken.result) if taken.result is not None else None
        stored = rollouts.stored(taken.step, None) if rollouts is not None else []
        taken.metrics.update(step_measures(stored))
        self.recorder.record(taken.step, taken.metrics, rollouts)
        self.trackers.record(taken.step, taken.metrics)
        self.planned.measured.see(taken.metrics)
        self.done = taken.step + 1
        self.taken += 1
        if self.taken == 1:
            self.folder.note_first_step()
        self._examine(taken, stored)
        if taken.result is not None:
            self._tell_reward_errors(taken)
            self.agreement.see(taken.step, taken.result.experience, self._pieces, self.recorder.event)
        if self.best.see(self.done, taken.metrics) and self.best.keeps:
            with self._storing("the best model so far"), self.training.as_saved():
                save_model(self.training.model, self.policy.tokenizer, self.folder.best_path)
        every = self.recipe.checkpoint.every
        if (every and self.done % every == 0) or self.is_over:
            self.save_checkpoint()

    @property
    def is_over(self) -> bool:
        """Whether no further step is taken: the last one was, or nothing better has come for long enough."""
        return self.done >= self.training.total or self.best.is_over

    def _examine(self, taken: Taken, rollouts: list[StoredRollout]) -> None:
        every = self.recipe.run.doctor_every
        if not every:
            return
        looks = taken.step == 0 or self.done % every == 0
        for finding in self.doctor.see(taken.step, taken.metrics, rollouts if looks else ()):
            text = f"{finding.title}: {finding.saw}"
            self.notify(f"Doctor: {text} ({finding.link})")
            self.recorder.event("finding", text, step=taken.step, data=finding.as_json())

    def _tell_reward_errors(self, taken: Taken) -> None:
        """Say once what a reward said of answers that it could not score, and keep it with the run."""
        assert taken.result is not None
        for text in taken.result.reward_errors:
            error = text.rpartition(" (")[0]  # without how many there were
            if error in self._reward_errors or len(self._reward_errors) >= MAX_REWARD_ERRORS:
                continue
            self._reward_errors.add(error)
            self.notify(f"step {taken.step}: the reward could not score every answer. {text}")
            self.recorder.event("reward", text, step=taken.step)

    def _tell_doctor(self) -> None:
        """What was recorded before this attempt; what it finds in that, it has said."""
        with suppress(TetherError), open_workspace(self.recipe.run.directory, self.recipe.store.url) as opened:
            for row in read_run(opened, self.recorder.name).metrics:
                self.doctor.see(int(row["step"]), {name: value for name, value in row.items() if name != "step"})

    def save_checkpoint(self) -> None:
        """Begin to write a checkpoint of now; it gets its name once all that was recorded is on disk."""
        self.checkpoints.wait()  # before there is a second copy in memory
        values = self.best.values() | {"worst_gap": self.agreement.worst}
        values |= {"stands_on": self._stands_on, "environment": self._environment}
        values |= {"ground": self._ground, "run": self.header.record()}
        self.checkpoints.save(self.training.capture(self.done, values), self._settle)
        self._saved_at = self.done

    def _settle(self) -> None:
        """Have all that was recorded on disk: whoever goes on from a checkpoint does not record those steps again."""
        if not self.recorder.flush():
            raise OSError("the steps before it could not be recorded")

    # -- how it ends --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Leave a checkpoint to go on from."""
        if self._saved_at != self.done:
            self.save_checkpoint()
        self.checkpoints.wait()
        if self.done not in (0, *(step for step, _ in listed(self.folder.checkpoints))):
            raise StorageError(
                f"stopped after {self.done} steps, but no checkpoint of them could be written to "
                f"{self.folder.checkpoints}: make room; `tether resume {self.folder.path}` goes on from the last one"
            )
        self.recorder.event("stopped", f"stopped after {self.done} steps", step=self.done)

    def finish(self) -> None:
        """What follows the last step: the report, and the model where it is to be saved."""
        self.heartbeat("the end")
        self.checkpoints.wait()
        report = self.training.finish()
        self.planned.measured.finish()
        with self._storing("the trained model"):
            self.folder.write("report.json", report)
            self.folder.write(PLAN, self.planned.as_json())
            if self.recipe.run.save:
                save_model(self.training.model, self.policy.tokenizer, self.folder.model_path)
        early = self.done < self.training.total
        taken = f"ended after {self.done} of {self.training.total} steps: {self.best.words}" if early else ""
        self.recorder.event("done", taken or f"all {self.done} steps are taken", step=self.done)
        if not self.recorder.flush():
            raise StorageError(
                f"the {self.done} steps are taken, but not all of them could be recorded in {self.folder.path}: make "
                f"room, and let `tether resume {self.folder.path}` end the run"
            )
        with self._storing("the note that all is done"):
            self.folder.finish(self.done)

    @contextmanager
    def _storing(self, what: str) -> Iterator[None]:
        """Say what could not be written, where, and that nothing is lost; safetensors has an error of its own."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"{what} could not be written to {self.folder.path} ({getattr(error, 'strerror', None) or error}): "
                f"make room, and go on with `tether resume {self.folder.path}`"
            ) from error

    def _trouble(self, text: str) -> None:
        """Something that the person should hear of and find again."""
        self.notify(text)
        self.recorder.event("trouble", text, step=self.done)


def ground_changes(checkpoint: Checkpoint, ground: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    """What of the models that a run stands on changed since a checkpoint, in words."""
    then, now = checkpoint.values["environment"], environment
    if (before := checkpoint.values.get("ground")) is not None:
        same = all(then.get(name) == now.get(name) for name in ("transformers", "tokenizers"))
        return changes(before, ground, same_version=same)
    weights = checkpoint.values["stands_on"]["model"] != ground["weights"]  # of a Tether that kept these alone
    tokens = "tokenizer" in then and then["tokenizer"] != now["tokenizer"]
    return [
        *(["the model's weights"] if weights else []),
        *(["the tokenizer's vocabulary or chat template"] if tokens else []),
    ]


def step_rollouts(result: StepResult) -> StepRollouts:
    """An iteration as the store takes it."""
    parts = [score.parts for score in result.scores]
    return StepRollouts(result.experience, result.rollouts, result.ratios, result.clipped, parts)


def origin_of(folder: RunFolder) -> list[RecordSource]:
    """The run that this one branched off from, where it did."""
    origin = folder.origin
    return (
        []
        if origin is None
        else [RecordSource("fork", f"{origin['folder']}, step {origin['step']}", run=origin["run"])]
    )
