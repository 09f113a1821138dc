"""Asking a run to end: once after the step at hand, twice at once; the exit code says whether it came to its end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest
from attempts import Notes, watch
from in_process import attempt, whole
from same_runs import differences
from tiny_recipes import tiny

from tether.cli import main
from tether.store import checkpoints
from tether.store.folder import RunFolder, run_path
from tether.store.read import find_run, open_workspace
from tether.train.attempt import Attempt

STEPS = ("--run.steps", "8", "--checkpoint.every", "5")


class Command:
    """`tether ...` in a process of its own, forked from this one."""

    def __init__(self, *words: str, prepare: Callable[[], None] = lambda: None) -> None:
        self.notes = Notes()
        self.child = os.fork()
        if self.child == 0:
            code = 1
            try:
                watch(self.notes)
                prepare()
                code = main(list(words))
            finally:
                os._exit(code)

    def await_steps(self, steps: int) -> None:
        """Until it has taken so many."""
        deadline = time.monotonic() + 60
        while self.notes.load().steps < steps:
            assert time.monotonic() < deadline, "nothing happens"
            time.sleep(0.002)

    def send(self, number: int) -> None:
        """A signal."""
        os.kill(self.child, number)

    def exit_code(self) -> int:
        """Once it has ended."""
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def slow(seconds: float) -> Callable[[], None]:
    """Make steps last long enough to be interrupted in."""

    def prepare() -> None:
        heartbeat = Attempt.heartbeat

        def slow_heartbeat(self, words):
            heartbeat(self, words)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(0.01)

        Attempt.heartbeat = slow_heartbeat

    return prepare


def begun(tmp_path):
    """A run that was stopped before its first step, to be resumed by its folder."""
    recipe = tiny("sft", tmp_path / "runs", *STEPS)
    attempt(recipe, stop_after=0)
    assert kept(recipe) == [0]
    return recipe


def kept(recipe) -> list[int]:
    """The steps that there are checkpoints of."""
    return [step for step, _ in checkpoints.listed(RunFolder(run_path(recipe)).checkpoints)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_the_run_after_the_step_at_hand_with_a_checkpoint_and_3(tmp_path, number):
    calm, recipe = whole(tiny("sft", tmp_path / "calm", *STEPS)), begun(tmp_path)
    command = Command("resume", str(run_path(recipe)), "--json", prepare=slow(0.2))
    command.await_steps(2)
    command.send(number)
    assert command.exit_code() == 3
    first, last = kept(recipe)
    assert first == 0 and last in (2, 3)  # the signal may come just before the next step begins
    assert not RunFolder(run_path(recipe)).is_finished
    with open_workspace(tmp_path / "runs") as opened:
        run = find_run(opened, "run")
    assert (run.state, run.steps_done) == ("stopped", last)
    command = Command("resume", str(run_path(recipe)), "--json")
    assert command.exit_code() == 0
    assert differences(calm, run_path(recipe)) == []


def test_the_second_signal_ends_it_at_once_with_3_and_loses_no_bit(tmp_path):
    calm, recipe = whole(tiny("sft", tmp_path / "calm", *STEPS)), begun(tmp_path)
    command = Command("resume", str(run_path(recipe)), prepare=slow(0.3))
    command.await_steps(2)
    began = command.notes.steps
    command.send(signal.SIGINT)
    time.sleep(0.05)  # two signals of one kind at the same time are one
    command.send(signal.SIGINT)
    assert command.exit_code() == 3
    assert command.notes.load().steps <= began + 1
    assert kept(recipe) == [0]
    assert Command("resume", str(run_path(recipe))).exit_code() == 0
    assert differences(calm, run_path(recipe)) == []


def test_0_means_that_the_last_step_was_reached(tmp_path, monkeypatch, capsys):
    recipe = begun(tmp_path)
    after_step = Attempt.after_step

    def stop_in_the_last_step(self, outcome):
        after_step(self, outcome)
        if outcome.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Attempt, "after_step", stop_in_the_last_step)
    assert main(["resume", str(run_path(recipe)), "--json"]) == 0
    assert (run_path(recipe) / "model" / "model.safetensors").is_file()
    assert "stopping after the step at hand" not in capsys.readouterr().out


def test_a_stopped_run_says_how_to_go_on_and_resume_auto_does(tmp_path, monkeypatch, capsys):
    recipe = tiny("sft", tmp_path / "runs", *STEPS)
    words = ["train", "sft", "--resume", "auto", "--json", "--model.device", "cpu", "--sft.batch_size", "3", *STEPS]
    words += ["--run.directory", recipe.run.directory, "--run.name", "run", "--data.train", recipe.data.train]
    after_step = Attempt.after_step

    def stop_in_the_third(self, outcome):
        after_step(self, outcome)
        if outcome.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Attempt, "after_step", stop_in_the_third)
        assert main(words) == 3
    printed, told = capsys.readouterr()
    assert f"stopped after 3 of 8 steps; go on with: tether resume {run_path(recipe)}" in told
    assert json.loads(printed.splitlines()[-1])["exit_code"] == 3
    assert main([*words, "--sft.batch_size", "4"]) == 2
    assert "sft.batch_size" in capsys.readouterr().err
    assert main(words) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [3, 4, 5, 6, 7]
    assert main(words) == 0  # all is done: nothing happens
    assert capsys.readouterr().out == ""
    assert main([*words[:2], "--resume", "always"]) == 2


def test_two_processes_do_not_train_one_run(tmp_path, capsys):
    recipe = begun(tmp_path)
    command = Command("resume", str(run_path(recipe)), prepare=slow(0.5))
    command.await_steps(1)
    assert main(["resume", str(run_path(recipe))]) == 6
    assert "is being trained by another process" in capsys.readouterr().err
    command.send(signal.SIGKILL)
    assert command.exit_code() == -signal.SIGKILL
    assert main(["resume", str(run_path(recipe))]) == 0
