"""Small runs for the tests of the Python API, and the way to compare two of them to the bit."""

import sys
from pathlib import Path

import pytest
from small_runs import PROMPTS, SMALL, share_of_letters

import tether

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))


@pytest.fixture
def small_ppo(tmp_path):
    """`tether.ppo` on the tiny model, in a workspace of the test's own."""

    def train(prompts=PROMPTS, reward=share_of_letters, *, settings=None, workspace="runs", **more) -> tether.Run:
        more = {"steps": 3, "directory": tmp_path / workspace, "progress": False} | more
        return tether.ppo("tiny-bytes", prompts, reward, settings={**SMALL, **(settings or {})}, **more)

    return train
