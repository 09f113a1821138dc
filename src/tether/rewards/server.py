"""A reward server from the standard library: loopback by default, one bearer token, one request scored at a time."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from tether.errors import UsageError
from tether.rate_limit import Rate, RateLimit, network_of
from tether.rewards.remote import VERSION
from tether.rewards.service import BadRequestError, RewardService, build_service

TOKEN_VARIABLE = "TETHER_REWARD_TOKEN"  # noqa: S105 (the variable's name, not a secret)
MAX_BYTES = 32_000_000  # of a request
HEADER_SECONDS = 10.0  # in which the head of a request must have arrived
READ_SECONDS = 30.0  # in which its body must have arrived
MAX_CONNECTIONS = 128  # each has a thread
WRONG_TOKENS = Rate(10.0, 100)  # from one address
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class RewardServer(ThreadingHTTPServer):
    """Listens; what it answers is the service's business."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, service: RewardService, *, host: str, port: int, token: str, max_bytes: int = MAX_BYTES) -> None:
        self.service, self.token, self.max_bytes = service, token, max_bytes
        self.strangers = RateLimit(WRONG_TOKENS)
        self.header_seconds, self.max_connections = HEADER_SECONDS, MAX_CONNECTIONS
        self._open: dict[socket.socket, float | None] = {}  # until when its request must be there; None: it is
        self._lock = Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), RewardHandler)

    @property
    def url(self) -> str:
        """Where to post."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/score"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection; where there are too many, the one that has been waited for longest goes."""
        with self._lock:
            if len(self._open) >= self.max_connections:
                slow = next((one for one, until in self._open.items() if until is not None), None)
                _hang_up(slow if slow is not None else request)
                self._open.pop(slow if slow is not None else request, None)
            self._open[request] = time.monotonic() + self.header_seconds
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection is over."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def wait_for(self, request: socket.socket, seconds: float | None) -> None:
        """Give a connection so long for what it sends next; None: all of it is there."""
        with self._lock:
            if request in self._open:
                self._open[request] = None if seconds is None else time.monotonic() + seconds

    def service_actions(self) -> None:
        """Twice a second: hang up on whoever takes too long to ask."""
        now = time.monotonic()
        with self._lock:
            late = [one for one, until in self._open.items() if until is not None and until < now]
        for one in late:
            _hang_up(one)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no event."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class RewardHandler(BaseHTTPRequestHandler):
    """POST /score with the token; GET /health without."""

    server: RewardServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = READ_SECONDS
    server_version = "tether"
    sys_version = ""
    error_message_format = '{"error": "%(message)s"}\n'
    error_content_type = "application/json"

    def do_GET(self) -> None:
        """Whether the server is up."""
        if self.path == "/health":
            self._send(HTTPStatus.OK, {"status": "ok", "version": VERSION})
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": "GET /health, or POST /score"})

    def do_POST(self) -> None:
        """Scores for a batch."""
        if self.path not in ("/", "/score"):
            return self._send(HTTPStatus.NOT_FOUND, {"error": "POST to /score"})
        network = network_of(str(self.client_address[0]))
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if given and (
            wait := self.server.strangers.take(network)
        ):  # before it is looked at: a right one looks no better
            return self._send(HTTPStatus.TOO_MANY_REQUESTS, {"error": f"too many wrong tokens: wait {wait} s"}, wait)
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return self._send(HTTPStatus.UNAUTHORIZED, {"error": "the bearer token is missing or wrong"})
        self.server.strangers.give_back(network)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or not length.isascii():
            return self._send(HTTPStatus.LENGTH_REQUIRED, {"error": "say the Content-Length"})
        if len(length) > 12 or int(length) > self.server.max_bytes:
            return self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"at most {self.server.max_bytes} bytes"})
        body = self._read(int(length))
        if body is None:
            return self._send(HTTPStatus.REQUEST_TIMEOUT, {"error": "the request did not arrive whole"})
        try:
            return self._send(HTTPStatus.OK, self.server.service.answer(body))
        except BadRequestError as error:
            return self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except Exception as error:
            reason = f"the reward raised {type(error).__name__}: {error}"
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": reason})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: they hold what people wrote."""

    def _read(self, length: int) -> bytes | None:
        """The body; None where it has not arrived by the deadline."""
        self.server.wait_for(self.connection, READ_SECONDS)
        deadline, body = time.monotonic() + READ_SECONDS, bytearray()
        while len(body) < length and time.monotonic() < deadline:
            try:
                chunk = self.rfile.read1(min(length - len(body), 65_536))  # pyright: ignore[reportAttributeAccessIssue]
            except TimeoutError:
                return None
            if not chunk:
                return None
            body += chunk
        self.server.wait_for(self.connection, None)
        return bytes(body) if len(body) == length else None

    def _send(self, status: HTTPStatus, answer: dict[str, Any], wait: int = 0) -> None:
        self.close_connection = True
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if wait:
            self.send_header("Retry-After", str(wait))
        self.end_headers()
        self.wfile.write(body)


def _hang_up(connection: socket.socket) -> None:
    """Wake the thread that reads from it; that one closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def serve(target: str, *, host: str, port: int, json_output: bool) -> int:
    """Serve until interrupted; says where, and with which token, once it listens."""
    service = build_service(target)
    chosen = os.environ.get(TOKEN_VARIABLE, "").strip()
    token = chosen or secrets.token_urlsafe(24)
    try:
        server = RewardServer(service, host=host, port=port, token=token)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}, port {port}: {error}; choose another --port or --host") from error
    shown = None if chosen else token
    if json_output:
        print(json.dumps({"url": server.url, "token": shown, "token_env": TOKEN_VARIABLE}), flush=True)
    else:
        print(_welcome(target, server.url, shown), flush=True)
    if host not in LOOPBACK:
        print(
            f"tether: {host} can be reached from outside, and HTTP is not encrypted: put TLS in front", file=sys.stderr
        )
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with server:
            server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _welcome(target: str, url: str, token: str | None) -> str:
    export = f"export {TOKEN_VARIABLE}={token}" if token else f"the token is the one in {TOKEN_VARIABLE}"
    part = f"reward:\n  parts:\n    - {{kind: remote, url: {url!r}, token_env: {TOKEN_VARIABLE}}}"
    return f"Scoring with {target} at {url}. Ctrl-C ends it.\n\nWhere the run is:  {export}\nIn its recipe:\n\n{part}\n"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
