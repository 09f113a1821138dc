"""The fields of a request and the shape of errors, in OpenAI's names.

A field that would change the answer and is not supported raises an error that names it. An error is
{"error": {message, type, param, code}}.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tether.studio.replies import Reply


class ApiError(Exception):
    """A rejected request: its status, one sentence, and the wrong field."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def reply(self) -> Reply:
        """The response."""
        headers = {429: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(self.status)
        return Reply(self.body(), self.status, headers=headers)


MAX_STOPS, MAX_CHOICES, MAX_MESSAGES, MAX_TOP = 16, 64, 1000, 20

Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Texts = Annotated[list[str], Field(fail_fast=True)]  # report only the first wrong one
Ids = Annotated[list[int], Field(fail_fast=True)]
Stop = str | Annotated[list[str], Field(max_length=MAX_STOPS)]

# Fields of OpenAI's that are not supported, and the values at which they change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "web_search_options": (None,),
}


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both kinds of request share. Fields that OpenAI does not have, such as a client's own, are passed over."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None  # not OpenAI's; 0 keeps every token
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: Stop | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings at which an answer ends."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def unsupported(self) -> str | None:
        """The first field with an unsupported value."""
        given = self.model_extra or {}
        return next((name for name, idle in UNSUPPORTED.items() if name in given and given[name] not in idle), None)


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; its content may come in parts of text."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    @property
    def length(self) -> int:
        """How many letters it has."""
        return (
            sum(len(part.text) for part in self.content) if isinstance(self.content, list) else len(self.content or "")
        )

    def as_message(self) -> dict[str, str]:
        """As chat templates take it; `developer` is what OpenAI now calls `system`."""
        parts = self.content if isinstance(self.content, list) else None
        text = "".join(part.text for part in parts) if parts is not None else self.content
        return {"role": "system" if self.role == "developer" else self.role, "content": str(text or "")}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @property
    def limit(self) -> int | None:
        """The requested maximum length of an answer."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: a text to continue, or several, or token ids."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        given: Any = self.prompt
        alone = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if alone else list(given)
