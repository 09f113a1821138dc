"""Reading records from files, with errors that name the file, the line and the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tether.data.formats import read_rows, shown
from tether.errors import DataError
from tether.types import Message, Prompt


@dataclass(frozen=True)
class Record:
    """One record and where it stands."""

    fields: dict[str, Any]
    place: str  # "file.jsonl, line 3"

    def has(self, field: str) -> bool:
        """Whether the field is there and holds something: null, and an empty cell of a CSV file, hold nothing."""
        return self.fields.get(field) is not None

    def text(self, field: str) -> str:
        """A field that must be a non-empty text."""
        value = self.required(field)
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{self.place}: field {field!r} must be a text that is not empty, not {shown(value)}")
        return self._whole(field, value)

    def flag(self, field: str) -> bool:
        """A field that is true where it is left out, and must be true or false where it is not."""
        value = self.fields[field] if self.has(field) else True
        if not isinstance(value, bool):
            raise DataError(f"{self.place}: field {field!r} must be true or false, not {shown(value)}")
        return value

    def texts(self, field: str) -> list[str]:
        """A field that must be a list of non-empty texts."""
        value = self.required(field)
        if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
            raise DataError(f"{self.place}: field {field!r} must be a list of texts, not {shown(value)}")
        return [self._whole(f"{field}[{index}]", item) for index, item in enumerate(value)]

    def messages(self, field: str) -> tuple[Message, ...]:
        """A field that must be a list of {role, content}."""
        value = self.required(field)
        if not isinstance(value, list) or not value:
            raise DataError(f"{self.place}: field {field!r} must be a list of messages, not {shown(value)}")
        return tuple(self._message(field, index, item) for index, item in enumerate(value))

    def _message(self, field: str, index: int, item: Any) -> Message:
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
            raise DataError(
                f"{self.place}: field '{field}[{index}]' must be {{role: text, content: text}}, not {shown(item)}"
            )
        return Message(role=item["role"], content=self._whole(f"{field}[{index}]", item["content"]))

    def _whole(self, field: str, text: str) -> str:
        """The text, which must be made of whole characters: JSON can hold one half of a pair that stands for one."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise DataError(f"{self.place}: field {field!r} holds {half}, which is half of a character") from None
        return text

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
        if self.fields[field] is None:
            raise DataError(f"{self.place}: field {field!r} is empty")
        return self.fields[field]


def read_records(path: str) -> list[Record]:
    """The records of a .jsonl, .json, .csv or .parquet file."""
    records = [Record(row.fields, row.place) for row in read_rows(path)]
    if not records:
        raise DataError(f"{path}: the file has no records")
    return records


def read_prompts(path: str) -> Sequence[Prompt]:
    """Prompts from records with `prompt`, and where a check needs them `id` and `answer`.

    Of a conversation in `messages` the prompt is all up to the last answer, which becomes `meta["completion"]`. Every
    other field is kept in `meta`.
    """
    return [_prompt(record, index) for index, record in enumerate(read_records(path))]


def _prompt(record: Record, index: int) -> Prompt:
    meta = {name: value for name, value in record.fields.items() if name not in ("id", "prompt", "answer", "messages")}
    answer = record.fields.get("answer")
    identity = str(record.fields["id"]) if record.has("id") else str(index)
    if record.has("messages") and not record.has("prompt"):
        messages = record.messages("messages")
        if messages[-1]["role"] == "assistant":
            messages, meta["completion"] = messages[:-1], messages[-1]["content"]
        if not messages:
            raise DataError(f"{record.place}: field 'messages' holds an answer and no question")
    else:
        messages = record.prompt_messages()
    return Prompt(identity, messages, None if answer is None else str(answer), meta)
