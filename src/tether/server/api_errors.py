"""Errors in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

from typing import Any

from tether.studio.replies import Reply


class ApiError(Exception):
    """A request that is refused: its status, one sentence, and the field that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """As OpenAI says it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def reply(self) -> Reply:
        """The response."""
        headers = {429: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(self.status)
        return Reply(self.body(), self.status, headers=headers)
