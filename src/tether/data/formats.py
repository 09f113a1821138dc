"""Read records from JSONL, JSON, CSV and Parquet files; the file ending selects the reader.

All formats but Parquet may be compressed (`.jsonl.gz`). Each reader yields every row with the line it begins on. Errors
are DataErrors that name the file, the line and, where the format allows it, the field.
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tether.errors import DataError
from tether.files import NotPlainError, read_plain, require_plain

# CSV cells hold only text. In these fields, and in any cell that is a list of objects, the text is parsed as JSON.
NESTED = (
    *("messages", "conversations", "answers", "ranks", "ended", "chosen_ended", "rejected_ended"),
    *("prompt_token_ids", "token_ids", "chosen_token_ids", "rejected_token_ids"),
)
MAX_RECORD = 1 << 23  # characters of one record: longer than any context, and minutes of tokenizing
MAX_CELL = MAX_RECORD  # Python's csv module rejects cells above 128 KiB by default

_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:')
_BLANK = re.compile(r"[ \t\r\n]*")


class FileRow(NamedTuple):
    """The fields of one record, and its place: `file.csv, line 3`."""

    fields: dict[str, Any]
    place: str


def read_rows(path: str) -> Iterator[FileRow]:
    """The rows of a file, read by its ending."""
    reader = READERS.get(ending_of(path))
    if reader is None:
        raise DataError(f"{path}: unknown file ending {ending_of(path)!r}; records are read from {', '.join(READERS)}")
    try:
        require_plain(path)
        yield from reader(path)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path}: this is a folder; name a file of records") from None
    except NotPlainError as error:
        raise DataError(f"{path}: {error.strerror}; name a regular file: records are read more than once") from None
    except (NotADirectoryError, PermissionError) as error:
        raise DataError(f"{path}: it cannot be read: {error.strerror}") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            raise
        raise DataError(f"{path}: it cannot be read: {error.strerror}") from None


def ending_of(path: str) -> str:
    """The file ending that selects the reader; a final `.gz` is part of it."""
    name = Path(path).name.lower()
    whole = Path(name.removesuffix(".gz")).suffix
    return f"{whole}.gz" if name.endswith(".gz") else whole


# -- JSON ---------------------------------------------------------------------------------------------------------


def _read_jsonl(path: str) -> Iterator[FileRow]:
    """One object per line; blank lines are skipped."""
    for number, line in enumerate(_text(path).split("\n"), start=1):  # not splitlines: U+2028 may stand in a text
        if line.strip():
            place = f"{path}, line {number}"
            _check_length(len(line), place)
            value, end = _decode(line, _skip_blank(line, 0), path, number)
            if line[end:].strip():
                raise DataError(f"{place}: more than one value, from column {end + 1} on: one record a line")
            yield FileRow(_object(value, place), place)


def _read_json(path: str) -> Iterator[FileRow]:
    """A list of objects; the line of a record is the line on which it begins."""
    text = _text(path)
    place = _skip_blank(text, 0)
    if text[place : place + 1] != "[":
        raise DataError(
            f"{path}, line 1: a .json file holds one list of objects; with one object a line it is a .jsonl"
        )
    place = _skip_blank(text, place + 1)
    line, counted = 1, 0
    while text[place : place + 1] != "]":
        line, counted = line + text.count("\n", counted, place), place
        value, end = _decode(text, place, path, line)
        where = f"{path}, line {line}"
        _check_length(end - place, where)
        yield FileRow(_object(value, where), where)
        place = _skip_blank(text, end)
        if text[place : place + 1] == ",":
            place = _skip_blank(text, place + 1)
            if text[place : place + 1] == "]":
                raise DataError(f"{path}, line {_line(text, place)}: a comma that no record follows")
        elif text[place : place + 1] != "]":
            raise DataError(f"{path}, line {_line(text, place)}: expected a comma or ] after the previous record")
    if text[place + 1 :].strip():
        raise DataError(f"{path}, line {_line(text, place)}: something follows the end of the list")


def _decode(text: str, place: int, path: str, line: int) -> tuple[Any, int]:
    """The JSON value that begins at `place` of `text`, and where it ends; `line` is the line it begins on."""
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        broken = line + text.count("\n", place, error.pos)
        begun = f", in the record that begins on line {line}" if broken != line else ""
        keys = _KEY.findall(text, place, error.pos)
        near = f", near field {keys[-1]!r}" if keys else ", before any field"
        what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise DataError(f"{path}, line {broken}: not valid JSON ({what}{near}{begun})") from None
    except DataError as error:
        raise DataError(f"{path}, line {line}: {error}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number with too many digits
        raise DataError(f"{path}, line {line}: not JSON that can be read ({error})") from None


def _check_length(characters: int, place: str) -> None:
    if characters > MAX_RECORD:
        raise DataError(f"{place}: a record of {characters:,} characters, and one may have {MAX_RECORD:,}: split it")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different: plain JSON parsing would silently keep the last value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise DataError(f"field {twice!r} is given more than once")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: a record must be an object with named fields, not {shown(value)}")
    return value


# -- CSV ----------------------------------------------------------------------------------------------------------


def _read_csv(path: str) -> Iterator[FileRow]:
    """A header row, then one record per row. Line numbers count file lines, also inside quoted cells with newlines.

    An empty cell is a missing value. Fields that are not texts hold JSON.
    """
    text = _text(path)
    header: list[str] | None = None
    for line, cells in _csv_rows(path, text):
        place = f"{path}, line {line}"
        if header is None:
            header = _header(cells, place)
            continue
        if len(cells) > len(header):
            raise DataError(
                f"{place}: the row has {len(cells)} cells and the header names {len(header)} fields, the last of them "
                f"{header[-1]!r}: put quotes around a cell that holds a comma"
            )
        fields = {name: cell or None for name, cell in zip(header, cells, strict=False)}
        yield FileRow({name: _nested(name, cell, place) for name, cell in fields.items()}, place)


def _csv_rows(path: str, text: str) -> list[tuple[int, list[str]]]:
    """(line it begins on, cells) of every row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    previous = csv.field_size_limit(MAX_CELL)
    rows: list[tuple[int, list[str]]] = []
    line = 1
    try:
        for cells in reader:
            if cells:
                header = header or cells
                rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        column = _broken_cell(text, line)
        name = header[column] if column < len(header) else f"column {column + 1}"
        raise DataError(f"{path}, line {line}: not valid CSV in field {name!r} ({error}): check its quotes") from None
    finally:
        csv.field_size_limit(previous)
    return rows


def _broken_cell(text: str, line: int) -> int:
    """The index of the cell, in the row that begins on `line`, whose quote is not closed or not followed by a comma."""
    row = "".join(io.StringIO(text, newline="").readlines()[line - 1 :])
    column, place = 0, 0
    cell = re.compile(r'"(?:[^"]|"")*"|[^",\r\n][^,\r\n]*|')
    while (found := cell.match(row, place)) and row[found.end() : found.end() + 1] == ",":
        column, place = column + 1, found.end() + 1
    return column


def _header(cells: list[str], place: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    seen: set[str] = set()
    for column, name in enumerate(names):
        if not name:
            raise DataError(f"{place}: column {column + 1} of the header has no name")
        if name in seen:
            raise DataError(f"{place}: the header names field {name!r} more than once")
        seen.add(name)
    return names


def _nested(name: str, cell: str | None, place: str) -> Any:
    """A cell's value: parsed as JSON where the field is not a text or the cell is a list of objects (messages)."""
    if cell is None or not (name in NESTED or cell.lstrip().startswith("[{")):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        if name not in NESTED:
            return cell
        raise DataError(f"{place}: field {name!r} must hold JSON text, not {shown(cell)} ({error})") from None


# -- Parquet ------------------------------------------------------------------------------------------------------


def _read_parquet(path: str) -> Iterator[FileRow]:
    """One record per row; errors give the row number, counted from 1, in place of a line."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow, which is not installed: pip install 'tether-rl[parquet]'"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_parquet(path, file.metadata)
            for batch in file.iter_batches():
                for row in range(batch.num_rows):
                    number += 1
                    place = f"{path}, row {number}"
                    yield FileRow({name: _cell(batch[name][row], name, place) for name in batch.schema.names}, place)
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, (FileNotFoundError, IsADirectoryError)):
            raise
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}, after row {number}: not a Parquet file that can be read ({reason})") from None


def _cell(scalar: Any, name: str, place: str) -> Any:
    try:
        value = scalar.as_py()
        if isinstance(value, str | bytes):
            _check_length(len(value), place)
        return value
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: field {name!r} is not UTF-8 text ({error.reason})") from None


# -- small parts --------------------------------------------------------------------------------------------------


def _text(path: str) -> str:
    """The file as text, without a UTF-8 byte order mark."""
    data = read_plain(path)
    if path.lower().endswith(".gz"):
        data = _inflated(data, path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        keys = _KEY.findall(data[: error.start].rpartition(b"\n")[2].decode("utf-8", "replace"))
        near = f", near field {keys[-1]!r}" if keys else ""
        raise DataError(f"{path}, line {line}: not UTF-8 text ({error.reason} at byte {error.start}{near})") from None


def _inflated(packed: bytes, path: str) -> bytes:
    """Decompress, with a limit on the ratio, which stops a small file from expanding to gigabytes."""
    most = inflate_limit(len(packed))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
            data = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a complete gzip file ({error}): compress it again") from None
    if len(data) > most:
        raise DataError(f"{path}: inflates to more than {most >> 20} MiB, {_TOO_DENSE}")
    return data


MIN_INFLATED = 256 << 20  # every file may inflate to this many bytes
MAX_RATIO = 100  # a larger result may be at most this many times the file's size; texts reach 3 to 20
_TOO_DENSE = f"over {MAX_RATIO} times its size: if you trust it, unpack it yourself and name the unpacked file"


def inflate_limit(size: int) -> int:
    """The maximum number of bytes that a compressed file of `size` bytes may inflate to."""
    return max(MIN_INFLATED, MAX_RATIO * size)


def _check_parquet(path: str, metadata: Any) -> None:
    """Apply the same limit to Parquet, from its footer; rows count too, since equal values are stored only once."""
    most = inflate_limit(Path(path).stat().st_size)
    said = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    least = 16 * metadata.num_rows * max(1, metadata.num_columns)
    if max(said, least) > most:
        raise DataError(f"{path}: its {metadata.num_rows:,} rows inflate to more than {most >> 20} MiB, {_TOO_DENSE}")


def _skip_blank(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    assert found is not None
    return found.end()


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def shown(value: Any) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


READERS: dict[str, Callable[[str], Iterator[FileRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl.gz": _read_jsonl,
    ".json.gz": _read_json,
    ".csv.gz": _read_csv,
}
