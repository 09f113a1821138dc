"""What a request says of itself, as far as a gate has to read it: from where, for which host, by which page."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from tether.studio.settings import StudioSettings, is_loopback

MAX_FORWARDED = 64  # addresses in X-Forwarded-For that are looked at


@dataclass(frozen=True)
class Asked:
    """A request without its body."""

    method: str
    path: str
    headers: Headers
    address: str  # whose request it is: the proxy's word counts where the proxy is trusted
    is_public: bool  # it came by --public-url

    @property
    def is_api(self) -> bool:
        """Whether it is for a route and not for a file of the page."""
        return self.path == "/api" or self.path.startswith("/api/")


def read_asked(scope: Scope, settings: StudioSettings) -> Asked:
    """The request of an ASGI scope."""
    headers = Headers(scope=scope)
    peer = (scope.get("client") or ("", 0))[0]
    address = forwarded_for(peer, headers, settings)
    return Asked(scope["method"], scope["path"], headers, address, _by_public_url(peer, headers, settings))


def forwarded_for(peer: str, headers: Headers, settings: StudioSettings) -> str:
    """The address that a request comes from.

    X-Forwarded-For is read from its end: each proxy appends whom it heard from. The first that is no trusted proxy is
    the one; what stands before it is that one's own claim. Anyone else's header is not looked at.
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
    """Whether a request came by the public address: what its cookies are called depends on it."""
    if settings.public_url is None:
        return False
    if host_name(headers.get("host", "")) == settings.public_name or headers.get("origin") == settings.public_url:
        return True
    return settings.trusts(peer) and headers.get("x-forwarded-proto", "").lower() == "https"


def host_name(host: str) -> str:
    """The name in a Host header, without its port; empty where it makes no sense."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def is_foreign(headers: Headers, public_url: str | None) -> bool:
    """Whether the page that sent this is known to be another's. `Origin: null` is another's too."""
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
        return True  # the same name without TLS, or at another port
    return parts.scheme not in ("http", "https") or parts.netloc.lower() != headers.get("host", "").lower()


def says_length(headers: Headers) -> int:
    """How long the body says it is; 0 where it says nothing that makes sense."""
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() and length.isascii() and len(length) < 20 else 0


def cookie(headers: Headers, name: str) -> str | None:
    """A cookie's value. Cookies do not know ports: what other servers of this host have set is passed over, whatever
    it looks like."""
    found = None
    for word in ";".join(headers.getlist("cookie")).split(";"):
        key, sign, value = word.partition("=")
        if sign and key.strip() == name:
            found = value.strip()
    return found


def limited(receive: Receive, most: int) -> Receive:
    """Receive, no more than `most` bytes: a body may be longer than it said, or say nothing."""
    taken = 0

    async def receiving() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b"")) if message["type"] == "http.request" else 0
        return {"type": "http.disconnect"} if taken > most else message

    return receiving


async def whole_body(receive: Receive, most: int, seconds: float = 10.0) -> bytes | None:
    """A short body; None where it is longer than `most`, does not come in time, or the sender is gone."""
    try:
        return await asyncio.wait_for(_body(receive, most), seconds)
    except TimeoutError:
        return None


async def _body(receive: Receive, most: int) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            return None
        if not message.get("more_body", False):
            return bytes(body)
