"""A training that was started from the page tells which of its runs is under way, and how long it will take."""

import json
import time

from recording import Recording
from studio_clients import Clients


def test_a_job_tells_its_stage_how_far_it_is_and_which_run_it_makes(plain: Clients, tmp_path):
    """A training of two runs: at first none has begun, then one is done and the other under way."""
    data = tmp_path / "runs" / "votes" / "data"
    data.mkdir(parents=True)
    commands = [["train", "reward", "r.yaml"], ["train", "ppo", "p.yaml"]]
    (data / "plan.json").write_text(json.dumps({"commands": commands}))
    job = plain.app.state.studio.launcher.python("votes", "train", ["-c", "pass"])
    assert [stage["run"] for stage in stages(plain)] == [None, None]
    done = Recording(tmp_path, name="votes/reward", steps=2, method="reward")
    done.steps(0, 1)
    done.recorder.close("done")
    under_way = Recording(tmp_path, name="votes/ppo", steps=10)
    under_way.steps(0, 1, 2, 3)
    deadline = time.monotonic() + 20
    while (ppo := stages(plain)[1])["run"] is None or ppo["run"]["step"] < 4:  # it is written by a thread
        assert time.monotonic() < deadline
        time.sleep(0.05)
    reward = stages(plain)[0]
    assert (reward["title"], reward["run"]["state"]) == ("reward model", "done")
    assert (ppo["title"], ppo["run"]["step"], ppo["run"]["steps"]) == ("policy (PPO)", 4, 10)
    assert reward["run"]["seconds_left"] is None and 0 <= ppo["run"]["seconds_left"] < 60
    listed = {run["name"]: run["seconds_left"] for run in plain.owner.get("/api/runs").json()["runs"]}
    assert listed["votes/ppo"] is not None and listed["votes/reward"] is None
    under_way.recorder.close("stopped")
    job.process.wait(timeout=30)


def test_a_job_of_one_run_has_one_stage(plain: Clients):
    job = plain.app.state.studio.launcher.python("demo/ppo", "resume", ["-c", "pass"])
    [stage] = stages(plain)
    assert stage["title"] == "resume" and stage["run"]["name"] == "demo/ppo"
    job.process.wait(timeout=30)


def stages(clients: Clients) -> list[dict]:
    [job] = clients.owner.get("/api/jobs").json()["jobs"]
    return job["stages"]
