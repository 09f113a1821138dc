"""Reading records from files, with errors that name the file, the line and the field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.errors import DataError
from tether.types import Message, Prompt


@dataclass(frozen=True)
class Record:
    """One record and where it stands."""

    fields: dict[str, Any]
    place: str  # "file.jsonl, line 3"

    def text(self, field: str) -> str:
        """A field that must be a non-empty text."""
        value = self.required(field)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{self.place}: field {field!r} must be a text that is not empty, not {_shown(value)}")
        return value

    def texts(self, field: str) -> list[str]:
        """A field that must be a list of non-empty texts."""
        value = self.required(field)
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise DataError(f"{self.place}: field {field!r} must be a list of texts, not {_shown(value)}")
        return value

    def messages(self, field: str) -> tuple[Message, ...]:
        """A field that must be a list of {role, content}."""
        value = self.required(field)
        if not isinstance(value, list) or not value:
            raise DataError(f"{self.place}: field {field!r} must be a list of messages, not {_shown(value)}")
        return tuple(self._message(field, index, item) for index, item in enumerate(value))

    def _message(self, field: str, index: int, item: Any) -> Message:
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
            raise DataError(
                f"{self.place}: field '{field}[{index}]' must be {{role: text, content: text}}, not {_shown(item)}"
            )
        return Message(role=item["role"], content=item["content"])

    def prompt_messages(self) -> tuple[Message, ...]:
        """The `prompt` field: a text, or a list of messages."""
        if isinstance(self.required("prompt"), list):
            return self.messages("prompt")
        return (Message(role="user", content=self.text("prompt")),)

    def required(self, field: str) -> Any:
        """A field that must be there."""
        if field not in self.fields:
            known = ", ".join(sorted(self.fields)) or "none"
            raise DataError(f"{self.place}: field {field!r} is missing (fields there: {known})")
        return self.fields[field]


def read_records(path: str) -> list[Record]:
    """The records of a JSONL file; blank lines are passed over."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    records = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise DataError(f"{path}: the file has no records")
    return records


def _parse(line: str, place: str) -> Record:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(fields, dict):
        raise DataError(f"{place}: a record must be an object with named fields, not {_shown(fields)}")
    return Record(fields, place)


def read_prompts(path: str) -> Sequence[Prompt]:
    """Prompts from records with `prompt`, and where a check needs them `id` and `answer`."""
    prompts: list[Prompt] = []
    for index, record in enumerate(read_records(path)):
        answer = record.fields.get("answer")
        identity = str(record.fields.get("id", index))
        prompts.append(Prompt(identity, record.prompt_messages(), None if answer is None else str(answer)))
    return prompts


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
