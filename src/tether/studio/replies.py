"""What the server answers with: strict JSON in ASCII, and errors that are one sentence."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from tether.errors import StorageError, TetherError, UsageError
from tether.runs.store.schema import without_infinities

BIGGEST = 2**31 - 1  # the largest number that every database keeps as an integer


class Body(BaseModel):
    """A request's body: what is not known is refused, so that a misspelt name is not passed over."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(Response):
    """JSON in ASCII: any text that a model can write, halves of characters too, arrives as it was stored."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Numbers that are not finite become null. Most answers have none, and looking for them takes its time."""
        try:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
        except ValueError:
            return json.dumps(without_infinities(content), allow_nan=False, separators=(",", ":")).encode("ascii")


class Refused(HTTPException):
    """A request that cannot be met, with the sentence that says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)


def add_error_replies(app: FastAPI) -> None:
    """Every error leaves as `{"error": sentence}`."""
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _wrong)
    app.add_exception_handler(TetherError, _expected)
    app.add_exception_handler(Exception, _bug)


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return Reply({"error": str(error.detail)}, error.status_code, headers=error.headers)


def _wrong(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return Reply({"error": f"{place or 'the body'}: {first['msg']}"}, 422)


def _expected(_: Request, error: Exception) -> Response:
    assert isinstance(error, TetherError)
    status = 503 if isinstance(error, StorageError) else 400 if isinstance(error, UsageError | ValueError) else 409
    return Reply({"error": str(error)}, status)


def _bug(_: Request, error: Exception) -> Response:
    """The traceback is in the server's log; a stranger to the code is helped more by a sentence."""
    return Reply({"error": f"this is a bug in Tether Studio: {type(error).__name__}"}, 500)
