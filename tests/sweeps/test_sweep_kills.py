"""A sweep that is killed five times, at any moment, ends with the table of one that was left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FLAGS = [
    *("--run.steps=6", "--run.save=false", "--run.doctor_every=0", "--checkpoint.every=2"),
    *(
        "--rollout.prompts_per_step=8",
        "--rollout.max_new_tokens=4",
        "--ppo.minibatch_size=8",
        "--store.rollouts_every=0",
    ),
    *("--task.name=match-case", "--kl.apply_to=none", "--model.device=cpu"),
]
SWEEP = [
    "--vary",
    "optimizer.policy_lr=1e-3,1e-2",
    "--seeds",
    "2",
    "--name",
    "s",
    "--jobs",
    "2",
    "--json",
    "--metric",
    "entropy",
]
KILLS = 5
PATIENCE = 900  # seconds, after which something hangs


def start(folder: Path) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "tether", "sweep", "ppo", *SWEEP, *FLAGS]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def progress(folder: Path) -> int:
    """A number that grows as trials go on: their folders, checkpoints and ends."""
    return sum(1 for _ in folder.glob("runs/s/*/checkpoints/*")) + 10 * len(list(folder.glob("runs/s/*/finished.json")))


def table(folder: Path) -> dict:
    return json.loads((folder / "runs" / "s" / "table.json").read_text())


def test_five_kills_leave_the_same_table(tmp_path: Path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    done = start(alone)
    out, errors = done.communicate(timeout=PATIENCE)
    assert done.returncode == 0, errors
    assert json.loads(out.splitlines()[-1])["settings"] == table(alone)["settings"]

    for kill in range(KILLS):
        process, before, began = start(killed), progress(killed), time.monotonic()
        while process.poll() is None and progress(killed) == before and time.monotonic() - began < PATIENCE:
            time.sleep(0.05)
        assert process.poll() is None, f"nothing was left to kill the {kill + 1}th time"
        os.kill(process.pid, signal.SIGKILL)  # the sweep alone: its trials must end by themselves
        process.communicate()
    assert not (killed / "runs" / "s" / "table.json").exists()

    last = start(killed)
    _, errors = last.communicate(timeout=PATIENCE)
    assert last.returncode == 0, errors
    assert table(killed) == table(alone)
