"""The raters of a collect stage: a noisy score, a judge behind a real server, and people with a real queue."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_pipelines import collect_stage, small

from tether.config.load_pipeline import load_pipeline
from tether.errors import DataError, Stopped
from tether.evaluation.judges import read_reply
from tether.pipeline.rankings import noisy_ranks
from tether.pipeline.run_pipeline import resume_pipeline, run_pipeline

# -- a score ------------------------------------------------------------------------------------------------------


def test_ranks_follow_the_scores_and_equals_tie():
    draws = random.Random(0)
    assert noisy_ranks([0.1, 0.7, 0.4], draws, noise=0, tie=0) == [2, 0, 1]
    assert noisy_ranks([0.5, 0.7, 0.5], draws, noise=0, tie=0) == [1, 0, 1]
    assert noisy_ranks([0.5, 0.5], draws, noise=0, tie=0) is None
    assert noisy_ranks([0.50, 0.58, 0.90], draws, noise=0, tie=0.1) == [1, 1, 0]


def test_noise_errs_as_often_as_it_says():
    wins = sum(noisy_ranks([0.3, 0.4], random.Random(seed), noise=0.1, tie=0) == [1, 0] for seed in range(4000))
    # sigmoid(1) = 0.7311; three standard errors of 4000 choices are 0.0210.
    assert wins / 4000 == pytest.approx(1 / (1 + math.exp(-1)), abs=0.0210)


# -- a judge ------------------------------------------------------------------------------------------------------


@contextmanager
def server(reply: Callable[[str, str], str | int]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server that answers each pair by `reply(A, B)`, or with that status; its requests."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request | {"path": self.path, "authorization": self.headers.get("Authorization")})
            one, other = re.findall(r"\[Answer [AB]\]\n(.*?)\n\n", request["messages"][0]["content"], re.DOTALL)
            found = reply(one, other)
            status = found if isinstance(found, int) else 200
            body = json.dumps({"choices": [{"message": {"role": "assistant", "content": str(found)}}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}/v1", asked
    finally:
        listening.shutdown()
        listening.server_close()


def judged(folder: Path, url: str, **judge: object):
    settings = {"url": url, "retries": 0, "timeout_seconds": 5.0, "concurrency": 2} | judge
    stage = collect_stage(rater="judge", judge=settings)
    del stage["reward"]
    return small(folder, rounds=1, truth=None, each_round={"answers": stage})


def longest(one: str, other: str) -> str:
    """By the letters' codes, so that the order of the answers does not matter."""
    return "A" if one > other else "B." if one < other else "tie"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.read_text().splitlines()]


def test_a_judge_is_asked_about_every_pair_in_both_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret-7")
    with server(longest) as (url, asked):
        assert run_pipeline(judged(tmp_path, url, token_env="JUDGE_TOKEN", model="wise"), json_output=False) == 0
    root = tmp_path / "p" / "round-1-answers"
    sampled = lines(root / "answers.jsonl")
    pairs = sum(len(set(each["answers"])) * (len(set(each["answers"])) - 1) // 2 for each in sampled)
    assert len(asked) == 2 * pairs > 20
    assert {each["path"] for each in asked} == {"/v1/chat/completions"}
    assert {each["authorization"] for each in asked} == {"Bearer secret-7"}
    assert {(each["model"], each["temperature"]) for each in asked} == {("wise", 0)}
    texts = [each["messages"][0]["content"] for each in asked]
    swap = lambda text: re.sub(  # noqa: E731
        r"\[Answer A\]\n(.*?)\n\n\[Answer B\]\n(.*?)\n\n",
        r"[Answer A]\n\2\n\n[Answer B]\n\1\n\n",
        text,
        flags=re.DOTALL,
    )
    assert sorted(texts) == sorted(swap(text) for text in texts)
    records = lines(root / "train.jsonl") + lines(root / "held_out.jsonl")
    assert len(records) == pairs
    assert all(
        record["ranks"] == ([0, 1] if record["answers"][0] > record["answers"][1] else [1, 0]) for record in records
    )
    train, held_out = (
        {json.dumps(one["prompt"]) for one in lines(root / f"{part}.jsonl")} for part in ("train", "held_out")
    )
    assert train and held_out and not train & held_out, "a prompt is in one part only"
    assert "secret-7" not in "".join(file.read_text(errors="replace") for file in tmp_path.rglob("*.json*"))


def test_a_judge_that_prefers_the_first_place_ties_everything(tmp_path: Path):
    with server(lambda one, other: "A") as (url, _), pytest.raises(DataError, match="0 of 8 prompts could be ranked"):
        run_pipeline(judged(tmp_path, url), json_output=False)


def test_a_judge_that_is_down_is_one_sentence_and_nothing_is_lost(tmp_path: Path):
    """It fails on the way; then it is up again, and is asked only about what it has not judged."""
    left = [25]

    def failing(one: str, other: str) -> str | int:
        left[0] -= 1
        return 503 if left[0] < 0 else longest(one, other)

    folder = tmp_path / "p" / "round-1-answers"
    with server(failing) as (url, asked):
        pipeline = judged(tmp_path, url, concurrency=1)
        words = r"stage round-1-answers: the judge at http.* gave no verdict on \d+ of \d+ pairs \(status_503: \d+\)"
        with pytest.raises(DataError, match=words + r".*verdicts are kept: repair the judge, then tether resume .*p$"):
            run_pipeline(pipeline, json_output=False)
        first = (folder / "answers.jsonl").read_bytes()
        known = len(lines(folder / "verdicts.jsonl"))
        left[0], before = 10_000, len(asked)
        assert resume_pipeline(tmp_path / "p", json_output=False) == 0
    assert (folder / "answers.jsonl").read_bytes() == first
    total = len(lines(folder / "verdicts.jsonl"))
    assert len(asked) - before == 2 * (total - known) and 0 <= known < total
    figures = json.loads((tmp_path / "p" / "summary.json").read_text())["stages"]["round-1-answers"]
    assert figures["judged_pairs"] == total and figures["unjudged_pairs"] == 0


def test_a_few_failures_are_left_out_and_counted(tmp_path: Path):
    turns = [0]

    def sometimes(one: str, other: str) -> str | int:
        turns[0] += 1
        return 500 if turns[0] == 3 else longest(one, other)

    with server(sometimes) as (url, _):
        assert run_pipeline(judged(tmp_path, url, concurrency=1, max_failure_rate=0.2), json_output=False) == 0
    summary = json.loads((tmp_path / "p" / "summary.json").read_text())
    figures = summary["stages"]["round-1-answers"]
    assert figures["unjudged_pairs"] == 1 and figures["pairs"] == figures["judged_pairs"]


def test_a_judge_whose_server_is_not_there_ends_the_stage(tmp_path: Path):
    with pytest.raises(DataError, match=r"connection: \d+.*max_failure_rate = 0.1"):
        run_pipeline(judged(tmp_path, "http://127.0.0.1:9/v1"), json_output=False)


@pytest.mark.parametrize(
    ("reply", "choice"),
    [("A", "first"), (" B.", "second"), ("tie", "tie"), ("Tie!", "tie"), ("Answer B is better.", "second")],
)
def test_a_reply_is_read(reply: str, choice: str):
    assert read_reply(reply).choice == choice


@pytest.mark.parametrize("reply", ["", "neither", "A or B", None, 3, "a"])
def test_a_reply_without_one_choice_is_no_verdict(reply: Any):
    assert read_reply(reply).choice is None


# -- people -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pair", "ranking"])
def test_people_vote_in_a_queue_of_the_studio(tmp_path: Path, kind: str):
    pytest.importorskip("starlette")
    from tether.store.read import open_workspace
    from tether.studio.label_store import CastVote, Labels

    stage = collect_stage(rater="person", person={"kind": kind, "poll_seconds": 0.05})
    del stage["reward"]
    pipeline = small(tmp_path, rounds=1, truth=None, each_round={"answers": stage})

    def interrupted() -> None:
        threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    interrupted()
    with pytest.raises(
        Stopped, match=r"waiting for votes: stopped in stage round-1-answers; resume with: tether resume"
    ):
        run_pipeline(pipeline, json_output=False)
    with open_workspace(tmp_path) as opened:
        labels = Labels(opened)
        (queue,) = labels.queues(labels.owner())
        assert queue["name"] == "p/round-1-answers" and queue["kind"] == kind and queue["items"] >= 8
        for number, item in enumerate(labels.items(queue["id"])):
            count = len(item.answers)
            choice = "right" if kind == "pair" else list(range(count))[::-1]
            labels.vote(labels.owner(), CastVote(f"v{number}", item.id, list(range(count)), choice, 1.0))
    assert resume_pipeline(tmp_path / "p", json_output=False) == 0
    with open_workspace(tmp_path) as opened:
        assert len(Labels(opened).queues(Labels(opened).owner())) == 1, "resuming makes no second queue"
    root = tmp_path / "p" / "round-1-answers"
    records = lines(root / "train.jsonl") + lines(root / "held_out.jsonl")
    assert len(records) == queue["items"]
    if kind == "pair":
        assert all(sorted(record["ranks"]) == [0, 1] for record in records)


def test_the_file_of_a_stage_with_people_needs_no_more_than_its_kind(tmp_path: Path):
    file = tmp_path / "p.yaml"
    file.write_text("policy: tiny-bytes\neach_round: {a: {method: collect, rater: person, person: {kind: ranking}}}\n")
    assert load_pipeline(str(file)).each_round[0].settings.person.kind == "ranking"
