"""Reading records, with errors that name the file, the line and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tether.config.reading import Paths, ReadSettings
from tether.data.formats import shown
from tether.data.sources import read_source, shown_source
from tether.data.turns import message_of
from tether.errors import DataError
from tether.types import Message

PLAIN = ReadSettings()


@dataclass(frozen=True)
class Record:
    """One record and where it stands. `columns` says which column is which field, where their names differ."""

    fields: dict[str, Any]
    place: str  # "file.jsonl, line 3"
    columns: Mapping[str, str] = field(default_factory=dict[str, str])

    def has(self, field: str) -> bool:
        """Whether the field is there and holds something: null, and an empty cell of a CSV file, hold nothing."""
        return self.value(field) is not None

    def value(self, field: str) -> Any:
        """What the field holds; None where it is absent. `extra.answer` is inside of `extra`."""
        column = self.column(field)
        if column in self.fields or "." not in column:
            return self.fields.get(column)
        value: Any = self.fields
        for name in column.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def column(self, field: str) -> str:
        """The record's own name of a field."""
        return self.columns.get(field, field)

    def text(self, field: str) -> str:
        """A field that must be a non-empty text."""
        value = self.required(field)
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{self.place}: field {self.column(field)!r} must be a text that is not empty, not {shown(value)}"
            )
        return self._whole(field, value)

    def flag(self, field: str) -> bool:
        """A field that is true where it is left out, and must be true or false where it is not."""
        value = self.value(field) if self.has(field) else True
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):  # a cell of a CSV file
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
        """The field `tools`: a list of descriptions, or the same as JSON text; none where it is left out."""
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
        """The text, which must be made of whole characters: JSON can hold one half of a pair that stands for one."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise DataError(
                f"{self.place}: field {self.column(field)!r} holds {half}, which is half of a character"
            ) from None
        return text

    def required(self, field: str) -> Any:
        """A field that must be there."""
        column, value = self.column(field), self.value(field)
        mapped = f" (data.columns says that it is {field})" if column != field else ""
        if value is None and column not in self.fields:
            known = ", ".join(sorted(self.fields)) or "none"
            raise DataError(f"{self.place}: field {column!r}{mapped} is missing (fields there: {known})")
        if value is None:
            raise DataError(f"{self.place}: field {column!r}{mapped} is empty")
        return value


def read_records(paths: Paths, settings: ReadSettings = PLAIN, *, split: str | None = None) -> list[Record]:
    """The records of a source, in order; `split` in place of the one in the settings."""
    rows = read_source(paths, split or settings.split, settings.config)
    records = [Record(row.fields, row.place, settings.columns) for row in rows]
    if not records:
        raise DataError(f"{shown_source(paths)}: the file has no records")
    return records


def without_nulls(value: Any) -> Any:
    """A nested value without the keys that hold nothing: Arrow gives every object of a column the keys of all."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
