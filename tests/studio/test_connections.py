"""Connections: so many, for so long, and few words in the log."""

import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx
import pytest
import uvicorn
from studio_clients import TOKEN, Clients, settings

from tether.rate_limit import Rate
from tether.server.serve import listen
from tether.store.database.open import workspace_at
from tether.studio import replies
from tether.studio.app import create_app
from tether.studio.connections import SparingFilter, connection_limit, http_options, limited_protocol
from tether.studio.people import Streams
from tether.studio.replies import MAX_ELEMENTS, loads_in_steps

HEAD = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n"


async def echo(scope, receive, send) -> None:
    """Reads the body, and answers: to /big with more than a connection holds."""
    assert scope["type"] == "http"
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    body = b"x" * (64 << 20) if scope["path"] == "/big" else b"ok"
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(app=echo, most: int = 20, **seconds: float) -> Iterator[tuple[str, int]]:
    """An app behind the limits, in a thread."""
    listening = listen("127.0.0.1", 0)
    given = http_options() | {"http": limited_protocol(most, **seconds), "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", **given))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    listening.listen(1000)
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


def is_closed(connection: socket.socket, within: float = 30.0) -> bool:
    connection.settimeout(within)
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"", b""),  # a connection and no word
        (b"GET / HTTP/1.1\r\nHost: ", b"a"),  # a head that never ends
        (HEAD, b"a"),  # a body that comes too slowly
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"G"),  # the second request of a connection
    ],
)
def test_whoever_takes_too_long_is_hung_up_on(first, drip):
    with serving(header_seconds=0.4, body_seconds=0.4) as address, socket.create_connection(address) as connection:
        connection.sendall(first)
        started = time.monotonic()
        while time.monotonic() - started < 0.9:
            time.sleep(0.1)
            try:
                connection.sendall(drip)
            except OSError:
                break
        assert is_closed(connection)


@pytest.mark.parametrize("takes", [False, True])
def test_whoever_takes_nothing_of_an_answer_is_hung_up_on(takes):
    with serving(take_seconds=0.6) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET /big HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        connection.settimeout(5)
        taken = 0
        for _ in range(30):
            time.sleep(0.1)
            taken += len(connection.recv(1 << 20)) if takes else 0
        with suppress(ConnectionError):
            while got := connection.recv(1 << 20):
                taken += len(got)
        assert (taken >= 64 << 20) == takes


def test_a_long_body_that_comes_slowly_is_given_time():
    with serving(body_seconds=0.8, body_bytes=50) as address, socket.create_connection(address) as connection:
        connection.sendall(HEAD.replace(b"10", b"1000"))
        for _ in range(10):
            time.sleep(0.15)
            connection.sendall(b"x" * 100)
        connection.settimeout(5)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def exchange(address, data: bytes) -> bytes:
    with socket.create_connection(address, timeout=5) as connection:
        connection.sendall(data)
        got = b""
        with suppress(ConnectionError):
            while chunk := connection.recv(65536):
                got += chunk
        return got


def test_heads_are_short_and_one_request_comes_at_a_time():
    line, many = b"GET / HTTP/1.1\r\nHost: a\r\n", b"X: y\r\n" * 20_000
    with serving() as address:
        assert exchange(address, line + many + b"\r\n").startswith(b"HTTP/1.1 400")
        assert exchange(address, line + b"X: " + b"y" * 100_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 400")
        got = exchange(address, (line + b"\r\n") * 2 + line + many + b"\r\n")
        assert got.count(b"HTTP/1.1") == 1 and got.startswith(b"HTTP/1.1 200")
        with httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:  # one connection, one after another
            assert {client.post("/", content=b"\n" * 50_000).text for _ in range(20)} == {"ok"}


def test_half_open_connections_push_each_other_out():
    with serving(most=20) as address:
        held = [socket.create_connection(address) for _ in range(100)]
        for one in held:
            one.sendall(b"GET / HT")
        for _ in range(5):
            assert httpx.post(f"http://{address[0]}:{address[1]}/", content=b"hello", timeout=5).text == "ok"
        assert all(is_closed(one, 1) for one in held[:70])
        for one in held:
            one.close()


def test_a_request_that_is_being_answered_is_not_pushed_out():
    started, go = threading.Event(), threading.Event()

    async def slow(scope, receive, send) -> None:
        import asyncio

        started.set()
        while not go.is_set():
            await asyncio.sleep(0.01)
        await echo(scope, receive, send)

    with serving(slow, most=10) as address:
        answers = []
        url = f"http://{address[0]}:{address[1]}/"
        asking = threading.Thread(target=lambda: answers.append(httpx.get(url, timeout=10).text))
        asking.start()
        assert started.wait(5)
        held = [socket.create_connection(address) for _ in range(50)]
        time.sleep(0.2)
        go.set()
        asking.join()
        assert answers == ["ok"]
        for one in held:
            one.close()


def test_there_are_always_files_left(monkeypatch):
    limits = {"now": (256, 256)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, now: limits.update(now=now))
    assert connection_limit() + 64 <= 256 and limits["now"] == (256, 256)
    limits["now"] = (256, 100_000)
    assert connection_limit() == 1000 and limits["now"] == (4096, 100_000)


def test_the_log_has_a_few_lines_of_each_kind():
    seen = []
    logger = logging.getLogger("test.sparing")
    logger.propagate = False
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger.addHandler(handler)
    sparing = SparingFilter(Rate(1e-6, 3))
    logger.addFilter(sparing)
    for n in range(500):
        logger.warning("Invalid HTTP request received.")
        logger.error("socket.accept() out of system resource and much more that differs: %d", n)
    assert len(seen) == 6
    logger.warning("another kind")
    assert seen[-1] == "another kind (994 more lines like this and others were left out)"


# -- streams ----------------------------------------------------------------------------------------------------------


def test_streams_are_counted_from_the_moment_they_are_asked_for(tmp_path):
    app = create_app(workspace_at(tmp_path), settings(heartbeat_seconds=0.05, poll_seconds=0.02))
    with serving(app, most=200) as address:
        told, enough, go = [], threading.Barrier(31), threading.Event()

        def listen_in() -> None:
            headers = {"authorization": f"Bearer {TOKEN}"}
            with httpx.stream(
                "GET", f"http://{address[0]}:{address[1]}/api/stream", headers=headers, timeout=20
            ) as reply:
                told.append(reply.status_code)
                enough.wait(20)
                go.wait(20)

        threads = [threading.Thread(target=listen_in) for _ in range(30)]
        for thread in threads:
            thread.start()
        enough.wait(20)
        assert (told.count(200), told.count(429)) == (12, 18)
        go.set()
        for thread in threads:
            thread.join()
        streams: Streams = app.state.studio.streams
        deadline = time.monotonic() + 5
        while streams._open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not streams._open, "every place is left"


def test_a_stream_that_is_refused_leaves_its_place(plain: Clients):
    for _ in range(30):
        assert plain.owner.get("/api/stream?run=77").status_code == 404
    assert not plain.app.state.studio.streams._open


def test_a_stream_ends_when_its_listener_is_revoked(tmp_path):
    app = create_app(workspace_at(tmp_path), settings(heartbeat_seconds=0.05, poll_seconds=0.02))
    clients = Clients(app)
    made = clients.owner.post("/api/raters", json={"name": "second", "role": "owner"}).json()
    with serving(app) as address:
        headers = {"authorization": f"Bearer {made['token']}"}
        with httpx.stream("GET", f"http://{address[0]}:{address[1]}/api/stream", headers=headers, timeout=5) as reply:
            lines = reply.iter_lines()
            assert next(lines) == "retry: 1000"
            clients.owner.post(f"/api/raters/{made['id']}/revoke")
            assert all(True for _ in lines), "it ends"


# -- long bodies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *(
            '{"a": [1, 2, {"b": [3]}], "c": "\\u00e9\\ud800", "a2": [], "d": {}}',
            "{}",
            " { } ",
            "[]",
            "[1]",
            "3",
            '"x"',
        ),
        *('{"a": 1, "a": 2}', '{"a": [1,\n2 ] , "b":null}', "null", '{"a": NaN}', "\ufeff{}", '{"a": 1e400}'),
        *("", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,', '{"a":1,}', '{"a":[', '{"a":[1', '{"a":[1,', '{"a":[1,]}'),
        *("{1:2}", '{"a" 1}', "[1] 2", "{} x", "nul", '{"a": [1 2]}', '{"a": [01]}', "{'a': 1}", '{"a":"\n"}'),
    ],
)
def test_json_in_steps_is_json(text):
    def outcome(read):
        try:
            return repr(read(text.encode("utf-8", "surrogatepass")))
        except ValueError:
            return "no JSON"

    assert outcome(loads_in_steps) == outcome(json.loads)


def test_a_long_body_holds_no_one_up(plain: Clients, monkeypatch):
    """It is read beside the event loop, and in steps that are short, for each keeps Python's lock."""
    queue = plain.queue()
    body = json.dumps({"records": [{"prompt": "q", "chosen": "a", "rejected": "b"}] * MAX_ELEMENTS * 2}).encode()
    reading, answered, steps = threading.Event(), threading.Event(), []

    class Decoder(json.JSONDecoder):
        def raw_decode(self, s, idx=0):
            found, end = super().raw_decode(s, idx)
            steps.append(end - idx)
            return found, end

    def watched(body: bytes):
        reading.set()
        assert answered.wait(60), "no one else was answered"
        return loads_in_steps(body)

    monkeypatch.setattr(replies, "_decoder", Decoder())
    monkeypatch.setattr(replies, "loads_in_steps", watched)
    with serving(plain.app, most=100) as address:
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        url, path = f"http://{address[0]}:{address[1]}", f"/api/label/queues/{queue}/import"
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            posted = pool.submit(client.post, path, content=body)
            assert reading.wait(60)
            assert client.get("/api/me").status_code == 200 and not posted.done()
            answered.set()
            reply = posted.result()
    assert reply.status_code == 413 and "in parts" in reply.json()["error"]
    assert max(steps) < 1000 and len(steps) >= MAX_ELEMENTS


def test_an_annotator_sends_short_bodies(plain: Clients):
    annotator = plain.annotator()
    for content in (b"x" * (2 << 20), (b"x" * 100_000 for _ in range(20))):
        assert annotator.post("/api/label/votes", content=content).status_code in (400, 413)
