"""Each hook alone, with a fake run around it, and hooks of a program's own in a real run."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from tiny_recipes import tiny

import tether
from tether.errors import ConfigError, StorageError
from tether.learner.ranks import ONE
from tether.plan.table import Measured
from tether.protocols import StepHook, StepOutcome
from tether.store import checkpoints
from tether.store.checkpoints import Checkpoint
from tether.store.folder import RunFolder
from tether.store.history import Identity
from tether.store.read import find_run, open_workspace, read_run
from tether.train import checkpointing, hooks, provenance
from tether.train.attempt import Attempt
from tether.train.checkpointing import BestModel, Checkpointer, StepRecorder
from tether.train.hooks import (
    AnswerMetrics,
    LiveDiagnosis,
    MetricTrackers,
    RewardErrorNotices,
    RunContext,
    UserHook,
    user_hooks,
)
from tether.train.provenance import Provenance
from tether.train.run_plan import PlanMeasurements

SMALL = {"rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 4}


class FakeTraining:
    """Two numbers in place of a model."""

    total = 4
    model = None

    def __init__(self) -> None:
        self.learner = SimpleNamespace(on_fault=None, ranks=ONE)

    def capture(self, step, values):
        return Checkpoint(step, {"learner": {"weights": torch.zeros(2)}}, values)


@pytest.fixture
def run(tmp_path) -> RunContext:
    """A run of 4 steps whose notices and events are lists."""
    recipe = tiny("sft", tmp_path / "runs", "--run.steps", "4", "--checkpoint.every", "2")
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    fake = RunContext(recipe, RunFolder(path), FakeTraining(), SimpleNamespace(tokenizer=None), [].append)  # pyright: ignore
    fake.told, fake.events = [], []  # pyright: ignore
    fake.notify = fake.told.append  # pyright: ignore
    fake.record_event = lambda kind, text, **about: fake.events.append((kind, text, about["step"]))  # pyright: ignore
    return fake


def take(run: RunContext, hook: StepHook, step: int, **metrics: float) -> None:
    """One step, as an attempt takes it."""
    run.done, run.taken = step + 1, run.taken + 1
    hook.after_step(StepOutcome(step, metrics))


def test_a_hook_needs_no_method_of_its_own():
    class Nothing(StepHook):
        pass

    nothing = Nothing()
    nothing.begin(None)
    nothing.restore({})
    nothing.heartbeat("rollout, step 0")
    nothing.after_step(StepOutcome(0, {}))
    nothing.finish()
    nothing.close(None)
    assert nothing.state() == {}


def test_answer_metrics_leave_a_step_without_answers_as_it_is():
    outcome = StepOutcome(0, {"loss": 1.0})
    AnswerMetrics().after_step(outcome)
    assert outcome.metrics == {"loss": 1.0}


def test_the_recorder_keeps_steps_and_the_state_of_the_run(run):
    run.identity = Identity(SimpleNamespace(uid="1" * 16, forked={}), {}, ("a notice",))
    run.__dict__["token_text"] = lambda tokens: [""] * len(tokens)
    recorder = StepRecorder()
    recorder.begin(run)
    assert run.told == ["a notice"]
    take(run, recorder, 0, loss=2.0)
    take(run, recorder, 1, loss=1.0)
    assert run.flush()
    recorder.close(None)
    with open_workspace(run.recipe.run.directory) as opened:
        assert [row["loss"] for row in read_run(opened, "run").metrics] == [2.0, 1.0]
        assert find_run(opened, "run").state == "stopped"


def test_the_trackers_get_every_step_and_are_closed(run):
    got: list[object] = []
    tracker = SimpleNamespace(
        record=lambda step, metrics: got.append((step, metrics)), close=lambda: got.append("closed")
    )
    trackers = MetricTrackers([tracker])
    trackers.begin(run)
    take(run, trackers, 0, loss=2.0)
    trackers.close(None)
    assert got == [(0, {"loss": 2.0}), "closed"]


def test_the_plan_measures_each_step():
    measured = Measured(on_cpu=False)
    hook = PlanMeasurements(measured)
    hook.after_step(StepOutcome(0, {"seconds/step": 9.0}))
    hook.after_step(StepOutcome(1, {"seconds/step": 2.0}))
    hook.finish()
    assert measured.iterations == 2 and measured.seconds["iteration"] == 2.0


def test_a_finding_is_shown_and_recorded(run, monkeypatch):
    finding = SimpleNamespace(title="Loss", saw="it rose", link="docs", as_json=dict)
    monkeypatch.setattr(
        hooks, "LiveDoctor", lambda *_, **__: SimpleNamespace(see=lambda step, *_: [finding][: step + 1])
    )
    diagnosis = LiveDiagnosis(1)
    diagnosis.begin(run)
    take(run, diagnosis, 3, loss=2.0)
    assert run.told == ["Doctor: Loss: it rose (docs)"]
    assert run.events == [("finding", "Loss: it rose", 3)]


def test_an_error_of_a_reward_is_reported_once(run):
    notices = RewardErrorNotices()
    notices.begin(run)
    for step, errors in enumerate(
        [("KeyError: 'a' (2 answers)",), ("KeyError: 'a' (1 answer)", "ValueError (1 answer)")]
    ):
        notices.after_step(StepOutcome(step, {}, reward_errors=errors))
    assert [(kind, step) for kind, _, step in run.events] == [("reward", 0), ("reward", 1)]
    assert "ValueError" in run.told[1] and len(run.told) == 2


def test_the_best_model_is_saved_when_it_is_better_and_patience_ends_the_run(run, monkeypatch):
    rules = run.recipe.evaluation.model_copy(update={"every": 1, "patience": 2, "keep_best": True})
    run.recipe = run.recipe.model_copy(update={"evaluation": rules})
    run.training.as_saved = threading.Lock  # any context manager
    saved: list[int] = []
    monkeypatch.setattr(checkpointing, "save_model", lambda *_: saved.append(run.done))
    best = BestModel()
    best.begin(run)
    for step, loss in enumerate((2.0, 1.0, 1.5)):
        take(run, best, step, **{"held_out/loss": loss})
    assert saved == [1, 2] and not run.is_over
    take(run, best, 3, **{"held_out/loss": 1.25})
    assert run.ended_early == "the held-out loss was not better in 2 evaluations (evaluation.patience)"
    assert best.state() == {"best": -1.0, "waited": 2, "best_step": 2}

    run.ended_early = ""
    again = BestModel()
    again.begin(run)
    again.restore(best.state())
    assert run.is_over  # a run that was killed as it ended does not go on


def test_checkpoints_hold_the_state_of_every_hook_and_wait_for_the_records(run):
    order: list[str] = []
    checkpointer = Checkpointer()
    run.hooks = [SimpleNamespace(state=lambda: {"mine": run.done}), checkpointer]
    run.flush = lambda: order.append(f"{len(checkpoints.listed(run.folder.checkpoints))} named") is None
    checkpointer.begin(run)
    assert checkpointer.newest() is None
    for step in range(3):
        take(run, checkpointer, step)
    checkpointer.stop()
    assert [step for step, _ in checkpoints.listed(run.folder.checkpoints)] == [2, 3]
    assert order == ["0 named", "1 named"]
    newest = checkpointer.newest()
    assert newest is not None and newest.values["mine"] == 3 and "ended_early" not in newest.values
    run.end_early("enough")
    take(run, checkpointer, 3)
    checkpointer.close(None)
    newest = checkpointer.newest()
    assert newest is not None and newest.values["ended_early"] == "enough"


def test_a_checkpoint_whose_steps_are_not_recorded_gets_no_name(run):
    checkpointer = Checkpointer()
    run.hooks, run.flush = [checkpointer], lambda: False
    checkpointer.begin(run)
    run.done = 1
    with pytest.raises(StorageError, match="no checkpoint of them could be written"):
        checkpointer.stop()
    assert "could not be recorded" in run.told[0] and run.events[0][0] == "warning"


def test_provenance_refuses_other_data_and_warns_of_another_machine(run, monkeypatch):
    header = SimpleNamespace(record=lambda: {"uid": "1"})
    source = SimpleNamespace(role="data", source="a.jsonl", sha256="1")
    monkeypatch.setattr(provenance, "identify", lambda run: Identity(header, {}))
    monkeypatch.setattr(provenance, "sources_of", lambda *_: [source])
    monkeypatch.setattr(provenance, "environment_of", lambda *_: {"torch": "2", "device": "cpu"})
    loaded = {"weights": "w", "buffers": "b", "config": {"layers": 2}, "tokenizer": {}}
    hook = Provenance(loaded)
    hook.begin(run)
    values = hook.state()
    hook.check(Checkpoint(2, {}, values))
    assert run.told == []
    hook.check(Checkpoint(2, {}, values | {"environment": {"torch": "1", "device": "cpu"}}))
    assert run.told == ["The environment changed since the run was stopped (torch 1 -> 2): the last bits may differ."]
    with pytest.raises(ConfigError, match=r"names as data a.jsonl changed .*tether fork"):
        hook.check(Checkpoint(2, {}, values | {"stands_on": {"data a.jsonl": "2"}}))
    with pytest.raises(ConfigError, match=r"the model's config \(layers is 2, was 3\) changed"):
        hook.check(Checkpoint(2, {}, values | {"ground": loaded | {"config": {"layers": 3}}}))


# -- a program's own ----------------------------------------------------------------------------------------------


class Counter(StepHook):
    """Counts steps over all attempts, and notes what it was called for."""

    def __init__(self, end_at: int = 99) -> None:
        self.steps, self.calls, self.end_at = 0, [], end_at

    def begin(self, run):
        self.run = run
        self.calls.append("begin")

    def restore(self, state):
        self.steps = state["steps"]
        self.calls.append(f"restore {self.steps}")

    def heartbeat(self, phase):
        if phase.startswith("update"):
            self.calls.append(phase)

    def after_step(self, outcome):
        assert outcome.metrics["score"] <= 0 and len(outcome.rollouts) == len(outcome.scores) == 4
        outcome.metrics["mine"] = 1.0  # of its own copy
        self.steps += 1
        self.calls.append(f"step {outcome.step}")
        if self.steps == self.end_at:
            self.run.end_early("the counter is full")

    def state(self):
        return {"steps": self.steps}

    def finish(self):
        self.calls.append("finish")

    def close(self, error):
        self.calls.append(f"close {error!r}")


def ppo(folder, hook, **more):
    words = {"steps": 3, "name": "hooked", "directory": folder, "settings": SMALL, "progress": False} | more
    return tether.ppo("tiny-bytes", ["red:", "blue:"], lambda completion: -len(completion), hooks=[hook], **words)


def test_a_program_s_hook_is_called_in_order_and_goes_on_with_its_state(tmp_path):
    first, second = Counter(), Counter()
    run = ppo(tmp_path, first, on_step=lambda step: step.step < 1)
    assert first.calls == ["begin", "update, step 0", "step 0", "update, step 1", "step 1", "close None"]
    run = run.resume(hooks=[second], progress=False)
    assert run.finished and second.steps == 3
    assert second.calls == ["begin", "restore 2", "update, step 2", "step 2", "finish", "close None"]
    assert all("mine" not in row for row in run.metrics_rows())


def test_a_hook_with_state_that_is_not_passed_again_is_a_warning(tmp_path):
    run = ppo(tmp_path, Counter(), on_step=lambda step: False)
    run = tether.load_run("hooked", tmp_path).resume(reward=lambda completion: -len(completion), progress=False)
    assert [e.text for e in run.events if "hook Counter" in e.text]


def test_a_hook_can_end_the_run(tmp_path):
    run = ppo(tmp_path, Counter(end_at=2))
    assert run.finished and run.steps == 2 and run.model_path.is_dir()
    assert "ended after 2 of 3 steps: the counter is full" in [event.text for event in run.events]


def test_a_hook_that_raises_ends_the_run_which_can_be_resumed(tmp_path):
    class Raising(Counter):
        def after_step(self, outcome):
            super().after_step(outcome)
            if outcome.step == 1 and "restore 1" not in self.calls:
                raise ValueError("no more")

        def close(self, error):
            super().close(error)
            raise OSError("the file is gone")

    hook = Raising()
    with pytest.raises(ValueError, match="no more"):
        ppo(tmp_path, hook, settings=SMALL | {"checkpoint.every": 1})
    assert hook.calls[-1] == "close ValueError('no more')"
    run = tether.load_run("hooked", tmp_path)
    assert run.state == "failed" and "hook Raising raised while it was closed" in run.events[-1].text
    run = run.resume(reward=lambda completion: -len(completion), hooks=[hook], progress=False)
    assert run.finished and run.steps == 3 and "restore 1" in hook.calls


def test_state_that_json_cannot_hold_is_refused(run):
    hook = UserHook(SimpleNamespace(state=lambda: {"tensor": torch.zeros(1)}), "mine")  # pyright: ignore
    with pytest.raises(ConfigError, match=r"^hooks: state\(\) of mine gave what JSON cannot hold"):
        hook.state()


def test_two_hooks_of_one_class_keep_apart():
    assert [hook.key for hook in user_hooks([Counter(), Counter()], lambda hook: "Counter")] == [
        "hook Counter",
        "hook Counter 2",
    ]


def test_what_is_no_hook_is_refused(tmp_path):
    for hook, words in ((Counter, "Counter is a class"), (object(), "object has no method begin")):
        with pytest.raises(ConfigError, match=rf"^hooks\[0\]: {words}.*tether.protocols.StepHook"):
            ppo(tmp_path, hook)
    assert not list(tmp_path.glob("hooked*"))


def test_hooks_that_began_are_closed_where_a_later_one_cannot_begin(run):
    closed: list[str] = []

    class Refusing(StepHook):
        def begin(self, run):
            raise ConfigError("no")

    class First(StepHook):
        def close(self, error):
            closed.append(str(error))

    attempt = Attempt.__new__(Attempt)
    attempt.run, attempt._begun = run, []
    run.hooks = [First(), Refusing()]
    with pytest.raises(ConfigError, match="no"), attempt:
        pass
    assert closed == ["no"] and run.events == [("failed", "no", 0)]
