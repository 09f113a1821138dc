"""Rubbish at the ports of `tether serve` and `tether serve-reward`: refused, and the next one is answered."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from raw_requests import RAW
from starlette.responses import PlainTextResponse

from tether.rewards.server import RewardServer, build_service
from tether.server.app import TokenGate
from tether.server.serve import listen
from tether.studio.connections import http_options
from tether.studio.settings import StudioSettings

TOKEN = "a-token-of-the-tests-1234"
UNKNOWN = (501, 505)  # a method, or a version of HTTP, that a server does not know


@pytest.fixture(scope="module")
def serve() -> Iterator[tuple[str, int]]:
    """The gate and the connections of `tether serve`, without a model."""
    listening = listen("127.0.0.1", 0)
    app = TokenGate(PlainTextResponse("in"), StudioSettings(owner_token=TOKEN))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", **http_options()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listening.getsockname()
    server.should_exit = True
    thread.join(10)
    listening.close()


@pytest.fixture(scope="module")
def reward() -> Iterator[tuple[str, int]]:
    server = RewardServer(build_service("ended"), host="127.0.0.1", port=0, token=TOKEN)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    with server:
        yield server.server_address[:2]
        server.shutdown()
    thread.join(5)


def send(address: tuple[str, int], data: bytes) -> bytes:
    with socket.create_connection(address, timeout=5) as connection:
        got = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                got += chunk
        except OSError:
            pass
        return got


def request(path: str, body: bytes = b"") -> bytes:
    method = "POST" if body else "GET"
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def refused(got: bytes) -> None:
    statuses = [int(line.split()[1]) for line in got.split(b"\r\n") if line.startswith((b"HTTP/1.1 ", b"HTTP/1.0 "))]
    assert all(400 <= status < 500 or status in UNKNOWN for status in statuses), got[:300]
    assert b"Traceback" not in got and b'"scores"' not in got


@pytest.mark.parametrize("name", RAW, ids=lambda name: name.replace(" ", "-"))
def test_at_tether_serve(serve: tuple[str, int], name: str):
    refused(send(serve, RAW[name]))
    assert send(serve, request("/v1/models")).endswith(b"in")


@pytest.mark.parametrize("name", RAW, ids=lambda name: name.replace(" ", "-"))
def test_at_a_reward_server(reward: tuple[str, int], name: str):
    refused(send(reward, RAW[name]))
    assert b'"status": "ok"' in send(reward, request("/health"))


BODIES = {
    "no JSON": b"{",
    "a list": b"[]",
    "depth": b"[" * 100_000,
    "depth in a field": b'{"version": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a long number": b'{"version": ' + b"9" * 100_000 + b"}",
    "not finite": b'{"version": NaN, "items": [Infinity]}',
    "half a character": b'{"version": 1, "items": "\\ud800"}',
    "no UTF-8": b'{"version": 1, "items": "\xff\xfe"}',
    "a zero": b'{"version": 1, "items": "\\u0000"}',
    "a key twice": b'{"version": 1, "version": 1, "items": [], "items": {}}',
    "many keys": json.dumps({f"k{n}": n for n in range(100_000)}).encode(),
    "other types": b'{"version": "1", "items": 7, "id": {}}',
    "items of rubbish": json.dumps({"version": 1, "id": "a", "items": [None, 3, "x", [], {"id": 5}]}).encode(),
    "too many items": json.dumps({"version": 1, "id": "a", "items": [{}] * 5000}).encode(),
}


@pytest.mark.parametrize("name", BODIES, ids=lambda name: name.replace(" ", "-"))
def test_a_body_of_rubbish_at_a_reward_server(reward: tuple[str, int], name: str):
    refused(send(reward, request("/score", BODIES[name])))
    assert b'"status": "ok"' in send(reward, request("/health"))


@pytest.mark.parametrize("finish", [["stop"], {"a": 1}, 5, None, True])
def test_a_finish_that_is_no_word_is_the_items_fault(finish):
    item = {"id": "a", "messages": [{"role": "user", "content": "hi"}], "completion": "x", "finish": finish}
    [score] = build_service("ended").answer(json.dumps({"version": 1, "items": [item]}).encode())["scores"]
    assert score["value"] is None and "finish must be one of" in score["error"]
