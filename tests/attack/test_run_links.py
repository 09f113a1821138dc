"""A run's folder from somebody else in which names lead elsewhere: links, named pipes and devices."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tether.cli import main

NAMES = (
    "run.json",
    "recipe.json",
    "records.jsonl",
    "finished.json",
    "forked.json",
    ".recording",
    "checkpoints/step-00000002/manifest.json",
    "checkpoints/step-00000002/state.json",
)
FLAGS = ("--rollout.prompts_per_step", "2", "--rollout.max_new_tokens", "4", "--task.name", "match-case")


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run as one that was killed after two of its three steps."""
    place = tmp_path_factory.mktemp("begun")
    flags = ["--run.directory", str(place), "--run.name", "run", "--run.steps", "3", "--checkpoint.every", "2"]
    assert main(["train", "ppo", *FLAGS, *flags]) == 0
    for name in ("finished.json", ".recording"):
        (place / "run" / name).unlink()
    shutil.rmtree(place / "run" / "model")
    shutil.rmtree(place / "run" / "checkpoints" / "step-00000003")
    return place / "run"


@pytest.fixture
def run(begun, tmp_path) -> Path:
    shutil.copytree(begun.parent, tmp_path / "runs")
    return tmp_path / "runs" / "run"


def instead(run: Path, name: str, target: str | Path | None) -> Path:
    """Put a link there, or a named pipe."""
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if target is None:
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    return path


@pytest.mark.parametrize("name", [*NAMES[:6], ".finished.json.unfinished"])
def test_going_on_writes_through_no_link(run, tmp_path, command, refusal, name):
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    path = instead(run, name, victim)
    told = refusal(command("resume", run), 2)
    if name not in ("run.json", "recipe.json"):  # which are read first
        assert f"{path} is a link to {victim}" in told
    command("doctor", run, "--verify", "--repair")
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize("name", ["checkpoints", "model", "best", "spool", "faults"])
def test_going_on_removes_nothing_behind_a_link(run, tmp_path, command, refusal, name):
    victim = tmp_path / "victim"
    if name == "checkpoints":
        shutil.copytree(run / name, victim)
    for old in ("step-00000001", ".removed-step-00000001", ".unfinished-step-00000003"):
        (victim / old).mkdir(parents=True)
    before = sorted(path.name for path in victim.iterdir())
    path = instead(run, name, victim)
    assert f"{path} is a link to" in refusal(command("resume", run), 2)
    assert sorted(path.name for path in victim.iterdir()) == before


@pytest.mark.parametrize("subcommand", ["show", "report", "doctor", "verify", "fork", "export", "resume"])
@pytest.mark.parametrize("target", [None, "/dev/zero"], ids=["pipe", "device"])
@pytest.mark.parametrize("name", NAMES)
def test_pipes_and_devices_are_not_waited_for(run, command, name, target, subcommand):
    instead(run, name, target)
    words = {
        "verify": ("doctor", run, "--verify"),
        "export": ("export", run, "--checkpoint", "-1", "--model", "out"),
        "fork": ("fork", run, "--run.name", "other"),
    }
    ended = command(*words.get(subcommand, (subcommand, run)))
    assert ended.seconds < 5 and ended.code in (0, 2, 6) and "Traceback" not in ended.err, ended.err[-2000:]
    if subcommand in ("resume", "verify"):
        assert ended.code != 0


def test_a_linked_folder_and_a_link_of_the_users_own_beside_the_files_go_on(run, tmp_path, command):
    shutil.move(run, tmp_path / "disk")
    run.symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "notes").symlink_to("/etc/hostname")
    ended = command("resume", run)
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("target", ["/etc/hostname", None], ids=["link", "pipe"])
def test_an_exported_model_holds_no_file_from_elsewhere(run, tmp_path, command, refusal, target):
    assert command("resume", run).code == 0
    path = instead(run, "model/notes.txt", target)
    assert f"{path} is a link" in refusal(command("export", run, "--model", "out"), 2)
    assert not (tmp_path / "out").exists()
