"""One HTTP POST with a deadline that holds for all of it: name, connection, headers and body.

A socket's own timeout starts anew with every byte, so a server that drips could hold a run for ever. The exchange
therefore runs in a thread of its own, and at the deadline its socket is shut.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from urllib.parse import urlsplit

from tether import __version__

CHUNK = 65_536


class PostError(Exception):
    """Why there is no answer, in one word; and whether asking again may help."""

    def __init__(self, reason: str, *, retriable: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retriable = retriable


def post_json(url: str, body: bytes, *, token: str | None, timeout_seconds: float, max_bytes: int) -> bytes:
    """The body of a 200 answer. Raises PostError for anything else.

    Retriable: timeout, connection (refused, reset, or closed before the answer was whole), status_5xx. Not retriable:
    redirect (never followed), any other status, too_large (the rest is not read). No proxy is used.
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
    """The request and its answer; `outcome` is set once the thread has ended."""

    def __init__(self, url: str, body: bytes, token: str | None, timeout_seconds: float, max_bytes: int) -> None:
        super().__init__(daemon=True, name="tether-reward-request")
        self.url, self.body, self.token = url, body, token
        self.timeout_seconds, self.max_bytes = timeout_seconds, max_bytes
        self.socket: socket.socket | None = None
        self.is_cut = False
        self.outcome: bytes | PostError = PostError("connection", retriable=True)

    def run(self) -> None:
        """Ask, and keep what came of it."""
        try:
            self.outcome = self._talk()
        except PostError as error:
            self.outcome = error
        except TimeoutError:
            self.outcome = PostError("timeout", retriable=True)
        except (OSError, http.client.HTTPException, ValueError):
            self.outcome = PostError("connection", retriable=True)

    def cut(self) -> None:
        """End the exchange from outside: whatever it waits for fails at once."""
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
        if response.length:  # the server promised more than it sent
            raise PostError("connection", retriable=True)
        return bytes(read)


def _check_status(status: int) -> None:
    if 300 <= status < 400:
        raise PostError("redirect")
    if status != http.client.OK:
        raise PostError(f"status_{status}", retriable=status >= 500)
