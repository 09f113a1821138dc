"""The layer in front of every route: it checks who sends a request, from where, for what, and how often.

Anything that is not allowed here is refused, whether or not a route for it exists:

    Host -> Origin -> rate of guesses -> token or session -> rate -> role -> size -> the app

A token is compared only after the rate limit for guesses has passed, so that under 429 a right token looks like a wrong
one. A right token gets its request back. This is a pure ASGI middleware, so streams pass through it unchanged, and it
never waits for the database on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tether.rate_limit import RateLimit, network_of
from tether.studio.people import Auth, CannotTellError, Entry, OtherPersonError
from tether.studio.replies import Reply
from tether.studio.settings import StudioSettings, is_loopback

# -- reading a request --------------------------------------------------------------------------------------------

MAX_FORWARDED = 64  # maximum number of addresses in X-Forwarded-For that are read


@dataclass(frozen=True)
class Asked:
    """A request without its body."""

    method: str
    path: str
    headers: Headers
    address: str  # the client's; a trusted proxy's X-Forwarded-For is used
    is_public: bool  # it came through --public-url

    @property
    def is_api(self) -> bool:
        """Whether it is for a route, not for a static file."""
        return self.path == "/api" or self.path.startswith("/api/")


def read_asked(scope: Scope, settings: StudioSettings) -> Asked:
    """The request of an ASGI scope."""
    headers = Headers(scope=scope)
    peer = (scope.get("client") or ("", 0))[0]
    address = forwarded_for(peer, headers, settings)
    return Asked(scope["method"], scope["path"], headers, address, _by_public_url(peer, headers, settings))


def forwarded_for(peer: str, headers: Headers, settings: StudioSettings) -> str:
    """The client's address.

    X-Forwarded-For is read from its end, because each proxy appends the address that it received the request from. The
    first address that is not a trusted proxy is the client; earlier entries are only its own claim. The header is
    ignored if the connection does not come from a trusted proxy.
    """
    if not settings.trusts(peer):
        return peer
    words = [word.strip() for line in headers.getlist("x-forwarded-for") for word in line.split(",")]
    for word in reversed(words[-MAX_FORWARDED:]):
        name = word.removeprefix("[").partition("]")[0] if word.startswith("[") else word
        name = name.partition(":")[0] if name.count(":") == 1 else name
        if not settings.trusts(name):
            return name[:64] or peer
    return peer


def _by_public_url(peer: str, headers: Headers, settings: StudioSettings) -> bool:
    """Whether a request came through the public URL; the names of its cookies depend on it."""
    if settings.public_url is None:
        return False
    if host_name(headers.get("host", "")) == settings.public_name or headers.get("origin") == settings.public_url:
        return True
    return settings.trusts(peer) and headers.get("x-forwarded-proto", "").lower() == "https"


def host_name(host: str) -> str:
    """The name in a Host header without its port; empty if the header is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def is_foreign(headers: Headers, public_url: str | None) -> bool:
    """Whether the request comes from a page of another origin. `Origin: null` counts as another."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    try:
        parts = urlsplit(origin)
    except ValueError:
        return True
    public = urlsplit(public_url or "").hostname
    if origin.lower() == public_url:
        return False
    if public is not None and parts.hostname == public and not is_loopback(public):
        return True  # the same name without TLS, or with another port
    return parts.scheme not in ("http", "https") or parts.netloc.lower() != headers.get("host", "").lower()


def says_length(headers: Headers) -> int:
    """The Content-Length; 0 if it is missing or invalid."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and length.isascii() and len(length) < 20 else 0


def cookie(headers: Headers, name: str) -> str | None:
    """The value of a cookie. Cookies are shared between ports, so the cookies of other servers on this host are
    ignored, whatever they contain."""
    found = None
    for word in ";".join(headers.getlist("cookie")).split(";"):
        key, sign, value = word.partition("=")
        if sign and key.strip() == name:
            found = value.strip()
    return found


def limited(receive: Receive, limit: int) -> Receive:
    """A `receive` of at most `most` bytes: a body may be longer than its Content-Length, or have none."""
    taken = 0

    async def receiving() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b"")) if message["type"] == "http.request" else 0
        return {"type": "http.disconnect"} if taken > limit else message

    return receiving


async def whole_body(receive: Receive, limit: int, seconds: float = 10.0) -> bytes | None:
    """A short body; None if it is longer than `most`, does not arrive in time, or the client is gone."""
    try:
        return await asyncio.wait_for(_body(receive, limit), seconds)
    except TimeoutError:
        return None


async def _body(receive: Receive, limit: int) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if not message.get("more_body", False):
            return bytes(body)


# -- the middleware -----------------------------------------------------------------------------------------------

SAFE_METHODS = frozenset({"GET", "HEAD"})
MAX_BYTES = 32 << 20  # of a request's body
ANNOTATOR_BYTES = 1 << 20
LOGIN_BYTES = 4096
LOGIN = "/api/login"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

ANNOTATOR_MAY: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("GET", re.compile(r"/api/me")),
    ("POST", re.compile(r"/api/logout")),
    ("GET", re.compile(r"/api/label/queues")),
    ("GET", re.compile(r"/api/label/queues/[0-9]+/next")),
    ("POST", re.compile(r"/api/label/votes")),
    ("POST", re.compile(r"/api/label/votes/undo")),
    ("GET", re.compile(r"/(?!api(/|$)).*")),  # the static page, which contains nothing of the workspace
)
"""Everything that an annotator can reach; the label routes check which queue it is."""

FOR_STRANGERS = frozenset({"/js/enter.js", "/mark.svg"})  # files of the login page

LOGIN_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Tether Studio</title>
<link rel="icon" href="/mark.svg" type="image/svg+xml">
<script type="module" src="/js/enter.js"></script>
<h1>Tether Studio</h1>
<p id="reason" role="status">{reason}</p>
<form id="enter" method="post"><label>Token <input name="token" type="password" autocomplete="off" autofocus></label>
<button>Enter</button></form>
<noscript>Tether Studio needs JavaScript.</noscript>
</html>
"""
ASK = "Open the link that <code>tether studio</code> printed, or give a token here."
IN_ADDRESS = (
    "A token in an address ends up in logs, so this one was not read. Links have it after <code>#token=</code>; or "
    "give it here."
)


class AuthMiddleware:
    """The middleware. It stores the `Person` and the `Entry` in the request's state."""

    def __init__(self, app: ASGIApp, settings: StudioSettings, auth: Auth) -> None:
        self._app, self._settings, self._auth = app, settings, auth
        self._people = RateLimit(settings.session_rate)
        # Two limits per address, so that requests without a token do not block those with one.
        self._strangers, self._guesses = RateLimit(settings.stranger_rate), RateLimit(settings.stranger_rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # web sockets are not served
            return
        asked = read_asked(scope, self._settings)
        send = _with_headers(send, asked)
        answer = await self._judge(asked, scope, receive)
        if isinstance(answer, Response):
            await answer(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["entry"], state["person"] = answer, None if answer is None else answer.person
        limit = MAX_BYTES if answer is not None and answer.person.role == "owner" else ANNOTATOR_BYTES
        await self._app(scope, limited(receive, limit), send)

    async def _judge(self, asked: Asked, scope: Scope, receive: Receive) -> Response | Entry | None:
        """A response, or the entry of a known person; None for a stranger who requests a file of the login page."""
        if not self._settings.allows_host(host_name(asked.headers.get("host", ""))):
            return _no(403, "unknown host name: open the server by the address that it printed")
        reads_page = asked.method in SAFE_METHODS and not asked.is_api  # a link on another site may lead here
        if not reads_page and is_foreign(asked.headers, self._settings.public_url):
            return _no(403, "the request comes from a page of another origin")
        if asked.method == "POST" and asked.path == LOGIN:
            return await self._log_in(asked, receive)
        entry = await self._recognise(asked)
        if entry is None:
            return self._stranger(asked, scope)
        if isinstance(entry, Response):
            return entry
        by_cookie = entry.session is not None
        if asked.method not in SAFE_METHODS and by_cookie and "origin" not in asked.headers:
            return _no(403, "the request does not say which page it comes from")
        if wait := self._people.take(entry.person.id):
            return _wait(wait)
        if entry.person.role != "owner" and not _may(asked):
            return _no(403, "only the owner can do this")
        limit = MAX_BYTES if entry.person.role == "owner" else ANNOTATOR_BYTES
        if says_length(asked.headers) > limit:
            return _no(413, f"a request may have {limit >> 20} MiB at most")
        return entry

    async def _recognise(self, asked: Asked) -> Entry | Response | None:
        """The person, or a response if that cannot be determined now. A token in the request takes precedence over a
        cookie."""
        authorization = asked.headers.get("authorization")
        if authorization is None:
            session = cookie(asked.headers, self._cookie(asked))
            found = self._auth.by_session(session) if session else None
            return found if found is not None else _too_many(self._strangers, asked)
        if (refusal := _too_many(self._guesses, asked)) is not None:
            return refusal
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer":
            return None
        try:
            entry = await self._auth.by_token(token.strip())
        except CannotTellError:
            return _later()
        if entry is not None:
            self._guesses.give_back(network_of(asked.address))
        return entry

    def _cookie(self, asked: Asked) -> str:
        return self._settings.secure_cookie if self._is_secure(asked) else self._settings.cookie

    def _is_secure(self, asked: Asked) -> bool:
        return asked.is_public and (self._settings.public_url or "").startswith("https:")

    def _stranger(self, asked: Asked, scope: Scope) -> Response | None:
        if asked.method in SAFE_METHODS and asked.path in FOR_STRANGERS:
            return None
        if asked.is_api or asked.method not in SAFE_METHODS:
            reply = _no(401, "a token is needed: open the link that `tether studio` printed, or send a Bearer token")
            reply.headers["www-authenticate"] = "Bearer"
            return reply
        in_address = b"token=" in scope.get("query_string", b"")
        return HTMLResponse(LOGIN_PAGE.format(reason=IN_ADDRESS if in_address else ASK), 401)

    async def _log_in(self, asked: Asked, receive: Receive) -> Response:
        """POST {"token": ...}: exchange a token for a session cookie.

        A link on another page may contain that person's own token. So a browser that is logged in switches to another
        person only with `"instead": true`, which the page sends after it has asked the user.
        """
        if (refusal := _too_many(self._strangers, asked)) is not None:
            return refusal
        if says_length(asked.headers) > LOGIN_BYTES or (body := await whole_body(receive, LOGIN_BYTES)) is None:
            return _no(413, "the body is too long for a token")
        token, instead = _token_in(body)
        if token is None:
            return _no(422, 'the body: send {"token": "..."}')
        if (refusal := _too_many(self._guesses, asked)) is not None:
            return refusal
        secret = cookie(asked.headers, self._cookie(asked))
        entry = self._auth.by_session(secret) if secret and not instead else None
        still = None if entry is None else entry.person
        agent = asked.headers.get("user-agent", "")
        try:
            session = await self._auth.log_in(token, asked.address, agent, still=still)
        except CannotTellError:
            return _later()
        except OtherPersonError:
            self._guesses.give_back(network_of(asked.address))
            name = "" if still is None else still.name
            return _no(409, f"This browser is logged in as {name}, and the link is someone else's.")
        if session is None:
            return _no(401, "That token is not known or was already used: the printed link works once.")
        self._guesses.give_back(network_of(asked.address))
        reply = Reply({"entered": True})
        options: dict[str, Any] = {"httponly": True, "samesite": "strict", "path": "/"}
        reply.set_cookie(self._cookie(asked), session, secure=self._is_secure(asked), **options)
        return reply


def _too_many(limit: RateLimit, asked: Asked) -> Response | None:
    """Take one request from an address's limit; a response if it is exhausted."""
    wait = limit.take(network_of(asked.address))
    return _wait(wait) if wait else None


def _token_in(body: bytes) -> tuple[str | None, bool]:
    """The token, and whether it replaces the browser's current session."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None, False
    if not isinstance(given, dict) or not isinstance(given.get("token"), str):
        return None, False
    return given["token"].strip(), given.get("instead") is True


def _may(asked: Asked) -> bool:
    method = "GET" if asked.method == "HEAD" else asked.method
    return any(method == allowed and pattern.fullmatch(asked.path) for allowed, pattern in ANNOTATOR_MAY)


# -- responses ----------------------------------------------------------------------------------------------------


def _no(status: int, text: str) -> Response:
    return Reply({"error": text}, status)


def _wait(seconds: int) -> Response:
    return Reply({"error": f"too many requests: try again in {seconds} s"}, 429, headers={"retry-after": str(seconds)})


def _later() -> Response:
    """Strangers do not get the reason."""
    return Reply(
        {"error": "the server cannot answer this now: try again in a moment"}, 503, headers={"retry-after": "2"}
    )


def _with_headers(send: Send, asked: Asked) -> Send:
    """A `send` that adds the headers of every response."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _headers_for(asked):
                headers[name] = value
        await send(message)

    return sending


def _headers_for(asked: Asked) -> Iterable[tuple[str, str]]:
    yield from SECURITY_HEADERS.items()
    yield "cache-control", "no-store" if asked.is_api or asked.path == "/" else "no-cache"
