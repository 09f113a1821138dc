"""Read records and their turns, with errors that name the file, the line and the field.

A record may hold the token ids that were sampled, beside the texts. Encoding a text again can give other tokens,
because a model can spell one text in several ways. Where a record names its token ids and their tokenizer, the row is
made from those ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tether.config.base import Paths, ReadSettings
from tether.data.formats import shown
from tether.data.sources import read_source, shown_source
from tether.errors import DataError
from tether.types import Message

# ShareGPT's names for the roles.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content")
_HH = re.compile(r"\n\n(Human|Assistant): ?")


def message_of(item: Any, place: str) -> Message:
    """A message from {role, content} or {from, value}; keeps the tool fields that chat templates read."""
    if not isinstance(item, dict):
        raise DataError(f"{place} must be {{role: text, content: text}}, not {shown(item)}")
    if item.get("role") is None and item.get("from") is not None:
        return _from_sharegpt(item, place)
    content = _content(item.get("content"), place)
    calls = item.get("tool_calls") or []
    if not isinstance(item.get("role"), str) or (content is None and not calls):
        raise DataError(f"{place} must be {{role: text, content: text}}, not {shown(item)}")
    message = Message(role=item["role"], content=content or "")
    if calls:
        message["tool_calls"] = [_call(call, place) for call in calls]
    for name in _KEPT:
        if isinstance(item.get(name), str):
            message[name] = item[name]
    return message


def _from_sharegpt(item: dict[str, Any], place: str) -> Message:
    speaker, value = item["from"], item.get("value")
    if speaker not in SPEAKERS or not isinstance(value, str):
        raise DataError(f"{place} must be {{from: human or gpt or system or tool, value: text}}, not {shown(item)}")
    if speaker != "function_call":
        return Message(role=SPEAKERS[speaker], content=value)
    try:
        call = json.loads(value)
    except ValueError:
        call = None
    if not isinstance(call, dict) or "name" not in call:
        return Message(role="assistant", content=value)
    return Message(role="assistant", content="", tool_calls=[_call({"type": "function", "function": call}, place)])


def _content(content: Any, place: str) -> str | None:
    """A text, or a list of parts that are all texts."""
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise DataError(f"{place} must be {{role: text, content: text}}, not content {shown(content)}")
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place} has content that is not text, such as an image: Tether trains on text alone")
    return "".join(map(str, texts))


def _call(call: Any, place: str) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI's are JSON text, which templates would quote again."""
    if not isinstance(call, dict):
        raise DataError(f"{place} has a tool call that is not an object, but {shown(call)}")
    found = {name: value for name, value in call.items() if value is not None}
    function = found.get("function", found)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return found
        changed = {**function, "arguments": parsed}
        return {**found, "function": changed} if "function" in found else changed
    if isinstance(arguments, dict):  # Arrow gives every call the argument names of all calls
        changed = {**function, "arguments": {name: value for name, value in arguments.items() if value is not None}}
        return {**found, "function": changed} if "function" in found else changed
    return found


def from_marked_text(text: str) -> tuple[Message, ...] | None:
    """The turns of a text marked "\\n\\nHuman: ... \\n\\nAssistant: ..." (Anthropic's HH); None without marks."""
    if not text.lstrip().startswith("Human:"):
        return None
    pieces = _HH.split("\n\n" + text.lstrip())[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [
        Message(role=roles[mark], content=said.strip()) for mark, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    return tuple(turns)


def common_prefix(one: str, other: str) -> int:
    """The number of characters that two texts share at the beginning, up to the end of a word in both."""
    shared = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    while shared and not (one[shared : shared + 1].isspace() or one[shared - 1].isspace()):
        shared -= 1
    return len(one[:shared].rstrip())


PLAIN = ReadSettings()


@dataclass(frozen=True)
class Record:
    """One record and its place. `columns` maps fields to column names where they differ."""

    fields: dict[str, Any]
    place: str  # "file.jsonl, line 3"
    columns: Mapping[str, str] = field(default_factory=dict[str, str])

    def has(self, field: str) -> bool:
        """Whether the field has a value; null and an empty CSV cell count as missing."""
        return self.value(field) is not None

    def value(self, field: str) -> Any:
        """The value of a field; None where it is absent. `extra.answer` reads `answer` inside `extra`."""
        column = self.column(field)
        if column in self.fields or "." not in column:
            return self.fields.get(column)
        value: Any = self.fields
        for name in column.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def column(self, field: str) -> str:
        """The record's own name for a field."""
        return self.columns.get(field, field)

    def text(self, field: str) -> str:
        """A field that must be a non-empty text."""
        value = self.required(field)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{self.place}: field {self.column(field)!r} must be a non-empty text, not {shown(value)}")
        return self._whole(field, value)

    def flag(self, field: str) -> bool:
        """An optional boolean field, True by default."""
        value = self.value(field) if self.has(field) else True
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):  # a CSV cell
            value = value.strip().lower() == "true"
        if not isinstance(value, bool):
            raise DataError(f"{self.place}: field {self.column(field)!r} must be true or false, not {shown(value)}")
        return value

    def label(self) -> bool:
        """The field `label`: true for a good answer."""
        self.required("label")
        return self.flag("label")

    def texts(self, field: str) -> list[str]:
        """A field that must be a list of non-empty texts."""
        value = self.required(field)
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise DataError(f"{self.place}: field {self.column(field)!r} must be a list of texts, not {shown(value)}")
        return [self._whole(f"{field}[{index}]", item) for index, item in enumerate(value)]

    def messages(self, field: str) -> tuple[Message, ...]:
        """A field that must be a list of messages: {role, content}, or ShareGPT's {from, value}."""
        value = self.required(field)
        if not isinstance(value, list) or not value:
            raise DataError(
                f"{self.place}: field {self.column(field)!r} must be a list of messages, not {shown(value)}"
            )
        turns = [message_of(item, f"{self.place}: field '{self.column(field)}[{at}]'") for at, item in enumerate(value)]
        for index, turn in enumerate(turns):
            self._whole(f"{field}[{index}]", turn["content"])
        return tuple(turns)

    def tools(self) -> tuple[dict[str, Any], ...]:
        """The field `tools`: a list of descriptions, or the same as JSON text; empty where it is missing."""
        value = self.value("tools")
        if isinstance(value, str):
            try:
                value = json.loads(value) if value.strip() else None
            except ValueError as error:
                raise DataError(f"{self.place}: field {self.column('tools')!r} must be JSON text ({error})") from None
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise DataError(f"{self.place}: field {self.column('tools')!r} must be a list of tools, not {shown(value)}")
        return tuple(without_nulls(tool) for tool in value)

    def _whole(self, field: str, text: str) -> str:
        """The text; raises where it contains a lone surrogate, which JSON allows and UTF-8 does not."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise DataError(
                f"{self.place}: field {self.column(field)!r} holds {half}, which is half of a character"
            ) from None
        return text

    def required(self, field: str) -> Any:
        """The value of a field; raises where it is missing or empty."""
        column, value = self.column(field), self.value(field)
        mapped = f" (data.columns says that it is {field})" if column != field else ""
        if value is None and column not in self.fields:
            known = ", ".join(sorted(self.fields)) or "none"
            raise DataError(f"{self.place}: field {column!r}{mapped} is missing (fields there: {known})")
        if value is None:
            raise DataError(f"{self.place}: field {column!r}{mapped} is empty")
        return value


def read_records(paths: Paths, settings: ReadSettings = PLAIN, *, split: str | None = None) -> list[Record]:
    """The records of a source, in order; `split` overrides the one in the settings."""
    rows = read_source(paths, split or settings.split, settings.config)
    records = [Record(row.fields, row.place, settings.columns) for row in rows]
    if not records:
        raise DataError(f"{shown_source(paths)}: the file has no records")
    return records


def without_nulls(value: Any) -> Any:
    """A nested value without the keys that are null: Arrow gives every object of a column the keys of all objects."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


PROMPT_IDS, TOKEN_IDS, TOKENIZER = "prompt_token_ids", "token_ids", "tokenizer"
MAX_ID = 2**31 - 1


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of what maps messages to token ids and back: the vocabulary and the chat template."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    template = getattr(tokenizer, "chat_template", None)
    content = json.dumps([vocabulary, template], separators=(",", ":"), default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class SampledIds:
    """The token ids of one prompt and its answers; an answer includes its end token, where it has one."""

    tokenizer: str  # its digest
    prompt: Sequence[int]
    answers: Sequence[Sequence[int]]


def sampled_ids(record: Record, count: int) -> SampledIds | None:
    """The ids in a record of `count` answers; None where it has none.

    `chosen` and `rejected` have theirs in `chosen_token_ids` and `rejected_token_ids`; `answers` has them in
    `token_ids`.
    """
    if not record.has(PROMPT_IDS) or not record.has(TOKENIZER):
        return None
    if record.has(TOKEN_IDS):
        given = record.value(TOKEN_IDS)
        if not isinstance(given, list) or len(given) != count:
            raise DataError(f"{record.place}: field '{TOKEN_IDS}' must hold {count} lists of token ids")
        found = [_ids(record, f"{TOKEN_IDS}[{index}]", ids) for index, ids in enumerate(given)]
    elif record.has("chosen_token_ids") and record.has("rejected_token_ids"):
        found = [_ids(record, name, record.value(name)) for name in ("chosen_token_ids", "rejected_token_ids")]
    else:
        return None
    if len(found) != count:
        return None  # the ids belong to answers that are not read here
    return SampledIds(record.text(TOKENIZER), _ids(record, PROMPT_IDS, record.value(PROMPT_IDS)), found)


def _ids(record: Record, field: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(one) is int and 0 <= one <= MAX_ID for one in value):
        raise DataError(f"{record.place}: field {field!r} must be a list of token ids, not {shown(value)}")
    return value
