"""Reading long bodies without holding up everyone else.

`json.loads` lets no other thread run until it is done, whichever thread it is called in. A long body is therefore read
in a thread and in steps: the outer object, and the elements of its lists, one by one.
"""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar
from starlette.exceptions import HTTPException

SMALL = 64 << 10  # bytes: read in a fraction of a millisecond
MAX_ELEMENTS = 100_000  # of a list; no route takes as many
AT_ONCE = 2

_SPACE = re.compile(r"[ \t\n\r]*")
_decoder = json.JSONDecoder()
_reading: RunVar[anyio.CapacityLimiter] = RunVar("big_json_reading")


async def read_json(body: bytes) -> Any:
    """The JSON of a body; a `JSONDecodeError` where it is none."""
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
    """As `json.loads`, in steps of one element of a list."""
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
