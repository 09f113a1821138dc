"""Raters who all vote at once, in a process of their own; benchmarks/studio.py starts it.

Each asks for an item, votes, looks at the next one, and pauses for a second: quicker than people, and in step with each
other, so that twenty votes arrive together. A vote's time is from the request to its whole answer. Beside it stands the
time of `/api/me` asked in the same way, which touches no database: what is left of it is the way there and back.
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
    """One connection, kept open. Plain sockets: twenty clients with a library each would measure themselves."""

    def __init__(self, address: str, token: str) -> None:
        parts = urlsplit(address)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[Any, float]:
        """The answer, and the seconds that it took."""
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
    """All the seconds that votes, next items and `/api/me` took."""
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
            rater.ask("GET", f"/api/label/queues/{queue}/next")  # while others' votes are still on their way
            time.sleep(PAUSE)
        together.abort()

    threads = [threading.Thread(target=_until_broken, args=(one, token)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def _until_broken(work: Any, token: str) -> None:
    """The first rater whose time is up ends the others' waiting too."""
    try:
        work(token)
    except threading.BrokenBarrierError:
        return


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(rate(sys.argv[1], float(sys.argv[2]), asked["queue"], asked["tokens"])))
