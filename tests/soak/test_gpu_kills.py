"""Killing a run on one device, in small, and that the comparison sees single bits."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch
from attempts import sit
from gpu_kills import as_array, compare, difference, main
from in_process import whole
from safetensors.torch import load_file, save_file
from tiny_recipes import tiny

from tether.store.folder import run_path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [whole(tiny("ppo", tmp_path / name, "--run.steps", "2")) for name in ("one", "other")]


def test_a_run_that_is_killed_twice(tmp_path: Path, capsys):
    kept = tmp_path / "kept"
    assert main(["--kills", "2", "--device", "cpu", "--dtype", "float32", "--keep", str(kept)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["passed"] and summary["kills"] == 2 and summary["wrong"] == []
    for part in ("weights", "checkpoint", "metrics", "records"):
        assert summary["resumed"][part]["equal"] and summary["resumed"][part]["compared"] > 0
    weights = kept / "killed" / "run" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert main(["--compare", str(kept / "calm" / "run"), str(kept / "killed" / "run")]) == 1
    assert json.loads(capsys.readouterr().out)["weights"]["different"] == 1


def test_an_attempt_in_a_new_interpreter(tmp_path: Path):
    """As on a CUDA device, which a fork could not use."""
    recipe = tiny("ppo", tmp_path / "runs", "--run.steps", "3", "--checkpoint.every", "1", "--model.device", "auto")
    assert recipe.model.device == "auto"
    killed = sit(recipe, most_steps=1)
    assert killed.killed and killed.steps >= 1
    assert sit(recipe).exit_code == 0
    assert compare(run_path(recipe), whole(tiny("ppo", tmp_path / "calm", "--run.steps", "3")))["metrics"]["equal"]


def test_one_bit_of_a_weight(runs: list[Path]):
    assert compare(*runs)["equal"]
    file = runs[1] / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name].view(-1).view(torch.int32)[0] ^= 1
    save_file(tensors, file, {"format": "pt"})
    found = compare(*runs)
    assert not found["equal"] and found["metrics"]["equal"] and found["records"]["equal"]
    assert found["weights"]["names"] == [f"model/model.safetensors: {name}"]
    assert 0.0 < found["weights"]["max_abs_difference"] < 1e-6


def test_one_metric_and_one_missing_record(runs: list[Path]):
    with sqlite3.connect(runs[1].parent / "tether.db") as database:
        database.execute("UPDATE metrics SET value = value + 0.25 WHERE step = 1 AND name = 'loss'")
        database.execute("DELETE FROM rollouts WHERE step = 0 AND place = 3")
    found = compare(*runs)
    assert not found["equal"] and found["weights"]["equal"] and found["checkpoint"]["equal"]
    assert found["metrics"]["names"] == ["step 1: loss"]
    assert found["metrics"]["max_abs_difference"] == pytest.approx(0.25)
    assert found["records"]["missing"] > 0 and found["records"]["different"] == 0


def test_nothing_is_not_equal():
    assert not difference({}, {})["equal"]


def test_a_difference_that_is_no_number_is_seen():
    one, other = {"a": np.array([1.0, np.nan])}, {"a": np.array([1.0, 2.0])}
    assert difference(one, other)["different"] == 1


def test_bfloat16_keeps_its_bits():
    low, high = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0078125], dtype=torch.bfloat16)
    assert as_array(low).tobytes() != as_array(high).tobytes()
