"""One HTTP request with one deadline: a bearer token, no redirects, no proxy, a limit on the response.

Every request has one deadline for name lookup, connection, headers and body. A socket's own timeout restarts with every
byte, so a slow server could block a run forever. It therefore runs in its own thread, and its socket is shut
down at the deadline.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from urllib.parse import urlsplit

from tether import __version__

Body = bytes | bytearray | memoryview | None
"""What is posted; None makes it a GET."""

CHUNK = 65_536


class PostError(Exception):
    """Why there is no answer, in one word; and whether a retry may help."""

    def __init__(self, reason: str, *, retriable: bool = False, body: bytes = b"") -> None:
        super().__init__(reason)
        self.reason = reason
        self.retriable = retriable
        self.body = body  # what came with another status than 200, up to a limit


def post(
    url: str,
    body: Body,
    *,
    token: str | None,
    timeout_seconds: float,
    max_bytes: int,
    content_type: str = "application/json",
) -> bytes:
    """The body of a 200 response. Raises PostError for anything else.

    Retriable: timeout, connection (refused, reset, or closed before the response was complete), status_5xx. Not
    retriable: redirect (never followed), any other status, too_large (the rest is not read). No proxy is used.
    """
    request = _Request(url, body, token, timeout_seconds, max_bytes, content_type)
    request.start()
    request.join(timeout_seconds)
    if request.is_alive():
        request.cut()
        raise PostError("timeout", retriable=True)
    if isinstance(request.outcome, bytes):
        return request.outcome
    raise request.outcome


class _Request(threading.Thread):
    """The request and its response; `outcome` is set when the thread ends."""

    def __init__(
        self, url: str, body: Body, token: str | None, timeout_seconds: float, max_bytes: int, content_type: str
    ) -> None:
        super().__init__(daemon=True, name="tether-request")
        self.content_type = content_type
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
        """Abort the request from another thread: its blocking call fails at once."""
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
            method, body = ("GET", None) if self.body is None else ("POST", self.body)
            connection.request(method, path, body, self._headers())
            response = connection.getresponse()
            _check_status(response)
            return self._read(response)
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        headers = {
            "Content-Type": self.content_type,
            "Accept": self.content_type,
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


def _check_status(response: http.client.HTTPResponse) -> None:
    status = response.status
    if 300 <= status < 400:
        raise PostError("redirect")
    if status != http.client.OK:
        raise PostError(f"status_{status}", retriable=status >= 500, body=response.read(CHUNK))
