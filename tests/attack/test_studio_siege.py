"""A Studio that is attacked on the network answers on, on both databases, and no acknowledged vote is lost."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from raw_requests import KEEP, RAW
from siege import OwnPostgres, Siege

MAX_LOG = 64 << 10  # bytes, over all attacks together


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def siege(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with (
        OwnPostgres() if request.param == "postgres" else nullcontext() as postgres,
        Siege(tmp_path_factory.mktemp("siege"), postgres and postgres.url) as made,
    ):
        yield made
        for _ in range(11):  # so that there is something to lose, whichever cases this worker was given
            made.votes_until_well()
        assert not made.lost() and len(made.kept) > 10
        assert made.log.stat().st_size < MAX_LOG


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    """A server that may open 256 files."""
    with Siege(tmp_path_factory.mktemp("narrow"), files=256) as made:
        yield made
        assert not made.lost() and made.log.stat().st_size < MAX_LOG


HALVES = {
    "no word": b"",
    "half a line": b"GET / HT",
    "half a head": b"GET / HTTP/1.1\r\n" + KEEP.encode() + b"X-A: ",
    "a login without its body": b"POST /api/login HTTP/1.1\r\n" + KEEP.encode() + b"Content-Length: 100\r\n\r\n{",
    "a body for no one": b"POST /api/raters HTTP/1.1\r\n" + KEEP.encode() + b"Content-Length: 9999999\r\n\r\n{",
    "chunks without end": b"POST /api/login HTTP/1.1\r\n"
    + KEEP.encode()
    + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12",
    "a second request": b"GET / HTTP/1.1\r\n" + KEEP.encode() + b"\r\nGET / H",
}


@pytest.mark.parametrize("half", HALVES, ids=lambda name: name.replace(" ", "-"))
def test_a_thousand_half_open_connections(siege: Siege, half: str):
    held = siege.half_open(1000, HALVES[half])
    try:
        for _ in range(3):
            siege.is_well()
    finally:
        for connection in held:
            connection.close()
    siege.is_well()


@pytest.mark.parametrize("half", ["no word", "half a head"], ids=lambda name: name.replace(" ", "-"))
def test_more_half_open_connections_than_files(narrow: Siege, half: str):
    held = narrow.half_open(400, HALVES[half])
    try:
        for _ in range(3):
            narrow.is_well()
    finally:
        for connection in held:
            connection.close()
    narrow.is_well()


def test_sixty_streams_at_once(siege: Siege):
    enough, done = threading.Barrier(60), threading.Event()

    def listen(_: int) -> int:
        with siege.client(siege.server.told["token"]) as client, client.stream("GET", "/api/stream") as reply:
            enough.wait(20)
            if reply.status_code == 200:
                done.wait(0.5)
            return reply.status_code

    told = siege.at_once(listen, 60)
    assert (told.count(200), told.count(429)) == (12, 48)
    siege.is_well()


def test_a_flood_of_logins_by_an_annotator(siege: Siege):
    own = siege.owner.post("/api/raters", json={"name": "flood"}).json()["token"]
    owner = siege.client()
    assert owner.post("/api/login", json={"token": siege.server.told["token"]}).status_code == 200

    def flood(_: int) -> None:
        with siege.client() as client:
            for _ in range(40):
                client.post("/api/login", json={"token": own})

    siege.at_once(flood, 6)
    assert owner.get("/api/me").json()["role"] == "owner"
    people = [one["name"] for one in siege.owner.get("/api/sessions").json()["sessions"]]
    assert people.count("flood") <= 20
    owner.close()
    siege.is_well()


@pytest.mark.parametrize("name", RAW, ids=lambda name: name.replace(" ", "-"))
def test_bytes_that_are_no_request_of_ours(narrow: Siege, name: str):
    got = narrow.raw(RAW[name])
    statuses = [int(line.split()[1]) for line in got.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    if name == "waiting for 100":  # an interim answer, which comes where the server begins to read the body
        statuses = [status for status in statuses if status != 100]
    assert all(400 <= status < 500 for status in statuses), got[:300]
    assert b"Traceback" not in got and b'"role"' not in got
    narrow.is_well()


def test_bad_requests_write_little(narrow: Siege):
    for _ in range(20):
        narrow.raw(b"\0\r\n\r\n")
    before = narrow.log.stat().st_size
    for _ in range(500):
        narrow.raw(b"\0\r\n\r\n")
    assert narrow.log.stat().st_size - before < 2000
    narrow.is_well()
