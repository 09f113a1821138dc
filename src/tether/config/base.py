"""The base class of all settings, and settings that every run and every data section share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tether.errors import UsageError
from tether.redact import redact_url


class Settings(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Option = bool | int | float | str | list[bool | int | float | str] | None

MAX_NOTE = 10_000  # characters
MAX_TAGS = 20
MAX_GROUP = 100  # characters
TAG = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.:+-]{0,39}")

Tag = Annotated[str, Field(pattern=f"^{TAG.pattern}$")]


class InWords(NamedTuple):
    """What help and errors call a type of text, in its annotation."""

    words: str


CodeReference = Annotated[str, Field(pattern=r"^.+:.+$"), InWords("file.py:name")]
"""The user's code: `file.py:name` or `package.module:name`. `tether.config.allowed_code.code_names` lists every key."""


def check_url(key: str, url: str) -> str:
    """The URL of a server, without secrets: recipes are saved."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{key} {url!r} must start with http:// or https:// and name a host")
    try:
        port_is_wrong = parts.port == 0
    except ValueError:
        port_is_wrong = True
    if port_is_wrong:
        raise ValueError(f"{key} {url!r} has a port that is not between 1 and 65535")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{key} must contain no user or password, because recipes are saved: use token_env")
    if redact_url(url) != url:
        raise ValueError(f"{key} must contain no token or key in its query, because recipes are saved: use token_env")
    return url


Paths = str | tuple[str, ...]
"""A file, a glob, a folder, a dataset id, or several of them."""

CONVERSATION = ("messages", "conversations", "prompt", "completion", "system", "tools", "text")
PREFERENCE = ("chosen", "rejected", "chosen_ended", "rejected_ended", "answers", "ranks", "ended", "label")
INSTRUCTION = ("instruction", "input", "output")
FIELDS = (*CONVERSATION, *PREFERENCE, *INSTRUCTION, "answer", "id", "reference")
"""The fields that Tether reads, as named in docs/data.md."""


def read_columns(words: Sequence[str]) -> dict[str, str]:
    """Parse `prompt=question` words, one or several with commas between, into a mapping."""
    pairs = [pair.partition("=") for word in words for pair in word.split(",")]
    if wrong := [field for field, equals, column in pairs if not (field and equals and column)]:
        raise UsageError(f"--columns: expected FIELD=COLUMN, such as prompt=question, got {wrong[0]}")
    columns = {field.strip(): column.strip() for field, _, column in pairs}
    if unknown := unknown_fields(columns):
        raise UsageError(f"--{unknown}")
    return columns


def unknown_fields(columns: Iterable[str]) -> str | None:
    """The error message for a mapping with an unknown field; None where all fields are known."""
    if unknown := sorted(set(columns) - set(FIELDS)):
        return (
            f"columns names {', '.join(unknown)}, which is not a field that Tether reads: write {{field: your column}} "
            f"with one of {', '.join(FIELDS)}"
        )
    return None


class ReadSettings(Settings):
    """How to read records."""

    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Maps fields to columns of your records, such as {prompt: question, answer: solution}.",
    )
    config: str | None = Field(default=None, description="Configuration of a dataset that is given by its id.")
    split: str = Field(default="train", description="Split of a dataset (a saved folder, or an id).")
    held_out_split: str | None = Field(
        default=None,
        description="Split to hold out. Without a held-out source, it is a split of the same dataset.",
    )
    system_prompt: str | None = Field(default=None, description="System message for every conversation that has none.")
    chat_template_kwargs: dict[str, Option] = Field(
        default_factory=dict, description="Passed to the chat template, such as {enable_thinking: false}."
    )

    @field_validator("columns")
    @classmethod
    def _known_fields(cls, columns: dict[str, str]) -> dict[str, str]:
        if wrong := unknown_fields(columns):
            raise ValueError(wrong)
        return columns
