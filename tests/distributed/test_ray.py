"""Ranks on a real Ray cluster of several raylets: a rank, its actor, its machine and the head are killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")

from in_process import whole
from rank_kills import Running, parent_of, program, restarts_of, rules, words_of
from ray_cluster import RayCluster
from same_runs import differences
from test_restarts import hit, said_by
from tiny_recipes import tiny

from tether.distributed.launch import free_port

STEPS = 300  # so that the run does not end before Ray has noticed


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Path:
    """The undisturbed run."""
    return whole(tiny("sft", tmp_path_factory.mktemp("calm") / "runs", *rules(STEPS)))


@pytest.fixture
def cluster():
    found = RayCluster(3, free_port())
    yield found
    found.close()


def on(cluster: RayCluster, place: Path, restarts: int) -> Running:
    words = words_of(place / "runs", "sft", STEPS)
    options = ("--nproc", "2", "--restarts", str(restarts), "--ray", cluster.address)
    return program([sys.executable, "-m", "tether", *words, *options], place)


def test_a_rank_an_actor_and_a_machine_are_killed(tmp_path, calm, cluster):
    running = on(cluster, tmp_path, 3)

    def actor_of_rank_0() -> None:
        process = running.pid_of(0)
        assert process is not None
        os.kill(parent_of(process), 9)

    def machine_of_rank_0() -> None:
        process = running.pid_of(0)
        assert process is not None
        cluster.kill_machine(cluster.machine_of(process))

    said = said_by(running, {2: hit(running, 1), 80: actor_of_rank_0, 160: machine_of_rank_0})
    assert running.wait() == 0, said
    ours = tmp_path / "runs" / "run"
    assert differences(calm, ours) == []
    found = restarts_of(ours)
    assert [each["ranks"] for each in found] == [2, 2, 2]
    assert found[0]["fault"] == "rank 1 was killed by signal 9"


def test_the_head_is_lost_and_started_again(tmp_path, calm, cluster):
    running = on(cluster, tmp_path, 1)

    def head() -> None:
        cluster.kill_head()
        cluster.close()
        cluster.start(2)

    said = said_by(running, {20: head})
    assert running.wait() == 0, said
    assert differences(calm, tmp_path / "runs" / "run") == []
    assert len(restarts_of(tmp_path / "runs" / "run")) == 1
