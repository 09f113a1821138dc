"""The HTTP of Tether's small servers: Python's standard library, loopback by default, one bearer token.

A server inherits from `TokenServer` and says in `answer` what a POST is answered with. Every request has deadlines for
its header and its body, requests with wrong tokens are limited by address, and nothing is logged.
"""

from __future__ import annotations

import hmac
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tether.rate_limit import Rate, RateLimit, network_of

JSON = "application/json"


class BadRequestError(Exception):
    """The whole request is invalid; the message says why."""


MAX_BYTES = 32_000_000  # per request
HEADER_SECONDS = 10.0  # time limit for the header of a request
READ_SECONDS = 30.0  # time limit for the body
MAX_CONNECTIONS = 128  # each has a thread
WRONG_TOKENS = Rate(10.0, 100)  # per address
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class TokenServer(ThreadingHTTPServer):
    """Accepts connections; `answer` computes the response to each request."""

    daemon_threads = True
    request_queue_size = 128

    paths: tuple[str, ...] = ("/",)  # what is posted to; the last one is named to whoever posts elsewhere
    read_seconds = READ_SECONDS

    def __init__(self, *, host: str, port: int, token: str, max_bytes: int = MAX_BYTES) -> None:
        self.token, self.max_bytes = token, max_bytes
        self.strangers = RateLimit(WRONG_TOKENS)
        self.header_seconds, self.max_connections = HEADER_SECONDS, MAX_CONNECTIONS
        self._open: dict[socket.socket, float | None] = {}  # deadline of each request; None: it has arrived
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), TokenHandler)

    @property
    def address(self) -> str:
        """Where it listens, as http://HOST:PORT."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}"

    def health(self) -> Mapping[str, Any]:
        """What anybody may know of it."""
        return {"status": "ok"}

    def answer(self, path: str, body: bytearray) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body of the response to a POST; BadRequestError where the request is invalid."""
        raise NotImplementedError

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept a connection; above the maximum, close the one with the earliest deadline."""
        with self._lock:
            if len(self._open) >= self.max_connections:
                slow = next((one for one, until in self._open.items() if until is not None), None)
                _hang_up(slow if slow is not None else request)
                self._open.pop(slow if slow is not None else request, None)
            self._open[request] = time.monotonic() + self.header_seconds
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def wait_for(self, request: socket.socket, seconds: float | None) -> None:
        """Give a connection `seconds` to send the next part; None: the request is complete."""
        with self._lock:
            if request in self._open:
                self._open[request] = None if seconds is None else time.monotonic() + seconds

    def service_actions(self) -> None:
        """Twice a second: close connections past their deadline."""
        now = time.monotonic()
        with self._lock:
            late = [one for one, until in self._open.items() if until is not None and until < now]
        for one in late:
            _hang_up(one)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class TokenHandler(BaseHTTPRequestHandler):
    """POST with the token; GET /health without it."""

    server: TokenServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = READ_SECONDS
    server_version = "tether"
    sys_version = ""
    error_message_format = '{"error": "%(message)s"}\n'
    error_content_type = "application/json"

    def do_GET(self) -> None:
        """Report that the server is up."""
        if self.path == "/health":
            self._send(HTTPStatus.OK, self.server.health())
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"GET /health, or POST {self.server.paths[-1]}"})

    def do_POST(self) -> None:
        """Answer a request."""
        if self.path not in self.server.paths:
            return self._send(HTTPStatus.NOT_FOUND, {"error": f"POST to {self.server.paths[-1]}"})
        network = network_of(str(self.client_address[0]))
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if given and (
            wait := self.server.strangers.take(network)
        ):  # checked before the token, so that a correct guess gets the same response
            return self._send(HTTPStatus.TOO_MANY_REQUESTS, {"error": f"too many wrong tokens: wait {wait} s"}, wait)
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return self._send(HTTPStatus.UNAUTHORIZED, {"error": "the bearer token is missing or wrong"})
        self.server.strangers.give_back(network)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or not length.isascii():
            return self._send(HTTPStatus.LENGTH_REQUIRED, {"error": "Content-Length is required"})
        if len(length) > 12 or int(length) > self.server.max_bytes:
            return self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"at most {self.server.max_bytes} bytes"})
        body = self._read(int(length))
        if body is None:
            return self._send(HTTPStatus.REQUEST_TIMEOUT, {"error": "the request did not arrive completely"})
        try:
            return self._respond(*self.server.answer(self.path, body))
        except BadRequestError as error:
            return self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests contain users' texts."""

    def _read(self, length: int) -> bytearray | None:
        """The body; None where it did not arrive before the deadline."""
        seconds = self.server.read_seconds
        self.server.wait_for(self.connection, seconds)
        deadline, body = time.monotonic() + seconds, bytearray()
        while len(body) < length and time.monotonic() < deadline:
            try:
                chunk = self.rfile.read1(min(length - len(body), 65_536))  # pyright: ignore[reportAttributeAccessIssue]
            except TimeoutError:
                return None
            if not chunk:
                return None
            body += chunk
        self.server.wait_for(self.connection, None)
        return body if len(body) == length else None

    def _send(self, status: HTTPStatus, answer: Mapping[str, Any], wait: int = 0) -> None:
        self._respond(status, JSON, json.dumps(answer).encode(), wait)

    def _respond(self, status: HTTPStatus, content_type: str, body: bytes, wait: int = 0) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if wait:
            self.send_header("Retry-After", str(wait))
        self.end_headers()
        self.wfile.write(body)


def _hang_up(connection: socket.socket) -> None:
    """Shut the socket down, so that the thread that reads from it wakes and closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
