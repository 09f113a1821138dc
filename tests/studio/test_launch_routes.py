"""Runs started from the page: checked before they start, stopped and resumed, and none of the server's business."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from studio_clients import Clients, pairs, record_run, settings

from tether.errors import DataError
from tether.store.database.open import workspace_at
from tether.studio.app import create_app
from tether.studio.launcher import Launcher
from tether.studio.replies import Refused
from tether.studio.vote_training import TrainingRequest, split_records, write_plan


def wait_until(true, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"method": "nothing"}, "method"),
        ({"method": "ppo", "settings": {"ppo.clip_rang": 0.1}}, "clip_range"),
        ({"method": "ppo", "settings": {"ppo.clip_range": "wide"}}, "clip_range"),
        ({"method": "ppo", "settings": {"run.name": "../out"}}, "run.name"),
        ({"method": "ppo", "settings": {"run.name": "/etc/x"}}, "run.name"),
        ({"method": "ppo", "settings": {"run.name": "a/../../b"}}, "run.name"),
        ({"method": "ppo", "settings": {"run.directory": "/tmp"}}, "run.directory"),
        ({"method": "ppo", "settings": {"--json": "x"}}, ""),
        ({"method": "ppo", "settings": {"run.name": ["x"]}}, "run.name"),
        ({"method": "sft"}, "data.train"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_starts(plain: Clients, body, told):
    reply = plain.owner.post("/api/runs", json=body)
    assert reply.status_code in (400, 422) and told in reply.json()["error"]
    assert plain.owner.get("/api/jobs").json() == {"jobs": []}


def test_a_run_that_was_not_started_here_cannot_be_stopped_here(plain: Clients):
    assert plain.owner.post("/api/runs/1/stop").status_code == 409
    assert plain.owner.post("/api/runs/1/resume").status_code == 409, "it is done"


def test_processes_outlive_the_server_and_are_stopped_by_their_group(tmp_path: Path):
    launcher = Launcher(tmp_path)
    script = "import time, os; print('begun', flush=True); time.sleep(60)"
    job = launcher.python("demo/run", "ppo", ["-c", script])
    try:
        wait_until(lambda: "begun" in job.as_json()["log"])
        assert os.getsid(job.process.pid) == job.process.pid != os.getsid(0), "no terminal of ours reaches it"
        with pytest.raises(Refused):
            launcher.python("demo/run", "ppo", ["-c", script])
        with pytest.raises(Refused):
            launcher.stop("demo")
        launcher.stop("demo/run")
        wait_until(lambda: not job.is_running)
        assert job.as_json()["state"] == "failed" and job.process.returncode == -signal.SIGTERM
    finally:
        if job.is_running:
            os.killpg(job.process.pid, signal.SIGKILL)


def test_exit_codes_are_told_in_words(tmp_path: Path):
    launcher = Launcher(tmp_path)
    states = {}
    for code in (0, 2, 3):
        job = launcher.python(f"r{code}", "ppo", ["-c", f"print('said'); raise SystemExit({code})"])
        job.process.wait(timeout=30)
        states[code] = (job.as_json()["state"], job.as_json()["log"])
    assert states == {0: ("done", "said\n"), 2: ("failed", "said\n"), 3: ("stopped", "said\n")}


def test_a_run_is_started_watched_stopped_and_resumed(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TETHER_STORE", raising=False)
    clients = Clients(create_app(workspace_at(tmp_path / "runs"), settings()))
    small = {"rollout.prompts_per_step": 4, "rollout.max_new_tokens": 2, "ppo.epochs": 1, "kl.apply_to": "none"}
    small |= {"kl.coef": 0.0, "checkpoint.every": 1, "run.steps": 5000, "run.name": "from/page", "model.device": "cpu"}
    started = clients.owner.post("/api/runs", json={"method": "ppo", "settings": small})
    assert started.status_code == 200 and started.json()["name"] == "from/page"

    def run() -> dict:
        found = clients.owner.get("/api/runs").json()["runs"]
        return found[0] if found else {"step": 0, "state": "none"}

    wait_until(lambda: run()["step"] >= 2)
    assert run()["state"] == "running"
    assert clients.owner.post(f"/api/runs/{run()['id']}/resume").status_code == 409
    assert clients.owner.post(f"/api/runs/{run()['id']}/stop").status_code == 200
    wait_until(lambda: run()["state"] == "stopped")
    wait_until(lambda: clients.owner.get("/api/jobs").json()["jobs"][0]["state"] == "stopped")
    before = run()["step"]
    assert clients.owner.post(f"/api/runs/{run()['id']}/resume").status_code == 200
    wait_until(lambda: run()["step"] > before)
    job = clients.app.state.studio.launcher.jobs()[0]
    os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait(timeout=30)
    wait_until(lambda: run()["state"] == "interrupted", 10.0)


# -- training from votes ------------------------------------------------------------------------------------------


def judged(count: int) -> list[dict]:
    return [
        {"prompt": one["prompt"], "answers": [one["chosen"], one["rejected"]], "ranks": [0, 1], "ended": [True, True]}
        | {"item": n, "votes": [100 + n]}
        for n, one in enumerate(pairs(count))
    ]


def test_an_item_that_was_held_out_stays_held_out_as_votes_grow():
    few, many = split_records(judged(40), 0.2), split_records(judged(400), 0.2)
    out = {record["item"] for record in few.held_out}
    assert out == {record["item"] for record in many.held_out if record["item"] < 40} and 2 <= len(out) <= 16
    assert not out & {record["item"] for record in few.train} and len(few.train) + len(few.held_out) == 40
    assert few.votes == sorted(100 + record["item"] for record in few.train)


def test_too_few_pairs_are_told_and_empty_answers_are_left_out():
    with pytest.raises(DataError, match="3 items"):
        split_records(judged(3), 0.2)
    bad = [{"prompt": "p", "answers": [" ", "b"], "item": 90, "votes": [1]}]
    bad += [{"prompt": "p", "answers": ["\ud800", "b"], "item": 91, "votes": [2]}]
    split = split_records(judged(6) + bad, 0.2)
    assert not {90, 91} & {record["item"] for record in [*split.train, *split.held_out]}


def test_a_plan_holds_the_very_votes_and_recipes_that_can_be_read(tmp_path: Path):
    split = split_records(judged(10), 0.2)
    wish = TrainingRequest(
        "loop", queue=7, model="tiny-bytes", considered=range(100, 112), ppo_settings={"run.seed": 3}
    )
    plan = json.loads(write_plan(tmp_path, wish, split).read_text())
    assert [words[:2] for words in plan["commands"]] == [["train", "reward"], ["train", "ppo"]]
    assert plan["commands"][1][-1] == "--run.seed=3"
    for run in ("reward", "ppo"):
        used = json.loads((tmp_path / "loop" / run / "votes.json").read_text())
        assert used["queue"] == 7 and used["votes"] == split.votes and used["considered"] == list(range(100, 112))
    lines = (tmp_path / "loop" / "data" / "train.jsonl").read_text().splitlines()
    assert sorted(vote for line in lines for vote in json.loads(line)["votes"]) == split.votes


def test_training_asks_for_votes_first_and_for_settings_that_can_be(plain: Clients):
    queue = plain.queue()
    assert plain.owner.post("/api/train", json={"queue_id": queue}).status_code == 400
    plain.owner.post(f"/api/label/queues/{queue}/import", json={"records": pairs(8)})
    curve = plain.owner.get(f"/api/train/curve?queue={queue}").json()
    assert curve == {"votes": 8, "pairs": 8, "examples": 8, "since_last": 8, "points": []}
    wrong = {"queue_id": queue, "settings": {"ppo": {"ppo.clip_rang": 1}}, "name": "x"}
    assert "clip_range" in plain.owner.post("/api/train", json=wrong).json()["error"]


# -- what a reward model is least sure of -------------------------------------------------------------------------


@pytest.fixture
def with_reward_models(tmp_path: Path, monkeypatch) -> Clients:
    """A workspace with two reward models of made-up scores: a text's length, and its place in the alphabet."""
    monkeypatch.delenv("TETHER_STORE", raising=False)
    for name in ("demo/ppo", "old", "new"):
        record_run(tmp_path, name=name, method="ppo" if name == "demo/ppo" else "reward")
        (tmp_path / "runs" / name / "model").mkdir(parents=True)
        (tmp_path / "runs" / name / "model" / "config.json").write_text("{}")
    clients = Clients(create_app(workspace_at(tmp_path / "runs"), settings()))
    judges = {"old": len, "new": lambda text: ord(text[0])}

    def scores(folder, answers):
        return [float(judges[folder.name](answer.text)) for answer in answers]

    monkeypatch.setattr(clients.app.state.studio.models, "scores", scores)
    return clients


def asked(clients: Clients, queue: int) -> list[str]:
    order = []
    while item := clients.owner.get(f"/api/label/queues/{queue}/next").json()["item"]:
        order.append(item["prompt"][0]["content"])
        body = {"client_uid": f"u{item['id']}", "item_id": item["id"], "order": item["order"], "choice": "tie"}
        assert clients.owner.post("/api/label/votes", json=body).status_code == 200
    return order


def test_a_queue_asks_first_what_the_newest_reward_model_is_least_sure_of(with_reward_models: Clients):
    clients = with_reward_models
    texts = {"far": ("a", "zzzz"), "near": ("b", "dddddddd"), "same": ("c", "ccc")}
    records = [{"prompt": name, "chosen": one, "rejected": other} for name, (one, other) in texts.items()]
    by_newest, by_old = clients.queue(records=records), clients.queue(records=records)
    assert clients.owner.post(f"/api/label/queues/{by_newest}/rescore").json() == {"items": 3, "by": "new"}
    reply = clients.owner.post(f"/api/label/queues/{by_old}/rescore", json={"reward_run": 2})
    assert reply.json() == {"items": 3, "by": "old"}
    assert asked(clients, by_newest) == ["same", "near", "far"]  # 0, 2 and 25 letters apart
    assert asked(clients, by_old) == ["same", "far", "near"]  # 2, 3 and 7 longer


def test_uncertain_pairs_are_chosen_by_the_newest_reward_model_s_scores(with_reward_models: Clients):
    clients = with_reward_models
    queue = clients.queue()
    body = {"from": "uncertain", "run": 1, "count": 3}
    assert clients.owner.post(f"/api/label/queues/{queue}/fill", json=body).status_code == 200
    items = clients.app.state.studio.labels.items(queue)
    assert all(answer["source"]["score"] == ord("a") for item in items for answer in item.answers)
    assert clients.owner.post(f"/api/label/queues/{queue}/fill", json=body | {"reward_run": 1}).status_code == 422


def test_without_a_reward_model_there_is_no_doubt_to_go_by(plain: Clients):
    queue = plain.queue(records=pairs(2))
    assert plain.owner.post(f"/api/label/queues/{queue}/rescore").status_code == 409
    writing = plain.queue("demonstration", [{"prompt": "p"}])
    assert plain.owner.post(f"/api/label/queues/{writing}/rescore", json={"reward_run": 1}).status_code == 422
