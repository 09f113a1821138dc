"""The database goes away, the disk is full, the clock moves: others are answered meanwhile, and no vote is lost."""

import os
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from siege import OwnPostgres, Siege


@pytest.mark.hang_limit(60)
@pytest.mark.parametrize("way", ["frozen", "stopped", "killed"])
def test_postgres_goes_away_and_comes_back(tmp_path: Path, way: str):
    with OwnPostgres() as postgres, Siege(tmp_path, postgres.url) as siege:
        assert siege.vote().status_code == 200
        with siege.client(siege.server.told["token"]) as client, client.stream("GET", "/api/stream") as heard:
            assert heard.status_code == 200
            {"frozen": postgres.freeze, "stopped": postgres.stop, "killed": postgres.kill}[way]()
            guesses = threading.Thread(target=lambda: siege.at_once(lambda _: _guess(siege), 12))
            guesses.start()
            time.sleep(0.3)
            _others_are_answered(siege)
            guesses.join()
            postgres.thaw() if way == "frozen" else postgres.start()
        siege.votes_until_well()
        assert siege.owner.get("/api/runs").status_code == 200
        assert not siege.lost() and len(siege.kept) >= 2


def _guess(siege: Siege) -> None:
    """A token of the right form that no one has: whose it is has to be looked up."""
    with siege.client("w" * 43) as client:
        reply = client.get("/api/me")
    assert reply.status_code == 503 and "store" not in reply.text and "database" not in reply.text


def _others_are_answered(siege: Siege) -> None:
    started = time.monotonic()
    with siege.client() as stranger:
        assert stranger.get("/api/me").status_code == 401 and stranger.get("/").status_code == 401
    assert siege.owner.get("/api/me").json()["role"] == "owner" and siege.owner.get("/js/main.js").is_success
    assert time.monotonic() - started < 4.0, "nothing of this waits for the database"
    reply = siege.owner.get("/api/runs")
    assert reply.status_code == 503 and reply.json()["error"] and time.monotonic() - started < 15.0
    assert siege.vote().status_code == 503
    started = time.monotonic()
    assert siege.owner.get("/api/runs").status_code == 503
    assert time.monotonic() - started < 10.0, "once it is known to be away, no one waits long"


def test_a_locked_sqlite_file_is_waited_for_and_no_longer(tmp_path: Path):
    with Siege(tmp_path) as siege:
        assert siege.vote().status_code == 200
        other = sqlite3.connect(tmp_path / "runs" / "tether.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        started, told = time.monotonic(), []
        voting = threading.Thread(target=lambda: told.extend(siege.at_once(lambda _: siege.vote().status_code, 6)))
        voting.start()
        assert siege.owner.get("/api/runs").status_code == 200, "who reads does not wait for who writes"
        voting.join()
        assert time.monotonic() - started < 20.0, "they wait together, and not one after the other"
        assert set(told) == {503}
        other.execute("ROLLBACK")
        other.close()
        siege.votes_until_well()
        assert not siege.lost()


# -- the disk ---------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """A file system of its own, in memory, which a server's own user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="tether-disk-", dir="/tmp"))
    folder.chmod(0o755)
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("a small disk cannot be mounted here: that needs to be root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def _fill(disk: Path) -> Path:
    """Leave no byte free."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return path


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_disk_is_full_for_a_while(tmp_path: Path, kind: str):
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk("24m" if kind == "sqlite" else "120m"))
        postgres = None
        if kind == "postgres":
            (disk / "data").mkdir()
            little = ("-c", "min_wal_size=32MB", "-c", "max_wal_size=32MB")
            postgres = stack.enter_context(OwnPostgres(disk / "data", *little))
        folder = disk / "studio" if kind == "sqlite" else tmp_path / "studio"
        siege = stack.enter_context(Siege(folder, postgres and postgres.url))
        for _ in range(5):
            assert siege.vote().status_code == 200
        filler = _fill(disk)
        told = _votes_while_full(siege)
        assert set(told) <= {200, 503} and 503 in told, told
        assert siege.owner.get("/api/me").status_code == 200
        filler.unlink()
        if postgres is not None and postgres.process.poll() is not None:  # PostgreSQL itself ends where its log is full
            postgres.start()
        siege.votes_until_well()
        assert not siege.lost()


def _votes_while_full(siege: Siege) -> list[int]:
    """Votes with long comments, until the disk that is full is noticed."""
    told = []
    for number in range(60):
        asked = siege.rater.get(f"/api/label/queues/{siege.queue}/next")
        if asked.status_code != 200:
            told.append(asked.status_code)
            break
        item = asked.json()["item"]
        body = {"client_uid": f"full-{number}", "item_id": item["id"], "order": item["order"], "choice": "left"}
        reply = siege.rater.post("/api/label/votes", json=body | {"comment": "x" * 1900})
        told.append(reply.status_code)
        if reply.status_code != 200:
            break
        siege.kept[body["client_uid"]] = reply.json()["id"]
    return told


# -- the clock --------------------------------------------------------------------------------------------------------

MOVED = """
import os, time
real, file = time.time, os.environ["MOVED_CLOCK"]
time.time = lambda: real() + float(open(file).read())
"""
"""Python reads this before anything else (sitecustomize): the wall clock of a process is moved by what a file says."""


def _moved(seconds: int, file: Path) -> None:
    file.with_suffix(".new").write_text(str(seconds))
    file.with_suffix(".new").rename(file)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_clock_is_moved(tmp_path: Path, kind: str):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(MOVED)
    clock = tmp_path / "clock"
    _moved(0, clock)
    path = f"{tmp_path / 'first'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    variables = {"PYTHONPATH": path, "MOVED_CLOCK": str(clock)}
    with (
        OwnPostgres() if kind == "postgres" else nullcontext() as postgres,
        Siege(tmp_path / "studio", postgres and postgres.url, variables=variables) as siege,
        siege.client() as browser,
    ):
        assert browser.post("/api/login", json={"token": siege.server.told["token"]}).status_code == 200
        for seconds in (86_400 * 400, -86_400 * 400, 3600, -3600, 0):
            _moved(seconds, clock)
            listed = siege.owner.get("/api/sessions").json()["sessions"]
            assert abs(listed[0]["seen"] - (time.time() + seconds)) < 60, "the server's clock is moved"
            for _ in range(3):
                assert siege.vote().status_code == 200
            assert browser.get("/api/me").status_code == 200, "no session ends early"
            undone = siege.rater.post("/api/label/votes/undo", json={"queue_id": siege.queue})
            assert undone.status_code == 200
            last = max(siege.kept, key=lambda uid: siege.kept[uid])
            assert siege.lost() == {siege.kept.pop(last)}, "the last vote is taken back, whatever the clock said then"
        assert not siege.lost() and len(siege.kept) == 10
