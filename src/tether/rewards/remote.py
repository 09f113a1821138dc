"""A reward model behind HTTP. What it cannot score is masked and counted by reason, never treated as zero.

The protocol, version 1 (docs/rewards.md): POST `{"version": 1, "items": [{"id", "prompt", "messages", "completion",
"answer", "finish"}]}`, answered by `{"scores": [{"id", "value"}]}` in any order, with `"value": null` and an `"error"`
for an item that cannot be scored.

Every request has one deadline for name lookup, connection, headers and body. A socket's own timeout restarts with every
byte, so a slow server could block a run forever. The exchange therefore runs in its own thread, and its socket is shut
down at the deadline.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from tether import __version__
from tether.config.rewards import RemotePart
from tether.errors import ConfigError
from tether.redact import remember_secret
from tether.rewards.pool import in_order
from tether.rewards.scoring import failed
from tether.seeds import derive_seed
from tether.types import Rollout, Score

CHUNK = 65_536


class PostError(Exception):
    """Why there is no answer, in one word; and whether a retry may help."""

    def __init__(self, reason: str, *, retriable: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retriable = retriable


def post_json(url: str, body: bytes, *, token: str | None, timeout_seconds: float, max_bytes: int) -> bytes:
    """The body of a 200 response. Raises PostError for anything else.

    Retriable: timeout, connection (refused, reset, or closed before the response was complete), status_5xx. Not
    retriable: redirect (never followed), any other status, too_large (the rest is not read). No proxy is used.
    """
    exchange = _Exchange(url, body, token, timeout_seconds, max_bytes)
    exchange.start()
    exchange.join(timeout_seconds)
    if exchange.is_alive():
        exchange.cut()
        raise PostError("timeout", retriable=True)
    if isinstance(exchange.outcome, bytes):
        return exchange.outcome
    raise exchange.outcome


class _Exchange(threading.Thread):
    """The request and its response; `outcome` is set when the thread ends."""

    def __init__(self, url: str, body: bytes, token: str | None, timeout_seconds: float, max_bytes: int) -> None:
        super().__init__(daemon=True, name="tether-reward-request")
        self.url, self.body, self.token = url, body, token
        self.timeout_seconds, self.max_bytes = timeout_seconds, max_bytes
        self.socket: socket.socket | None = None
        self.is_cut = False
        self.outcome: bytes | PostError = PostError("connection", retriable=True)

    def run(self) -> None:
        """Send the request and store the outcome."""
        try:
            self.outcome = self._talk()
        except PostError as error:
            self.outcome = error
        except TimeoutError:
            self.outcome = PostError("timeout", retriable=True)
        except (OSError, http.client.HTTPException, ValueError):
            self.outcome = PostError("connection", retriable=True)

    def cut(self) -> None:
        """Abort the exchange from another thread: its blocking call fails at once."""
        self.is_cut = True
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def _talk(self) -> bytes:
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "checked by the recipe"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout_seconds)
        try:
            connection.connect()
            self.socket = connection.sock
            if self.is_cut:
                raise TimeoutError
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", path, self.body, self._headers())
            response = connection.getresponse()
            _check_status(response.status)
            return self._read(response)
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Connection": "close",
            "User-Agent": f"tether/{__version__}",
        }
        return headers | ({"Authorization": f"Bearer {self.token}"} if self.token else {})

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if (response.length or 0) > self.max_bytes:
            raise PostError("too_large")
        read = bytearray()
        while chunk := response.read(CHUNK):
            read += chunk
            if len(read) > self.max_bytes:
                raise PostError("too_large")
        if response.length:  # the server announced more bytes than it sent
            raise PostError("connection", retriable=True)
        return bytes(read)


def _check_status(status: int) -> None:
    if 300 <= status < 400:
        raise PostError("redirect")
    if status != http.client.OK:
        raise PostError(f"status_{status}", retriable=status >= 500)


VERSION = 1
MAX_WAIT = 60.0  # seconds before a retry


class RemoteReward:
    """Posts rollouts in batches, several at the same time; retries a batch with growing waits where that may help."""

    def __init__(
        self, part: RemotePart, *, token: str | None, seed: int, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.part = part
        self.token = token
        self.seed = seed
        self.sleep = sleep

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout."""
        starts = range(0, len(rollouts), self.part.batch_size)
        batches = in_order(
            lambda start: self._batch(start, rollouts[start : start + self.part.batch_size]),
            starts,
            self.part.concurrency,
        )
        return [score for batch in batches for score in batch]

    def _batch(self, start: int, rollouts: Sequence[Rollout]) -> list[Score]:
        ids = [str(start + place) for place in range(len(rollouts))]
        body = json.dumps({"version": VERSION, "items": list(map(item, ids, rollouts))}).encode()
        for attempt in range(self.part.retries + 1):
            try:
                answer = post_json(
                    self.part.url,
                    body,
                    token=self.token,
                    timeout_seconds=self.part.timeout_seconds,
                    max_bytes=self.part.max_response_bytes,
                )
                return read_scores(answer, ids)
            except PostError as error:
                if not error.retriable or attempt == self.part.retries:
                    return [failed(error.reason)] * len(rollouts)
                self.sleep(self.wait(start, attempt))
        raise AssertionError("the last attempt returns")

    def wait(self, start: int, attempt: int) -> float:
        """Seconds before the next attempt: doubled each time, with a random factor of 0.5 to 1.5."""
        spread = 0.5 + random.Random(derive_seed(self.seed, "backoff", start, attempt)).random()  # noqa: S311
        return min(self.part.backoff_seconds * 2**attempt * spread, MAX_WAIT)


def item(id: str, rollout: Rollout) -> dict[str, Any]:
    """The JSON of one rollout for the server."""
    return {
        "id": id,
        "prompt": rollout.prompt.messages[-1]["content"],
        "messages": [dict(message) for message in rollout.prompt.messages],
        "completion": rollout.completion,
        "answer": rollout.prompt.answer,
        "finish": rollout.finish,
    }


def read_scores(answer: bytes, ids: Sequence[str]) -> list[Score]:
    """The scores by id. A faulty item fails alone; an unreadable response fails all items.

    Scores for unknown ids are ignored.
    """
    try:
        scores = json.loads(answer)["scores"]
    except (ValueError, RecursionError):
        return [failed("not_json")] * len(ids)
    except (TypeError, KeyError, IndexError):
        return [failed("wrong_shape")] * len(ids)
    if not isinstance(scores, list) or not all(isinstance(score, dict) for score in scores):
        return [failed("wrong_shape")] * len(ids)
    values = {score["id"]: score.get("value") for score in scores if isinstance(score.get("id"), str)}
    times = Counter(score["id"] for score in scores if isinstance(score.get("id"), str))
    return [_score(values.get(id), times[id]) for id in ids]


def _score(value: Any, times: int) -> Score:
    if times != 1:
        return failed("missing" if times == 0 else "duplicate")
    if value is None:
        return failed("refused")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return failed("not_a_number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return Score(number) if math.isfinite(number) else failed("not_finite")


def token_from(variable: str | None) -> str | None:
    """The bearer token in an environment variable; None where no variable is named."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"reward.parts: token_env names {variable}, which is not set: export {variable}=...")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"reward.parts: the token in {variable} has characters that an HTTP header cannot contain")
    remember_secret(token)
    return token
