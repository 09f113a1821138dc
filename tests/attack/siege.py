"""A Studio under attack: its server in a process, its database, a queue, and all votes that were acknowledged."""

import json
import resource
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import httpx

sys.path += [str(Path(__file__).parents[1] / name) for name in ("studio", "runs")]

from live_server import LiveServer
from own_postgres import OwnPostgres
from studio_clients import pairs

__all__ = ["OwnPostgres", "Siege"]

ITEMS = 400


class Siege:
    """One server. `kept` holds what it acknowledged: client_uid -> id of the vote."""

    def __init__(self, folder: Path, url: str | None = None, *, files: int | None = None, variables=None) -> None:
        self.folder, self.url = folder, url
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "server.log"
        few = (
            {} if files is None else {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))}
        )
        with self.log.open("wb") as log:
            self.server = LiveServer(folder / "runs", url, variables=variables, stderr=log, **few)
        try:
            self._prepare()
        except BaseException:
            self.server.__exit__()
            raise

    def _prepare(self) -> None:
        self.owner = self.server.client
        self.kept: dict[str, int] = {}
        self.queue = self.owner.post("/api/label/queues", json={"name": "q"}).json()["id"]
        body = {"from": "file", "records": pairs(ITEMS)}
        filled = self.owner.post(f"/api/label/queues/{self.queue}/fill", json=body)
        while filled.status_code == 202 or filled.json().get("state") == "running":
            time.sleep(0.05)
            filled = self.owner.get(f"/api/label/imports/{filled.json()['id']}")
        assert filled.status_code == 200, filled.text
        self.rater = self.client(self.owner.post("/api/raters", json={"name": "ann"}).json()["token"])

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.told["address"].removeprefix("http://").rpartition(":")
        return host, int(port)

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.server.told["address"], headers=headers, timeout=30.0)

    def vote(self) -> httpx.Response:
        """A vote; where it is acknowledged, it is in `kept`."""
        asked = self.rater.get(f"/api/label/queues/{self.queue}/next")
        if asked.status_code != 200:
            return asked
        item = asked.json()["item"]
        body = {"client_uid": uuid.uuid4().hex, "item_id": item["id"], "order": item["order"], "choice": "left"}
        reply = self.rater.post("/api/label/votes", json=body)
        if reply.status_code == 200:
            self.kept[body["client_uid"]] = reply.json()["id"]
        return reply

    def votes_until_well(self, seconds: float = 20.0) -> None:
        """It answers again by itself, and meanwhile with 503 and a sentence."""
        deadline = time.monotonic() + seconds
        while (reply := self.vote()).status_code != 200:
            assert reply.status_code == 503 and reply.json()["error"], reply.text
            assert time.monotonic() < deadline, "it does not get well"
            time.sleep(0.2)

    def lost(self) -> set[int]:
        """Votes that were acknowledged and are not there, by a look at all that is exported."""
        text = self.owner.get(f"/api/label/queues/{self.queue}/export?format=votes").text
        there = [vote for line in text.splitlines() for vote in json.loads(line)["votes"]]
        assert len(there) == len(set(there)), "none is doubled"
        return set(self.kept.values()) - set(there)

    def is_well(self) -> None:
        """Strangers, the owner and raters are answered, soon."""
        started = time.monotonic()
        with self.client() as stranger:
            assert stranger.get("/").status_code in (401, 429)
        assert self.owner.get("/api/me").status_code == 200 and self.vote().status_code == 200
        assert time.monotonic() - started < 5.0

    def raw(self, data: bytes, seconds: float = 5.0) -> bytes:
        """What comes back on a connection of its own."""
        with socket.create_connection(self.address, timeout=seconds) as connection:
            got = b""
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(65536):
                    got += chunk
            except OSError:
                pass
            return got

    def half_open(self, count: int, data: bytes) -> list[socket.socket]:
        """Connections that send this and wait; those that the server hangs up on stay in the list."""
        held = []
        for _ in range(count):
            connection = socket.create_connection(self.address, timeout=10)
            with suppress(OSError):
                connection.sendall(data)
            held.append(connection)
        return held

    def at_once(self, work, count: int) -> list:
        """The results of so many threads."""
        found = []
        threads = [threading.Thread(target=lambda n=n: found.append(work(n))) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def close(self) -> None:
        self.rater.close()
        self.server.__exit__()

    def __enter__(self) -> "Siege":
        return self

    def __exit__(self, *_) -> None:
        self.close()
