"""Raters who all vote at once, in their own process; benchmarks/studio.py starts it.

Each requests an item, votes, requests the next one, and pauses for a second: faster than people, and in lockstep, so
that twenty votes arrive together. A vote's time is from the request to its complete response. The time of `/api/me`,
which uses no database, is measured the same way: it is the cost of the round trip.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

PAUSE = 1.0


class Rater:
    """One open connection. It uses plain sockets, because twenty HTTP libraries would measure themselves."""

    def __init__(self, address: str, token: str) -> None:
        parts = urlsplit(address)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[Any, float]:
        """The response, and its seconds."""
        sent = None if body is None else json.dumps(body).encode()
        begun = time.perf_counter()
        self._connection.request(method, path, body=sent, headers=self._headers)
        reply = self._connection.getresponse()
        text = reply.read()
        taken = time.perf_counter() - begun
        if reply.status != 200:
            raise RuntimeError(f"{method} {path}: {reply.status} {text[:200]!r}")
        return json.loads(text), taken


def rate(address: str, seconds: float, queue: int, tokens: list[str]) -> dict[str, list[float]]:
    """The seconds of all votes, next items and `/api/me` requests."""
    taken: dict[str, list[float]] = {"vote": [], "next": [], "me": []}
    together = threading.Barrier(len(tokens))
    ends = time.monotonic() + seconds

    def one(token: str) -> None:
        rater = Rater(address, token)
        while time.monotonic() < ends:
            together.wait()
            taken["me"].append(rater.ask("GET", "/api/me")[1])
            together.wait()
            told, waited = rater.ask("GET", f"/api/label/queues/{queue}/next")
            taken["next"].append(waited)
            item = told["item"]
            vote = {"client_uid": uuid.uuid4().hex, "item_id": item["id"], "order": item["order"], "choice": "left"}
            together.wait()
            taken["vote"].append(rater.ask("POST", "/api/label/votes", vote)[1])
            rater.ask("GET", f"/api/label/queues/{queue}/next")  # while other raters' votes are in progress
            time.sleep(PAUSE)
        together.abort()

    threads = [threading.Thread(target=_until_broken, args=(one, token)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def _until_broken(work: Any, token: str) -> None:
    """Run one rater; the first one whose time is up also releases the others."""
    try:
        work(token)
    except threading.BrokenBarrierError:
        return


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(rate(sys.argv[1], float(sys.argv[2]), asked["queue"], asked["tokens"])))
