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
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tether.errors import UsageError
from tether.rewards.remote import VERSION
from tether.rewards.service import BadRequestError, RewardService, build_service

TOKEN_VARIABLE = "TETHER_REWARD_TOKEN"  # noqa: S105 (the variable's name, not a secret)
MOST_BYTES = 32_000_000  # of a request
READ_SECONDS = 30.0  # in which a request must have arrived
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class RewardServer(ThreadingHTTPServer):
    """Listens; what it answers is the service's business."""

    daemon_threads = True

    def __init__(
        self, service: RewardService, *, host: str, port: int, token: str, max_bytes: int = MOST_BYTES
    ) -> None:
        self.service, self.token, self.max_bytes = service, token, max_bytes
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), RewardHandler)

    @property
    def url(self) -> str:
        """Where to post."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/score"

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
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return self._send(HTTPStatus.UNAUTHORIZED, {"error": "the bearer token is missing or wrong"})
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
        deadline, body = time.monotonic() + READ_SECONDS, bytearray()
        while len(body) < length and time.monotonic() < deadline:
            try:
                chunk = self.rfile.read1(min(length - len(body), 65_536))  # pyright: ignore[reportAttributeAccessIssue]
            except TimeoutError:
                return None
            if not chunk:
                return None
            body += chunk
        return bytes(body) if len(body) == length else None

    def _send(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        self.close_connection = True
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


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
