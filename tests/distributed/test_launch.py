"""`tether train ... --nproc N`: one bar, one exit code; without it nothing of this package is loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from same_runs import differences
from tiny_recipes import demonstrations

from tether.cli import _take_count, main
from tether.errors import RankLost, Stopped, UsageError
from tether.store import checkpoints

STEPS = ("--optimizer.micro_batch_tokens", "40", "--sft.batch_size", "3", "--model.device", "cpu")
ALONE = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | {"OMP_NUM_THREADS": "1"}


def command(tmp_path, name: str, steps: int, *flags: str) -> list[str]:
    place = ("--run.directory", str(tmp_path / "runs"), "--run.name", name, "--run.steps", str(steps))
    data = ("--data.train", str(demonstrations(tmp_path)))
    return [sys.executable, "-m", "tether", "train", "sft", *data, *place, *STEPS, *flags]


def test_one_process_loads_nothing_of_it(tmp_path):
    words = command(tmp_path, "one", 1)[3:]
    code = (
        "import sys, torch; from tether.cli import main; code = main(sys.argv[1:]);"
        "loaded = [name for name in sys.modules if name.startswith('tether.distributed')];"
        "print(code, loaded, torch.distributed.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], env=ALONE, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0 [] False", done.stderr


def test_stopped_once_and_then_killed_it_goes_on_to_the_same_bits(tmp_path):
    begun = subprocess.Popen(
        [*command(tmp_path, "run", 2000, "--nproc", "2", "--json")], env=ALONE, stdout=subprocess.PIPE, text=True
    )
    assert begun.stdout is not None
    lines = [begun.stdout.readline() for _ in range(2)]  # rank 0 alone prints
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    begun.send_signal(signal.SIGINT)
    rest, _ = begun.communicate(timeout=60)
    assert begun.returncode == Stopped.exit_code
    folder = tmp_path / "runs" / "run"
    taken = checkpoints.listed(folder / "checkpoints")[-1][0]
    assert taken == 2 + sum("step" in json.loads(line) for line in rest.splitlines())
    assert "tether resume" in json.loads(rest.splitlines()[-1])["error"]

    going = subprocess.Popen(
        [sys.executable, "-m", "tether", "resume", str(folder), "--nproc", "3", "--json"],
        env=ALONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert going.stdout is not None
    assert json.loads(going.stdout.readline())["step"] == taken
    os.kill(rank_of(going.pid, 2), signal.SIGKILL)
    _, said = going.communicate(timeout=60)
    assert going.returncode == RankLost.exit_code
    sentences = [line for line in said.splitlines() if line.startswith("tether: ")]
    assert sentences == [sentences[0]]
    assert "resume the run" in sentences[0]


def rank_of(launcher: int, rank: int) -> int:
    """The process id of a rank that a launcher started."""
    children = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True, timeout=10)
    for child in children.stdout.split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among {children.stdout.split()}")


def test_torchrun_starts_the_same_run(tmp_path):
    begun = time.monotonic()
    for name, starts in (
        ("one", []),
        ("two", ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]),
    ):
        words = command(tmp_path, name, 2)
        done = subprocess.run([words[0], *starts, *words[1:]], env=ALONE, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert differences(tmp_path / "runs" / "one", tmp_path / "runs" / "two") == []
    assert time.monotonic() - begun < 120


def test_the_number_of_processes_is_read():
    words = ["ppo", "--nproc", "3", "--json"]
    assert _take_count(words) == 3
    assert words == ["ppo", "--json"]
    assert _take_count(["ppo", "--nproc=2"]) == 2
    assert _take_count(["ppo"]) is None
    for wrong in (["--nproc"], ["--nproc", "none"], ["--nproc", "0"]):
        with pytest.raises(UsageError, match="--nproc"):
            _take_count(wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "ppo", "--ppo.clip_rang", "0.1"], "did you mean --ppo.clip_range?"),
        (["train", "ppq"], "unknown method ppq"),
        (["train", "ppo", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "ppo", "--allow-code", "mine.py", "--run.steps", "x"], "run.steps"),
    ],
)
def test_a_wrong_recipe_is_told_before_ranks_start(words, message, monkeypatch, capsys):
    monkeypatch.setattr("tether.distributed.launch.launch", lambda *_: pytest.fail("ranks were started"))
    assert main([*words, "--nproc", "2"]) == 2
    assert message in capsys.readouterr().err


def test_help_starts_no_ranks(monkeypatch, capsys):
    monkeypatch.setattr("tether.distributed.launch.launch", lambda *_: pytest.fail("ranks were started"))
    assert main(["train", "ppo", "--nproc", "2", "--help"]) == 0
    assert "ppo.clip_range" in capsys.readouterr().out
