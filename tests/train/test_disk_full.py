"""A disk that is full or read-only: what is there stays whole, the run goes on or says what to do, no bit is lost.

Each test has a small disk of its own, which takes the right to mount one.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from in_process import attempt, whole
from same_runs import differences
from tiny_recipes import tiny

import tether.store.database.journal as journal
from tether.cli import main
from tether.errors import StorageError
from tether.store import checkpoints
from tether.store.folder import RunFolder, is_run, run_path
from tether.train.attempt import Attempt

STEPS = ("--run.steps", "6", "--checkpoint.every", "1", "--run.doctor_every", "0")
MEGABYTE = 2**20


class Disk:
    """A file system of 24 MB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path))

    def _mount(self, *words: str) -> None:
        done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"NOT TESTED: no small disk can be mounted here ({done.stderr.strip()})")

    def fill(self, leave: int) -> None:
        """Leave so many bytes of room."""
        there = os.statvfs(self.path)
        room = there.f_bavail * there.f_frsize
        with (self.path / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(room - leave, 1))

    def free(self) -> None:
        """Make room again."""
        (self.path / "ballast").unlink()

    def protect(self) -> None:
        """Make it read-only for all that is opened from now on."""
        self._mount("--bind", str(self.path), str(self.path))
        self._mount("-o", "remount,bind,ro", str(self.path))

    def release(self) -> None:
        """Undo the last mount: it is writable again, or gone."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(journal, "LAST_RETRY", 0.02)
    disk = Disk(tmp_path / "disk")
    yield disk
    while disk.path.is_mount():
        disk.release()


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """PPO on a disk with room: what every run below has to come to."""
    return whole(tiny("ppo", tmp_path_factory.mktemp("calm") / "runs", *STEPS))


def on(disk: Disk):
    return tiny("ppo", disk.path / "runs", *STEPS)


def named(run: Path) -> dict[str, bytes]:
    """The bytes of every checkpoint."""
    folder = RunFolder(run).checkpoints
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("step-*/*"))}


def kept(run: Path) -> list[int]:
    """The steps of the checkpoints; each must be whole."""
    found = checkpoints.listed(RunFolder(run).checkpoints)
    assert [checkpoints.damage(path) for _, path in found] == [None] * len(found)
    return [step for step, _ in found]


def at_step(monkeypatch, wanted: dict[int, object]) -> None:
    """Call these before that step is recorded, once the checkpoint before it is written."""
    after_step = Attempt.after_step

    def acting(self, outcome):
        if outcome.step in wanted:
            self.checkpointer.wait()
            self.run.flush()
            wanted[outcome.step]()
        after_step(self, outcome)

    monkeypatch.setattr(Attempt, "after_step", acting)


# -- while training goes on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [0, MEGABYTE])
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(disk, calm, monkeypatch, leave):
    recipe, told, seen = on(disk), [], {}
    run = run_path(recipe)

    def note_and_free():
        seen["after"] = named(run)
        disk.free()

    def note_and_fill():
        seen["before"] = named(run)
        disk.fill(leave)

    at_step(monkeypatch, {2: note_and_fill, 4: note_and_free})
    assert attempt(recipe, notify=told.append).steps == 6
    assert seen["before"] and seen["after"] == seen["before"]  # steps 3 and 4 have none, and cost the others nothing
    failed = [text for text in told if "was not written (No space left on device)" in text]
    assert [text.split(" was")[0] for text in failed] == ["The checkpoint of step 3", "The checkpoint of step 4"]
    assert all(str(RunFolder(run).checkpoints) in text for text in failed)
    assert any("run store" in text and "cannot be written" in text for text in told) == (leave == 0)
    assert kept(run) == [5, 6]
    assert differences(calm, run) == []


def test_a_disk_that_becomes_read_only_for_a_while_costs_checkpoints_and_nothing_else(disk, calm, monkeypatch):
    recipe, told = on(disk), []
    at_step(monkeypatch, {2: disk.protect, 4: disk.release})
    assert attempt(recipe, notify=told.append).steps == 6
    assert sum("was not written (Read-only file system)" in text for text in told) == 2
    assert differences(calm, run_path(recipe)) == []


# -- when the run cannot go on ------------------------------------------------------------------------------------


def command(recipe) -> list[str]:
    return ["resume", str(run_path(recipe)), "--json"]


def test_a_run_that_is_stopped_and_has_no_room_for_a_checkpoint_ends_with_6_and_goes_on_later(
    disk, calm, monkeypatch, capsys
):
    recipe = on(disk)
    attempt(recipe, stop_after=2)
    before = named(run_path(recipe))

    def fill_and_stop():
        disk.fill(MEGABYTE)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        at_step(patched, {3: fill_and_stop})
        assert main(command(recipe)) == StorageError.exit_code == 6
    place = str(RunFolder(run_path(recipe)).checkpoints)
    words = capsys.readouterr().err
    assert "stopped after 4 steps, but no checkpoint of them could be written to" in words
    assert place in words and "make room" in words
    assert before.items() <= named(run_path(recipe)).items() or kept(run_path(recipe)) == [2, 3]
    disk.free()
    assert main(command(recipe)) == 0
    assert differences(calm, run_path(recipe)) == []


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_model_that_cannot_be_saved_ends_with_6_and_the_run_can_be_ended_later(disk, calm, monkeypatch, capsys, what):
    recipe = on(disk)
    attempt(recipe, stop_after=4)
    finish = Attempt.finish

    def finish_without_room(self):
        self.checkpointer.wait()
        disk.fill(MEGABYTE // 8) if what == "full" else disk.protect()
        finish(self)

    with monkeypatch.context() as patched:
        patched.setattr(Attempt, "finish", finish_without_room)
        assert main(command(recipe)) == 6
    words = capsys.readouterr().err
    assert f"the trained model could not be written to {run_path(recipe)}" in words
    assert {"full": "No space left", "read-only": "Read-only file system"}[what] in words
    assert not (run_path(recipe) / "model").exists() and not RunFolder(run_path(recipe)).is_finished
    disk.free() if what == "full" else disk.release()
    assert main(command(recipe)) == 0
    assert differences(calm, run_path(recipe)) == []


def test_a_run_resumed_on_a_read_only_disk_does_not_pretend_to_have_ended(disk, calm, capsys):
    recipe = on(disk)
    attempt(recipe, stop_after=4)
    before = named(run_path(recipe))
    disk.protect()
    assert main(command(recipe)) == 6
    assert "could not be written to" in capsys.readouterr().err
    disk.release()
    assert named(run_path(recipe)) == before
    assert main(command(recipe)) == 0
    assert differences(calm, run_path(recipe)) == []


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_run_that_cannot_begin_says_where_and_leaves_its_name_free(disk, capsys, what):
    recipe = on(disk)
    disk.fill(0) if what == "full" else disk.protect()
    words = ["train", "ppo", "recipes/tiny-ppo.yaml", "--run.directory", recipe.run.directory, "--run.name", "run"]
    assert main(words) == 6
    assert f"run.directory: cannot write to {run_path(recipe)}" in capsys.readouterr().err
    assert not is_run(run_path(recipe))
    disk.free() if what == "full" else disk.release()
    assert attempt(recipe, stop_after=1).steps == 1
