"""Training that dies is told on the page; a server that dies is none of training's business."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer
from studio_browser import Served, Visitor, expect, serving

from tether.store.database.open import workspace_at
from tether.store.read import list_runs, open_workspace

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-ppo.yaml"
MAX_MILLISECONDS = 10_000  # milliseconds from the death of training to the words on the page
PATIENCE = 120_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(workspace_at(tmp_path_factory.mktemp("studio") / "runs", None)) as found:
        yield found


def start_training(folder: Path, name: str, steps: int) -> subprocess.Popen:
    words = ["train", "ppo", str(RECIPE), "--run.directory", str(folder), "--run.name", name, "--run.steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "tether", *words], env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("page_of", ["the run", "all runs"])
def test_training_that_is_killed_is_told_within_ten_seconds(visitor: Visitor, served: Served, page_of):
    name = f"dies-{page_of[:3]}"
    training = start_training(served.workspace.directory, name, 100_000)
    try:
        page = visitor.go("#/runs")
        row = page.locator("table.runs tbody tr", has_text=name)
        expect(row.locator(".state")).to_contain_text("running", timeout=PATIENCE)
        state = row.locator(".state")
        if page_of == "the run":
            page = visitor.go(f"#/run/{served.run_id(name)}")
            expect(page.locator(".chart[data-metric='score'] canvas").first).to_be_visible(timeout=PATIENCE)
            state = page.locator(".head .state")
        training.send_signal(signal.SIGKILL)
        expect(state).to_contain_text("interrupted", timeout=MAX_MILLISECONDS)
    finally:
        training.kill()
        training.wait()


def test_training_does_not_notice_that_the_server_is_killed(tmp_path: Path):
    folder, steps = tmp_path / "runs", 12
    with LiveServer(folder) as server:
        changes = {"run.name": "lives", "run.steps": steps, "model.path": "tiny-bytes", "task.name": "match-case"}
        changes |= {"rollout.max_new_tokens": 8, "model.device": "cpu", "run.save": False}
        reply = server.client.post("/api/runs", json={"method": "ppo", "settings": changes})
        assert reply.status_code == 200, reply.text
        deadline = time.monotonic() + PATIENCE / 1000
        while not any(run["step"] for run in server.client.get("/api/runs").json()["runs"]):
            assert time.monotonic() < deadline, "it never began"
            time.sleep(0.1)
        server.kill()
    with open_workspace(folder) as opened:
        [run] = list_runs(opened)
        while run.state == "running" and time.monotonic() < deadline:
            time.sleep(0.2)
            [run] = list_runs(opened)
    assert (run.state, run.steps_done) == ("done", steps)
