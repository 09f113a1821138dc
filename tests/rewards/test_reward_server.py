"""The reference reward server, asked by the client it was written for and by others."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rollout_factory import rollout_of

from tether import cli
from tether.config.rewards import RemotePart
from tether.errors import ConfigError
from tether.models.backbones import ScalarHead
from tether.models.load import load_causal_lm
from tether.models.scalar_models import ScalarModel
from tether.models.sharing import Separate
from tether.rate_limit import Rate, RateLimit
from tether.rewards.remote import RemoteReward
from tether.rewards.server import RewardServer, RewardService, build_service
from tether.types import Prompt, Score

TOKEN = "right"


@contextmanager
def serving(service: RewardService, **limits) -> Iterator[RewardServer]:
    server = RewardServer(service, host="127.0.0.1", port=0, token=TOKEN, **limits)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        with server:
            yield server
            server.shutdown()
    finally:
        thread.join(5)


def ask(server: RewardServer, body: object, *, token: str | None = TOKEN, path: str = "/score", method: str = "POST"):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def client(server: RewardServer, **settings) -> RemoteReward:
    part = RemotePart(kind="remote", url=server.url, timeout_seconds=10, retries=0, **settings)
    return RemoteReward(part, token=TOKEN, seed=0)


def test_a_rule_there_and_back():
    with serving(build_service("[{kind: ended}, {kind: numeric, weight: 2}]")) as server:
        rollouts = [
            rollout_of("7", "7"),
            rollout_of("7", "7", finish="length"),
            rollout_of("8", "7"),
            rollout_of("8", None),
        ]
        scores = client(server, batch_size=3)(rollouts)
        assert [score.value for score in scores[:3]] == [3.0, 2.0, 1.0]
        assert not scores[3].valid and scores[3].parts == {"failed/refused": 1.0}
        said = {"id": "a", "value": None, "error": "numeric: no_answer (1)"}
        item = {"id": "a", "prompt": "x", "completion": "8"}
        assert ask(server, {"version": 1, "items": [item]}) == (200, {"scores": [said]})


def test_a_reward_model_there_and_back(tmp_path: Path):
    policy = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=0)
    head = ScalarHead.like_output(policy.model, deviation=0.1, seed=3)
    ScalarModel(Separate(policy.model).scalar_backbone(0), head, "reward").save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    service = build_service(str(tmp_path))
    prompt = policy.tokenizer.encode("question")
    ended = rollout_of("yes", tokens=[*prompt, *policy.tokenizer.encode("yes"), policy.end_id])
    cut = rollout_of("yes", finish="length", tokens=[*prompt, *policy.tokenizer.encode("yes")])
    with serving(service) as server:
        scores = client(server)([ended, cut])
    assert [score.value for score in scores] == pytest.approx([s.value for s in service.reward([ended, cut])])
    assert torch.equal(service.rollout("x", {"prompt": "question", "completion": "yes"}, 0).token_ids, ended.token_ids)


def test_it_asks_for_the_token():
    good = {"version": 1, "items": [{"id": "a", "prompt": "x", "completion": "y"}]}
    with serving(build_service("ended")) as server:
        assert ask(server, good)[0] == 200
        for token in (None, "wrong", "righ", "right2", "\xe9"):
            assert ask(server, good, token=token) == (401, {"error": "the bearer token is missing or wrong"})
        part = RemotePart(kind="remote", url=server.url, retries=3)
        assert RemoteReward(part, token=None, seed=0)([rollout_of("x")])[0].parts == {"failed/status_401": 1.0}
        assert ask(server, b"", token=None, path="/health", method="GET") == (200, {"status": "ok", "version": 1})


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        ([], 400, '"version": 1'),
        ({"version": 2, "items": []}, 400, '"version": 1'),
        ({"version": 1, "items": []}, 400, "1 to 4096"),
        ({"version": 1, "items": [{"id": 1}]}, 400, '"id" that is text'),
        ({"version": 1, "items": [{"id": "a"}, {"id": "a"}]}, 400, "same id"),
        (b" " * 200_001, 413, "at most 200000 bytes"),
    ],
)
def test_a_request_that_makes_no_sense(body, status: int, said: str):
    with serving(build_service("ended"), max_bytes=200_000) as server:
        assert ask(server, body)[0] == status
        assert said in ask(server, body)[1]["error"]


def test_a_bad_item_fails_alone():
    items = [
        {"id": "a", "prompt": "x", "completion": "y"},
        {"id": "b", "prompt": "x", "completion": 3},
        {"id": "c", "messages": "hello", "completion": "y"},
        {"id": "d", "messages": [{"role": "user"}], "completion": "y"},
        {"id": "e", "prompt": "x", "completion": "y", "finish": "maybe"},
    ]
    with serving(build_service("ended")) as server:
        status, answer = ask(server, {"version": 1, "items": items})
    assert status == 200 and answer["scores"][0] == {"id": "a", "value": 1.0}
    errors = [score["error"] for score in answer["scores"][1:]]
    assert all(score["value"] is None for score in answer["scores"][1:])
    assert errors[:3] == [
        "completion must be text",
        "messages must be a non-empty list",
        "content must be text",
    ]


def test_other_paths_and_methods():
    with serving(build_service("ended")) as server:
        assert ask(server, b"", path="/nowhere")[0] == 404
        assert ask(server, b"", path="/nowhere", method="GET")[0] == 404
        assert ask(server, b"", method="PUT")[0] == 501


def test_a_reward_that_raises_is_a_clean_500_and_the_next_request_is_answered():
    calls = []

    def reward(rollouts):
        calls.append(len(rollouts))
        if len(calls) == 1:
            raise RuntimeError("oh")
        return [Score(1.0)] * len(rollouts)

    body = {"version": 1, "items": [{"id": "a", "prompt": "x", "completion": "y"}]}
    with serving(RewardService(reward)) as server:
        assert ask(server, body) == (500, {"error": "the reward raised RuntimeError: oh"})
        assert ask(server, body)[0] == 200


def test_requests_are_scored_one_at_a_time():
    inside, most = [0], [0]

    def reward(rollouts):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.05)
        inside[0] -= 1
        return [Score(1.0)] * len(rollouts)

    with serving(RewardService(reward)) as server:
        rewards = [client(server) for _ in range(4)]
        threads = [threading.Thread(target=ask_one, args=([rollout_of("x")],)) for ask_one in rewards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert most == [1]


def test_what_can_be_served():
    prompt = Prompt.from_text("p", "x")
    assert build_service("{kind: json, keys: [a]}").encode(prompt, "y", ended=True)[0].numel() == 0
    for target, said in [
        ("runs/nowhere", "there is no such folder"),
        ("endd", "did you mean ended?"),
        ("{kind: length}", "length needs target"),
        ("{kind: task}", "kind task needs a task"),
        ("{kind", "neither a folder nor a part"),
    ]:
        with pytest.raises(ConfigError, match=said):
            build_service(target)


def test_the_verb_serves_until_it_is_told_to_stop():
    environment = {name: value for name, value in os.environ.items() if name != "TETHER_REWARD_TOKEN"}
    command = [sys.executable, "-m", "tether", "serve-reward", "ended", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    watchdog = threading.Timer(50, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["url"].startswith("http://127.0.0.1:") and len(told["token"]) >= 24
        part = RemotePart(kind="remote", url=told["url"], timeout_seconds=10, retries=0)
        assert RemoteReward(part, token=told["token"], seed=0)([rollout_of("x")])[0].value == 1.0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(5)


def test_a_port_that_is_taken_is_wrong_usage(capsys):
    with serving(build_service("ended")) as server:
        assert cli.main(["serve-reward", "ended", "--port", str(server.server_address[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_the_welcome_shows_a_recipe_that_works(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TETHER_REWARD_TOKEN", "kept")
    monkeypatch.setattr(RewardServer, "serve_forever", lambda self: None)
    assert cli.main(["serve-reward", "ended", "--port", "0"]) == 0
    shown = capsys.readouterr().out
    assert "kept" not in shown and "token_env: TETHER_REWARD_TOKEN" in shown


def test_under_429_a_right_token_looks_like_a_wrong_one():
    with serving(build_service("ended")) as server:
        server.strangers = RateLimit(Rate(0.001, 3))
        assert {ask(server, b"x")[0] for _ in range(10)} == {400}, "right tokens take nothing away"
        assert [ask(server, b"x", token=None)[0] for _ in range(5)] == [401] * 5, "no token is no guess"
        assert [ask(server, b"x", token=f"guess {n}")[0] for n in range(4)] == [401, 401, 401, 429]
        assert ask(server, b"x") == ask(server, b"x", token="guess") and ask(server, b"x")[0] == 429


def test_half_open_connections_push_each_other_out():
    with serving(build_service("ended")) as server:
        server.max_connections = 8
        held = []
        for _ in range(60):
            held.append(socket.create_connection(server.server_address[:2], timeout=5))
            held[-1].sendall(b"POST /score HT")
        for _ in range(3):
            assert ask(server, b"", token=None, path="/health", method="GET")[0] == 200
        assert threading.active_count() < 40
        for one in held:
            one.close()


@pytest.mark.parametrize("first", [b"", b"POST /score HTTP/1.1\r\nX-A: "])
def test_a_head_that_never_ends_is_hung_up_on(first):
    with serving(build_service("ended")) as server:
        server.header_seconds = 0.3
        with socket.create_connection(server.server_address[:2], timeout=5) as connection:
            connection.sendall(first)
            assert _hung_up_on(connection, b"a" if first else b"")


def _hung_up_on(connection: socket.socket, drip: bytes, within: float = 30.0) -> bool:
    """Whether the server closes a connection that goes on sending `drip`."""
    deadline = time.monotonic() + within
    connection.settimeout(0.1)
    while time.monotonic() < deadline:
        try:
            connection.sendall(drip)
            if not connection.recv(100):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False
