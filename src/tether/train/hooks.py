"""The jobs around a run's steps, each a small `StepHook`, and the context that they share.

`tether.train.attempt` puts them in order. Records, checkpoints and the best model are in `tether.train.checkpointing`,
fault dumps and the watchdog in `tether.train.failures`, provenance in `tether.train.provenance`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tether.config.recipes import Recipe
from tether.doctor.answer_metrics import step_measures
from tether.doctor.doctor import LiveDoctor
from tether.doctor.own_rules import OwnRule
from tether.errors import ConfigError, StorageError, TetherError
from tether.models.load import LoadedModel
from tether.protocols import StepHook, StepOutcome, Tracker
from tether.store.database.open import Workspace, workspace_at
from tether.store.database.records import RecordSource
from tether.store.folder import RunFolder, recipe_record
from tether.store.history import Identity
from tether.store.read import open_workspace, read_run
from tether.store.recorder import Pieces
from tether.store.tokens import StepRollouts, token_pieces
from tether.store.trackers import NamedTracker, TrackedRun, Trackers, open_trackers
from tether.train.training import Training
from tether.types import Experience

MAX_REWARD_ERRORS = 20  # different errors of a reward that one attempt reports
MAX_MISMATCHED_TOKENS = 5
HOOK_KEY = "hook "  # before the name of a user's hook, in the values of a checkpoint
MIN_MISMATCH = 0.01  # nats; float32 rounding is about 1e-6


@dataclass
class RunContext:
    """One attempt at a run, as every hook sees it: its parts, its position, and where to report."""

    recipe: Recipe
    folder: RunFolder
    training: Training
    policy: LoadedModel
    notify: Callable[[str], None]
    resumes: bool = False
    done: int = 0  # steps taken in all
    taken: int = 0  # steps taken in this attempt
    ended_early: str = ""  # why no further step is taken, where a hook decided so
    hooks: Sequence[StepHook] = ()
    # The provenance hook sets these.
    identity: Identity | None = None
    sources: Sequence[RecordSource] = ()
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Warnings of an attempt that resumes, told before the recorder rewinds: they are recorded after it.
    unrecorded: list[str] | None = None
    # The recorder sets these.
    record_event: Callable[..., None] = lambda *args, **words: None  # noqa: ARG005
    flush: Callable[[], bool] = lambda: True

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.folder.path

    @property
    def total(self) -> int:
        """Number of steps from the first to the last."""
        return self.training.total

    @property
    def model(self) -> Any:
        """The model in training: a `PreTrainedModel`, or a `ScalarModel` for a reward model."""
        return self.training.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self.policy.tokenizer

    @cached_property
    def config(self) -> dict[str, Any]:
        """The recipe with every key resolved."""
        return recipe_record(self.recipe)

    @cached_property
    def workspace(self) -> Workspace:
        """The workspace whose store records the run."""
        return workspace_at(self.recipe.run.directory, self.recipe.store.url)

    @property
    def name(self) -> str:
        """The name of the run in its workspace."""
        return self.workspace.anchored().name_of(self.path.absolute())

    @cached_property
    def token_text(self) -> Pieces:
        """Maps the tokens of a row to their texts."""
        return token_pieces(self.policy.tokenizer)

    @property
    def is_over(self) -> bool:
        """Whether no further step is taken."""
        return self.done >= self.total or bool(self.ended_early)

    def end_early(self, reason: str) -> None:
        """Take no further step: the run finishes with the model that it has now."""
        self.ended_early = reason

    def event(self, kind: str, text: str, *, step: int | None = None, data: Mapping[str, Any] | None = None) -> None:
        """Record an event with the run."""
        self.record_event(kind, text, step=step, data=data)

    def warn(self, text: str) -> None:
        """Show a warning to the user, and record it with the run."""
        self.notify(text)
        if self.unrecorded is None:
            self.event("warning", text, step=self.done)
        else:
            self.unrecorded.append(text)

    def is_failure(self, error: BaseException | None) -> bool:
        """Whether the attempt failed; a resume that was refused before its first step leaves the run as it was."""
        return error is not None and not (self.resumes and self.taken == 0)

    @contextmanager
    def storing(self, what: str) -> Iterator[None]:
        """Turn a failed write into a StorageError that says what to do."""
        try:
            yield
        except (OSError, SafetensorError) as error:  # safetensors raises its own error for a full disk
            raise StorageError(
                f"{what} could not be written to {self.path} ({getattr(error, 'strerror', None) or error}): "
                f"make room, and go on with `tether resume {self.path}`"
            ) from error


class AnswerMetrics(StepHook):
    """Adds metrics of the answers, such as lengths and repetition, to the metrics of the step."""

    def after_step(self, outcome: StepOutcome) -> None:
        """Add them."""
        rollouts = step_rollouts(outcome)
        outcome.metrics.update(step_measures(rollouts.stored(outcome.step, None) if rollouts is not None else []))


class MetricTrackers(StepHook):
    """Sends metrics to TensorBoard, Weights & Biases, trackio and the trackers that a program passed."""

    def __init__(self, trackers: Sequence[Tracker | NamedTracker] = ()) -> None:
        self._passed = trackers
        self._open: Trackers | None = None

    def begin(self, run: RunContext) -> None:
        """Open them."""
        place = TrackedRun(run.name, run.path, run.config)
        self._open = open_trackers(run.recipe.store.trackers, place, run.notify, self._passed)

    def after_step(self, outcome: StepOutcome) -> None:
        """Queue the metrics of the step."""
        if self._open is not None:
            self._open.record(outcome.step, outcome.metrics)

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Send what is queued, and close them."""
        if self._open is not None:
            self._open.close()


class LiveDiagnosis(StepHook):
    """Runs the doctor on every step, and reports its findings."""

    def __init__(self, every: int, rules: Sequence[OwnRule] = ()) -> None:
        self.every, self.rules = every, rules

    def begin(self, run: RunContext) -> None:
        """Make a doctor for the method and the settings of the run."""
        self.run = run
        self.doctor = LiveDoctor(run.recipe.method, run.config, every=self.every)
        if self.rules:
            self.doctor.add_rules(self.rules)

    def read_history(self) -> None:
        """Feed earlier metrics to the doctor without repeating old findings."""
        recipe = self.run.recipe
        with suppress(TetherError), open_workspace(recipe.run.directory, recipe.store.url) as opened:
            for row in read_run(opened, self.run.name).metrics:
                self.doctor.see(int(row["step"]), {name: value for name, value in row.items() if name != "step"})

    def after_step(self, outcome: StepOutcome) -> None:
        """Report new findings; every `every` steps the doctor also reads the answers."""
        reads_answers = outcome.step == 0 or (outcome.step + 1) % self.every == 0
        rollouts = step_rollouts(outcome) if reads_answers else None
        stored = rollouts.stored(outcome.step, None) if rollouts is not None else ()
        for finding in self.doctor.see(outcome.step, outcome.metrics, stored):
            text = f"{finding.title}: {finding.saw}"
            self.run.notify(f"Doctor: {text} ({finding.link})")
            self.run.event("finding", text, step=outcome.step, data=finding.as_json())


class RewardErrorNotices(StepHook):
    """Reports each error of a reward once, and records it with the run."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def begin(self, run: RunContext) -> None:
        """Report to this run."""
        self.run = run

    def after_step(self, outcome: StepOutcome) -> None:
        """Report errors that this attempt has not seen before."""
        for text in outcome.reward_errors:
            error = text.rpartition(" (")[0]  # without the number of answers that failed so
            if error in self._reported or len(self._reported) >= MAX_REWARD_ERRORS:
                continue
            self._reported.add(error)
            self.run.notify(f"step {outcome.step}: the reward could not score every answer. {text}")
            self.run.event("reward", text, step=outcome.step)


@dataclass(frozen=True)
class MismatchedToken:
    """A sampled token and its two log-probs, before the first update."""

    row: int
    place: int  # index in the row, prompt included
    token: int
    sampler: float
    trainer: float

    @property
    def gap(self) -> float:
        """|log p_sampler - log p_trainer|, in nats."""
        return abs(self.sampler - self.trainer)


def worst_tokens(experience: Experience, count: int = MAX_MISMATCHED_TOKENS) -> list[MismatchedToken]:
    """The sampled tokens whose log-probs differ most between sampler and trainer, largest difference first."""
    gaps = (experience.old_logprobs - experience.untruncated_logprobs).abs()  # (B, T)
    gaps = gaps.masked_fill(~experience.response_mask, -1.0)
    places = (experience.attention_mask.cumsum(dim=1) - 1).flatten()
    found: list[MismatchedToken] = []
    for flat in gaps.flatten().topk(min(count, int(experience.response_mask.sum()))).indices.tolist():
        row = flat // gaps.shape[1]
        numbers = (column.flatten()[flat] for column in (experience.untruncated_logprobs, experience.old_logprobs))
        token = int(experience.tokens.flatten()[flat])
        found.append(MismatchedToken(row, int(places[flat]), token, *map(float, numbers)))
    return found


class LogprobMismatch(StepHook):
    """Records the tokens that sampler and trainer disagree about most, when they exceed the worst of the run so far.

    Answers of an older policy (`rollout.lag`) are left out: there the difference is what training has changed since.

    The mean, the maximum and the KL of every step are metrics (`logprob_diff`, `logprob_diff_max`, `sampler_kl`).
    """

    def __init__(self) -> None:
        self.worst = 0.0

    def begin(self, run: RunContext) -> None:
        """Report to this run."""
        self.run = run

    def state(self) -> dict[str, Any]:
        """The worst difference so far, in nats."""
        return {"worst_gap": self.worst}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self.worst = float(state.get("worst_gap", 0.0))

    def after_step(self, outcome: StepOutcome) -> None:
        """Record an event where the largest difference is a new maximum above float32 rounding."""
        if outcome.experience is None or outcome.metrics.get("staleness"):
            return
        found = worst_tokens(outcome.experience)
        if not found or not found[0].gap > max(self.worst, MIN_MISMATCH):
            return
        first, self.worst = found[0], found[0].gap
        texts = ["".join(self.run.token_text([token.token])) for token in found]
        self.run.event(
            "logprob_mismatch",
            f"sampler and trainer are {first.gap:.3g} nats apart, further than before: sample {first.row}, token "
            f"{first.place} {texts[0]!r}, sampler {first.sampler:.4g}, trainer {first.trainer:.4g}",
            step=outcome.step,
            data={"tokens": [asdict(token) | {"text": text} for token, text in zip(found, texts, strict=True)]},
        )


class UserHook(StepHook):
    """A hook that a program passed: its metrics are a copy, and checkpoints keep its state under its name."""

    def __init__(self, hook: StepHook, name: str) -> None:
        self.hook, self.name = hook, name

    @property
    def key(self) -> str:
        """The key of its state in a checkpoint."""
        return f"{HOOK_KEY}{self.name}"

    def begin(self, run: RunContext) -> None:
        """Hand it the run."""
        self.run = run
        self.hook.begin(run)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hand it its own state, where the checkpoint has one."""
        if self.key in state:
            self.hook.restore(state[self.key])

    def heartbeat(self, phase: str) -> None:
        """Pass on the phase."""
        self.hook.heartbeat(phase)

    def after_step(self, outcome: StepOutcome) -> None:
        """Hand it the step."""
        self.hook.after_step(replace(outcome, metrics=dict(outcome.metrics)))

    def state(self) -> dict[str, Any]:
        """Its state; raises ConfigError where JSON cannot hold it."""
        given: Any = self.hook.state()
        try:
            kept = json.loads(json.dumps(dict(given), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"hooks: state() of {self.name} gave what JSON cannot hold ({error}): return a dict of finite numbers, "
                "texts, lists and dicts"
            ) from None
        return {self.key: kept} if kept else {}

    def finish(self) -> None:
        """Pass on the end."""
        self.hook.finish()

    def close(self, error: BaseException | None) -> None:
        """Close it. The run is over, so an error here is only reported."""
        try:
            self.hook.close(error)
        except Exception as raised:
            self.run.warn(f"hook {self.name} raised while it was closed ({type(raised).__name__}: {raised}).")


def user_hooks(hooks: Sequence[StepHook], name_of: Callable[[Any], str]) -> list[UserHook]:
    """The hooks under names of their own: a second hook of one name gets a number."""
    named: dict[str, UserHook] = {}
    for hook in hooks:
        name, number = name_of(hook), 1
        while (own := name if number == 1 else f"{name} {number}") in named:
            number += 1
        named[own] = UserHook(hook, own)
    return list(named.values())


def step_rollouts(outcome: StepOutcome) -> StepRollouts | None:
    """The answers of a step as the store takes them; None where none were sampled."""
    if outcome.experience is None or outcome.ratios is None:
        return None
    parts = [score.parts for score in outcome.scores]
    return StepRollouts(outcome.experience, outcome.rollouts, outcome.ratios, outcome.clipped, parts)
