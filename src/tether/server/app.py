"""The routes of `tether serve`, and the authentication middleware in front of them.

The middleware checks the Host header, the request rate of unknown clients, the token and the size. It is pure ASGI, so
streams pass through it. The routes are /v1/models, /v1/chat/completions, /v1/completions and /health.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tether.errors import TetherError
from tether.rate_limit import RateLimit, network_of
from tether.redact import redact
from tether.rollout.token_stream import Token
from tether.server.generate import Job, OpenAIAnswer, ServedModel, Turnstile, event
from tether.server.schema import ApiError, ChatRequest, CompletionRequest, GenerationRequest
from tether.studio.auth import MAX_BYTES, Asked, host_name, limited, read_asked, says_length
from tether.studio.replies import Reply, read_json
from tether.studio.settings import StudioSettings

OPEN = ("/health",)  # needs no token


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


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)
Tokens = Iterator[tuple[int, Token]]


def create_app(served: ServedModel, settings: StudioSettings, turnstile: Turnstile) -> ASGIApp:
    """The server of one model."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())
    card = {"id": served.name, "object": "model", "created": started, "owned_by": "tether"}

    @app.get("/health")
    async def health() -> Response:
        return Reply({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Response:
        return Reply({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        served.check_name(name)
        return Reply(card)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = await read(request, ChatRequest)
        job = await run_in_threadpool(served.chat_job, asked)
        answer = OpenAIAnswer(served, job, chat=True, logprobs=bool(asked.logprobs))
        return await respond(request, served, turnstile, asked, job, answer)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = await read(request, CompletionRequest)
        job = await run_in_threadpool(served.completion_job, asked)
        answer = OpenAIAnswer(served, job, chat=False, logprobs=asked.logprobs is not None)
        return await respond(request, served, turnstile, asked, job, answer)

    _add_errors(app)
    return TokenGate(app, settings)


async def read(request: Request, kind: type[AnyRequest]) -> AnyRequest:
    """The validated body; an error names the field."""
    try:
        given = await read_json(await request.body())
    except ClientDisconnect:
        raise ApiError(400, "the body did not arrive whole, or is too long") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return await run_in_threadpool(kind.model_validate, given)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][:1]) or None
        place = ".".join(str(part) for part in first["loc"] if isinstance(part, int | str))
        raise ApiError(400, f"{place}: {first['msg']}" if place else str(first["msg"]), param=param) from None


async def respond(
    request: Request,
    served: ServedModel,
    turnstile: Turnstile,
    asked: GenerationRequest,
    job: Job,
    answer: OpenAIAnswer,
) -> Response:
    """Wait for a place, then answer as a stream or whole. A client that leaves ends the work."""
    await turnstile.enter()
    tokens = served.tokens(job)
    if asked.stream:

        def leave() -> None:
            tokens.close()  # pyright: ignore[reportAttributeAccessIssue]
            turnstile.leave()

        body = _events(tokens, answer, asked.include_usage)
        return Streamed(body, leave)
    try:
        while (step := await run_in_threadpool(next, tokens, None)) is not None:
            answer.add(*step)
            if await request.is_disconnected():
                return Response(status_code=499)  # the client has left
        return Reply(answer.whole())
    finally:
        tokens.close()  # pyright: ignore[reportAttributeAccessIssue]
        turnstile.leave()


class Streamed(StreamingResponse):
    """A stream of events. `leave` is called when it is over, however it ends, also before its first event."""

    def __init__(self, body: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(body, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def _events(tokens: Tokens, answer: OpenAIAnswer, include_usage: bool) -> AsyncIterator[str]:
    for opening in answer.opening():
        yield opening
    try:
        while (step := await run_in_threadpool(next, tokens, None)) is not None:
            answer.add(*step)
            chunk = answer.chunk(*step)
            if chunk is not None:
                yield chunk
    except TetherError as error:
        yield event(ApiError(500, redact(str(error))).body())
        return
    for closing in answer.closing(include_usage):
        yield closing


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.reply()

    @app.exception_handler(TetherError)
    async def failed(_: Request, error: TetherError) -> Response:
        return ApiError(500, redact(str(error))).reply()

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        messages: dict[int, Any] = {404: "there is no such route: /v1/chat/completions, /v1/completions, /v1/models"}
        return ApiError(error.status_code, str(messages.get(error.status_code, error.detail))).reply()

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return ApiError(500, f"a bug in the server: {type(error).__name__}").reply()
