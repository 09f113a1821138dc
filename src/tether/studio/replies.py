"""Requests with long bodies, and replies: strict JSON in ASCII, errors as one sentence.

`json.loads` holds the GIL until it is done, whichever thread calls it. So a long body is parsed in a thread and in
steps: the outer object, then the elements of its lists one by one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, model_validator
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from tether.errors import StorageError, TetherError, UsageError
from tether.progress import say
from tether.redact import redact
from tether.store.database.schema import without_infinities

SMALL = 64 << 10  # bytes; parsed in a fraction of a millisecond
MAX_ELEMENTS = 100_000  # of a list; no route accepts as many
AT_ONCE = 2

_SPACE = re.compile(r"[ \t\n\r]*")
_decoder = json.JSONDecoder()
_reading: RunVar[anyio.CapacityLimiter] = RunVar("big_json_reading")


async def read_json(body: bytes) -> Any:
    """Parse a body as JSON; raises `JSONDecodeError` if it is not JSON."""
    if len(body) <= SMALL:
        return json.loads(body)
    return await anyio.to_thread.run_sync(loads_in_steps, body, limiter=_limiter())


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _reading.get()
    except LookupError:
        made = anyio.CapacityLimiter(AT_ONCE)
        _reading.set(made)
        return made


def loads_in_steps(body: bytes) -> Any:
    """Like `json.loads`, in steps of one list element."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    at = _skip(text, 0)
    found, at = _object(text, at) if text[at : at + 1] == "{" else _value(text, at)
    if (at := _skip(text, at)) != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return found


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        key, at = _decoder.raw_decode(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        found[key], at = _value(text, _skip(text, at + 1))
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return found, at + 1
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _skip(text, at + 1)


def _value(text: str, at: int) -> tuple[Any, int]:
    if text[at : at + 1] != "[":
        return _decoder.raw_decode(text, at)
    found: list[Any] = []
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        return found, at + 1
    while True:
        one, at = _decoder.raw_decode(text, at)
        found.append(one)
        if len(found) > MAX_ELEMENTS:
            raise HTTPException(413, f"a list has more than {MAX_ELEMENTS} elements: send it in parts")
        at = _skip(text, at)
        if text[at : at + 1] == "]":
            return found, at + 1
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at


# -- requests and replies -----------------------------------------------------------------------------------------

MAX_FIELDS = 100  # of a body; no route has as many
BIGGEST = 2**31 - 1  # the largest integer that every database can store


class Body(BaseModel):
    """The body of a request; unknown fields are refused, so that a misspelt name is not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, given: Any) -> Any:
        """Refuse thousands of fields at once: reporting each unknown one would block all requests."""
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"there are more than {MAX_FIELDS} fields")
        return given


class _Patient(Request):
    """A request whose body is parsed without blocking the others."""

    async def json(self) -> Any:
        """The body, as JSON."""
        if not hasattr(self, "_json"):
            self._json = await read_json(await self.body())
        return self._json


class PatientRoute(APIRoute):
    """A route that parses long bodies in a thread, in steps."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler with such a request."""
        handle = super().get_route_handler()

        async def handling(request: Request) -> Response:
            return await handle(_Patient(request.scope, request.receive))

        return handling


def api_router() -> APIRouter:
    """A router of /api."""
    return APIRouter(prefix="/api", default_response_class=Reply, route_class=PatientRoute)


class Reply(Response):
    """JSON in ASCII: any text that a model can write, also lone surrogates, arrives as it was stored."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Replace numbers that are not finite by null; only if there are any, because the search takes time."""
        try:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
        except ValueError:
            return json.dumps(without_infinities(content), allow_nan=False, separators=(",", ":")).encode("ascii")


class Refused(HTTPException):
    """A refused request, with one sentence that says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)


def add_error_replies(app: FastAPI) -> None:
    """Return every error as `{"error": sentence}`."""
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _wrong)
    app.add_exception_handler(TetherError, _expected)
    app.add_exception_handler(Exception, _bug)


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return Reply({"error": redact(str(error.detail))}, error.status_code, headers=error.headers)


def _wrong(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return Reply({"error": redact(f"{place or 'the body'}: {first['msg']}")}, 422)


def _expected(request: Request, error: Exception) -> Response:
    assert isinstance(error, TetherError)
    status = 503 if isinstance(error, StorageError) else 400 if isinstance(error, UsageError | ValueError) else 409
    if status == 503 and not _asks_as_owner(request):  # the message names the database, its host and its user
        _log.tell(str(error))
        return Reply({"error": AWAY}, status, headers={"retry-after": "5"})
    return Reply({"error": redact(str(error))}, status)


AWAY = "the database of this Studio does not answer now: what you sent was not saved; try again in a moment"


def _asks_as_owner(request: Request) -> bool:
    return getattr(getattr(request.state, "person", None), "role", None) == "owner"


class _Log:
    """Messages for the operator, on standard error; the same message at most every ten seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self._every, self._last = every, ("", float("-inf"))

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if text != self._last[0] or now - self._last[1] >= self._every:
            self._last = (text, now)
            say(f"tether: {text}")


_log = _Log()


def _bug(_: Request, error: Exception) -> Response:
    """The traceback is in the server's log; the client gets one sentence."""
    return Reply({"error": f"this is a bug in Tether Studio: {type(error).__name__}"}, 500)
