"""The layer in front of every route: Host, rate of strangers, token, size. A pure ASGI middleware, so streams pass."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from tether.rate_limit import RateLimit, network_of
from tether.server.api_errors import ApiError
from tether.studio.asked import Asked, host_name, limited, read_asked, says_length
from tether.studio.auth import MAX_BYTES
from tether.studio.settings import StudioSettings

OPEN = ("/health",)  # told to everyone who may name this host


class TokenGate:
    """Lets requests through that bear the token, and are for a name of this server."""

    def __init__(self, app: ASGIApp, settings: StudioSettings) -> None:
        self._app, self._settings = app, settings
        self._strangers = RateLimit(settings.stranger_rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self._refusal(read_asked(scope, self._settings))
            if refusal is not None:
                await refusal.reply()(scope, receive, send)
            else:
                await self._app(scope, limited(receive, MAX_BYTES), send)

    def _refusal(self, asked: Asked) -> ApiError | None:
        """A right token is judged only while wrong ones are, and is not counted."""
        headers, network = asked.headers, network_of(asked.address)
        if not self._settings.allows_host(host_name(headers.get("host", ""))):
            return ApiError(403, "this server is not called that: use the address that it printed")
        if asked.path in OPEN:
            return None
        given = headers.get("authorization", "").encode("latin-1", "replace")
        if given and (wait := self._strangers.take(network)):
            return ApiError(429, f"too many wrong tokens: try again in {wait} s", code="rate_limit_exceeded")
        if not hmac.compare_digest(given, f"Bearer {self._settings.owner_token}".encode()):
            return ApiError(401, "the bearer token (api_key) is missing or wrong", code="invalid_api_key")
        self._strangers.give_back(network)
        if says_length(headers) > MAX_BYTES:
            return ApiError(413, f"a request may have {MAX_BYTES >> 20} MiB at most")
        return None
