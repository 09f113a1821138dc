"""Tether without `tether.accel`: the same results within rounding, one notice, and nothing else that needs it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tether

SOURCE = Path(tether.__file__).parent
NOTICE = "the package tether.accel is not installed"
PPO = [
    *("train", "ppo", "--json", "--model.path", "tiny-bytes", "--model.device", "cpu", "--run.steps", "2"),
    *("--rollout.prompts_per_step", "4", "--rollout.samples_per_prompt", "2", "--rollout.max_new_tokens", "12"),
]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `tether` that lacks the folder `accel`."""
    root = tmp_path_factory.mktemp("without")
    shutil.copytree(SOURCE, root / "tether", ignore=shutil.ignore_patterns("accel", "__pycache__"))
    return root


def run(place: Path, runs: Path, *words: str) -> tuple[list[dict], str]:
    """The metrics of each step and what was said, of a training by the package in `place`."""
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tether", *PPO, "--run.directory", str(runs), "--run.name", "one", *words],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize("mode", ["separate", "lora", "shared_backbone"])
def test_ppo_gives_the_same_results(without: Path, tmp_path: Path, mode: str):
    words = ["--roles.mode", mode, *(["--roles.trainable_layers", "1"] if mode == "shared_backbone" else [])]
    fast, said = run(SOURCE.parent, tmp_path / "fast", *words)
    assert NOTICE not in said
    plain, said = run(without, tmp_path / "plain", *words)
    assert said.count(NOTICE) == 1
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours["tokens/sampled"] == theirs["tokens/sampled"]
        for name in ("score", "policy_loss", "value_loss", "approx_kl", "entropy", "grad_norm/policy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    weights = [load_file(tmp_path / kind / "one" / "model" / files(mode)) for kind in ("fast", "plain")]
    assert weights[0].keys() == weights[1].keys()
    for name, ours in weights[0].items():
        assert torch.allclose(ours, weights[1][name], atol=2e-5), name


def files(mode: str) -> str:
    return "adapter_model.safetensors" if mode == "lora" else "model.safetensors"
