"""A reward over HTTP, against servers that misbehave: what fails is masked and counted, on time."""

import threading
import time
from functools import partial

import fault_server as faults
import pytest
from fault_server import FaultServer
from rollout_factory import rollout_of

from tether.config.rewards import RemotePart
from tether.errors import ConfigError
from tether.rewards.remote import RemoteReward, read_scores, token_from
from tether.rewards.scoring import part_metrics

TIMEOUT, PATIENT = 0.4, 60.0  # seconds, for servers that never end their answer and for those that do
ROLLOUTS = [rollout_of(f"answer {n}", "a") for n in range(4)]


def remote(url: str, sleeps: list[float] | None = None, **settings) -> RemoteReward:
    part = RemotePart(kind="remote", url=url, **({"timeout_seconds": PATIENT, "retries": 0} | settings))
    return RemoteReward(part, token="secret", seed=0, sleep=(sleeps if sleeps is not None else []).append)


def outcome(behave, **settings) -> tuple[list[str], int]:
    """("ok" or the reason) for each rollout, and how many requests were made."""
    with FaultServer(behave) as server:
        scores = remote(server.url, **({"max_response_bytes": 100_000} | settings))(ROLLOUTS)
        said = ["ok" if score.valid else next(iter(score.parts)).removeprefix("failed/") for score in scores]
        return said, len(server.requests)


@pytest.mark.parametrize(
    ("behave", "said", "requests"),
    [
        (faults.Request.score, ["ok"] * 4, 1),
        (faults.hang, ["timeout"] * 4, 2),
        (faults.drip_headers, ["timeout"] * 4, 2),
        (faults.drip_body, ["timeout"] * 4, 2),
        (faults.answer_500, ["status_500"] * 4, 2),
        (faults.answer_400, ["status_400"] * 4, 1),
        (faults.redirect, ["redirect"] * 4, 1),
        (faults.close, ["connection"] * 4, 2),
        (faults.close_early, ["connection"] * 4, 2),
        (faults.not_json, ["not_json"] * 4, 1),
        (faults.wrong_shape, ["wrong_shape"] * 4, 1),
        (faults.too_large, ["too_large"] * 4, 1),
        (faults.too_large_and_unannounced, ["too_large"] * 4, 1),
        (faults.too_few, ["ok", "ok", "ok", "missing"], 1),
        (faults.too_many, ["ok"] * 4, 1),
        (faults.twice, ["duplicate", "ok", "ok", "ok"], 1),
        (lambda request: request.score(float("nan"), 1.0), ["not_finite", "ok"] * 2, 1),
        (lambda request: request.score(float("inf"), 10**400), ["not_finite"] * 4, 1),
        (lambda request: request.score("1.0", True), ["not_a_number"] * 4, 1),
        (lambda request: request.score(None, 2), ["refused", "ok"] * 2, 1),
        (lambda request: request.score([1.0], {"x": 1}), ["not_a_number"] * 4, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_fails_is_masked_with_its_reason(behave, said, requests):
    cut_off = said[0] == "timeout"
    assert outcome(behave, retries=1, timeout_seconds=TIMEOUT if cut_off else PATIENT) == (said, requests)


def test_requests_are_under_way_at_the_same_time_and_scores_keep_their_order():
    most, meeting = threading.Semaphore(3), threading.Barrier(3)  # passed by three at a time only

    def behave(request):
        assert most.acquire(blocking=False), "more requests at once than concurrency allows"
        meeting.wait(30)
        most.release()
        if request.items[0]["id"] == "6":
            faults.answer_400(request)
        else:
            request.score(*(float(item["completion"]) for item in request.items))

    rollouts = [rollout_of(str(n)) for n in range(12)]
    with FaultServer(behave) as server:
        scores = remote(server.url, batch_size=1, concurrency=3)(rollouts)
    assert [score.value for score in scores if score.valid] == [n for n in range(12) if n != 6]
    assert scores[6].parts == {"failed/status_400": 1.0}


def test_no_server_at_all():
    scores = remote("http://127.0.0.1:9/", retries=1)(ROLLOUTS)
    assert [list(score.parts) for score in scores] == [["failed/connection"]] * 4


def test_a_server_that_recovers_is_asked_again():
    sleeps: list[float] = []

    def behave(request):
        [faults.answer_500, faults.close, faults.Request.score][request.number](request)

    with FaultServer(behave) as server:
        scores = remote(server.url, sleeps, retries=2, backoff_seconds=1.0)(ROLLOUTS)
    assert [score.value for score in scores] == [1.0] * 4 and all(score.valid for score in scores)
    assert len(sleeps) == 2 and 0.5 <= sleeps[0] < 1.5 and 1.0 <= sleeps[1] < 3.0, "doubled, and spread"


def test_the_waits_follow_the_seed():
    part = RemotePart(kind="remote", url="http://x/", backoff_seconds=0.5)
    waits = [[RemoteReward(part, token=None, seed=seed).wait(0, n) for n in range(12)] for seed in (0, 0, 1)]
    assert waits[0] == waits[1] != waits[2]
    assert max(waits[0]) <= 60


def test_one_failed_batch_leaves_the_others():
    def behave(request):
        (faults.not_json if request.items[0]["id"] == "0" else faults.Request.score)(request)

    said, requests = outcome(behave, batch_size=2)
    assert said == ["not_json", "not_json", "ok", "ok"] and requests == 2


def test_the_request_is_the_protocol():
    with FaultServer(faults.Request.score) as server:
        remote(server.url, batch_size=3, concurrency=1)(ROLLOUTS)
        first, second = server.requests
    assert first.headers.startswith("POST /score HTTP/1.1") and "Authorization: Bearer secret" in first.headers
    assert [item["id"] for item in first.items + second.items] == ["0", "1", "2", "3"]
    assert first.items[0] == {
        "id": "0",
        "prompt": "question",
        "messages": [{"role": "user", "content": "question"}],
        "completion": "answer 0",
        "answer": "a",
        "finish": "stop",
    }


def test_no_thread_outlives_its_deadline_for_long():
    with FaultServer(faults.drip_body) as server:
        remote(server.url, timeout_seconds=TIMEOUT)(ROLLOUTS[:1])
        for _ in range(400):
            if not any(thread.name == "tether-reward-request" for thread in threading.enumerate()):
                return
            time.sleep(0.02)
    raise AssertionError("the cut exchange still runs")


def test_failures_are_counted_for_the_metrics():
    with FaultServer(partial(faults.Request.score)) as server:
        server.behave = lambda request: request.score(float("nan"), 3.0)
        scores = remote(server.url)(ROLLOUTS)
    assert part_metrics(scores) == {"reward/failed": 2.0, "reward/failed/not_finite": 2.0}


@pytest.mark.parametrize("answer", [b"null", b"3", b"[]", b'{"scores": 3}', b'{"scores": [3]}', b'{"score": []}'])
def test_any_shape_is_read_without_raising(answer: bytes):
    assert [list(score.parts) for score in read_scores(answer, ["a"])] == [["failed/wrong_shape"]]


def test_deep_nesting_and_long_numbers_are_not_json():
    for answer in (b"[" * 100_000, b'{"scores": ' + b"1" * 5000 + b"}", b"\xff"):
        assert [list(score.parts) for score in read_scores(answer, ["a"])] == [["failed/not_json"]]


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_TOKEN", " abc\n")
    assert token_from("SOME_TOKEN") == "abc" and token_from(None) is None
    monkeypatch.setenv("SOME_TOKEN", "a\nb")
    with pytest.raises(ConfigError, match="characters"):
        token_from("SOME_TOKEN")
    monkeypatch.delenv("SOME_TOKEN")
    with pytest.raises(ConfigError, match="export SOME_TOKEN"):
        token_from("SOME_TOKEN")
