"""Whole runs whose answers are sampled by workers: the bits of the run in one process, also after faults."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from worker_processes import TOKEN, workers

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))

from in_process import attempt, whole
from same_runs import differences
from tiny_recipes import tiny

from tether.errors import WorkersLost
from tether.store.folder import run_path

CHUNKED = ("--distributed.rollout_chunk", "1", "--run.steps", "4", "--checkpoint.every", "1")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, as forked workers need, and the token of the workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("TETHER_WORKER_TOKEN", TOKEN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


def test_workers_that_the_run_starts_give_the_bits_of_one_process(tmp_path):
    one = whole(tiny("ppo", tmp_path / "one", *CHUNKED))
    two = whole(tiny("ppo", tmp_path / "two", *CHUNKED, "--rollout.workers", "2"))
    assert differences(one, two) == []


def test_a_run_without_workers_keeps_its_checkpoint_and_goes_on_with_others(tmp_path):
    undisturbed = whole(tiny("ppo", tmp_path / "undisturbed", *CHUNKED))
    with workers(2) as (first, second):
        servers = ("--rollout.servers", f"[{first.url}, {second.url}]", "--rollout.worker_patience", "0.5")
        recipe = tiny("ppo", tmp_path / "lost", *CHUNKED, *servers)

        def kill(step: int, _: dict[str, float]) -> None:
            if step == 0:
                first.kill()  # the run goes on with the other one
            if step == 1:
                second.kill()

        with pytest.raises(WorkersLost, match="no rollout worker is left"):
            attempt(recipe, advance=kill)
        second.start()
        assert attempt(recipe).steps == recipe.run.steps
        assert differences(undisturbed, run_path(recipe)) == []
