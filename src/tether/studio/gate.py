"""The one layer in front of every route and method: who is asking, from where, for what, and how often.

Whatever is not allowed here is refused, whether or not a route for it exists:

    Host -> Origin -> token or session -> role -> rate -> size -> the app

A pure ASGI middleware, so that streams pass through it untouched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tether.studio.people import Doorkeeper, Person
from tether.studio.rates import Buckets
from tether.studio.replies import Reply
from tether.studio.settings import StudioSettings

SAFE_METHODS = frozenset({"GET", "HEAD"})
MOST_BYTES = 32 << 20  # of a request's body

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
    ("GET", re.compile(r"/api/label/queues")),
    ("GET", re.compile(r"/api/label/queues/[0-9]+/next")),
    ("POST", re.compile(r"/api/label/votes")),
    ("POST", re.compile(r"/api/label/votes/undo")),
    ("GET", re.compile(r"/(?!api(/|$)).*")),  # the page itself: it has nothing of the workspace in it
)
"""All that an annotator can reach; which queue is theirs is the label routes' to say."""

LOGIN_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Tether Studio</title>
<h1>Tether Studio</h1>
<p>{reason}</p>
<form action="/" method="get"><label>Token <input name="token" type="password" autocomplete="off" autofocus></label>
<button>Enter</button></form>
</html>
"""


@dataclass(frozen=True)
class _Asked:
    """A request, as far as the gate has to read it."""

    method: str
    path: str
    headers: Headers
    address: str

    @property
    def is_api(self) -> bool:
        return self.path == "/api" or self.path.startswith("/api/")


class Gate:
    """The middleware. It puts the `Person` who asks into the request's state."""

    def __init__(self, app: ASGIApp, settings: StudioSettings, doorkeeper: Doorkeeper) -> None:
        self._app, self._settings, self._doorkeeper = app, settings, doorkeeper
        self._people, self._strangers = Buckets(settings.session_rate), Buckets(settings.stranger_rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets are served
            return
        address = (scope.get("client") or ("", 0))[0]
        asked = _Asked(scope["method"], scope["path"], Headers(scope=scope), address)
        send = _with_headers(send, asked)
        refusal, person = self._judge(asked, scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["person"] = person
        await self._app(scope, _limited(receive), send)

    def _judge(self, asked: _Asked, scope: Scope) -> tuple[Response | None, Person | None]:
        """A refusal (or a redirect after a log-in), or else the person who is let in."""
        if not self._settings.allows_host(_host_name(asked.headers.get("host", ""))):
            return _no(403, "this server is not called that: open it by the address that it printed"), None
        if asked.method not in SAFE_METHODS and _is_foreign(asked.headers):
            return _no(403, "the request comes from a page of another origin"), None
        person, by_cookie = self._recognise(asked)
        if token := _token_of_link(asked, scope):
            return self._log_in(asked, token), None
        if person is None:
            return self._stranger(asked), None
        if asked.method not in SAFE_METHODS and by_cookie and "origin" not in asked.headers:
            return _no(403, "the request does not say which page it comes from"), None
        if wait := self._people.take(person.id):
            return _wait(wait), None
        if person.role != "owner" and not _may(asked):
            return _no(403, "only the owner can do this"), None
        if _says_length(asked.headers) > MOST_BYTES:
            return _no(413, f"a request may have {MOST_BYTES >> 20} MiB at most"), None
        return None, person

    def _recognise(self, asked: _Asked) -> tuple[Person | None, bool]:
        """Who it is, and whether a cookie said so. A token that is sent counts, and no cookie beside it."""
        authorization = asked.headers.get("authorization")
        if authorization is not None:
            kind, _, token = authorization.partition(" ")
            return (self._doorkeeper.by_token(token.strip()) if kind.lower() == "bearer" else None), False
        session = _cookie(asked.headers, self._settings.cookie)
        return (self._doorkeeper.by_session(session) if session else None), True

    def _stranger(self, asked: _Asked) -> Response:
        if wait := self._strangers.take(asked.address):
            return _wait(wait)
        if asked.is_api or asked.method not in SAFE_METHODS:
            reply = _no(401, "a token is needed: open the link that `tether studio` printed, or send a Bearer token")
            reply.headers["www-authenticate"] = "Bearer"
            return reply
        return _login_page("Open the link that <code>tether studio</code> printed, or give a token here.")

    def _log_in(self, asked: _Asked, token: str) -> Response:
        if wait := self._strangers.take(asked.address):
            return _wait(wait)
        session = self._doorkeeper.log_in(token)
        if session is None:
            return _login_page("That token is not known, or was used before: the printed link works once.")
        reply = RedirectResponse("/", 303)
        reply.set_cookie(self._settings.cookie, session, httponly=True, samesite="strict", path="/")
        return reply


# -- what a request says ------------------------------------------------------------------------------------------


def _host_name(host: str) -> str:
    """The name in a Host header, without its port; empty where it makes no sense."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_foreign(headers: Headers) -> bool:
    """Whether the page that sent this is known to be another's. `Origin: null` is another's too."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    try:
        parts = urlsplit(origin)
    except ValueError:
        return True
    return parts.scheme not in ("http", "https") or parts.netloc.lower() != headers.get("host", "").lower()


def _says_length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


def _token_of_link(asked: _Asked, scope: Scope) -> str | None:
    if asked.method != "GET" or asked.path != "/":
        return None
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [None])[0]


def _cookie(headers: Headers, name: str) -> str | None:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return None if found is None else found.value


def _may(asked: _Asked) -> bool:
    method = "GET" if asked.method == "HEAD" else asked.method
    return any(method == allowed and pattern.fullmatch(asked.path) for allowed, pattern in ANNOTATOR_MAY)


# -- answers ------------------------------------------------------------------------------------------------------


def _no(status: int, text: str) -> Response:
    return Reply({"error": text}, status)


def _wait(seconds: int) -> Response:
    return Reply({"error": f"too many requests: try again in {seconds} s"}, 429, headers={"retry-after": str(seconds)})


def _login_page(reason: str) -> Response:
    return HTMLResponse(LOGIN_PAGE.format(reason=reason), 401)


def _with_headers(send: Send, asked: _Asked) -> Send:
    """Send, with the headers that every answer has."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _headers_for(asked):
                headers[name] = value
        await send(message)

    return sending


def _headers_for(asked: _Asked) -> Iterable[tuple[str, str]]:
    yield from SECURITY_HEADERS.items()
    yield "cache-control", "no-store" if asked.is_api or "token=" in asked.path or asked.path == "/" else "no-cache"


def _limited(receive: Receive) -> Receive:
    """Receive, no more than MOST_BYTES: a body may be longer than it said, or say nothing."""
    taken = 0

    async def receiving() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b"")) if message["type"] == "http.request" else 0
        return {"type": "http.disconnect"} if taken > MOST_BYTES else message

    return receiving
