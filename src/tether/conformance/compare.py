"""Holding a result against a trace, place by place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mismatch:
    """One place of a result that is not what the trace says."""

    path: str
    expected: Any
    actual: Any


def plain(result: Any) -> Any:
    """The result in lists, dicts and numbers: tensors and arrays through `.tolist()`, tuples as lists."""
    if hasattr(result, "tolist"):
        return plain(result.tolist())
    if isinstance(result, dict):
        return {key: plain(item) for key, item in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(item) for item in result]
    return result


def mismatches(expected: Any, actual: Any, tolerance: float, path: str) -> Iterator[Mismatch]:
    """Every place where |actual - expected| <= tolerance * max(1, |expected|) does not hold.

    An expected None is an undefined place and is passed over. Booleans, integers and strings are compared exactly. A
    list of another length, or a number where a list should be, is one mismatch at that path.
    """
    if expected is None:
        return
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            yield Mismatch(path, expected, actual)
            return
        for index, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            yield from mismatches(wanted, got, tolerance, f"{path}[{index}]")
    elif not _agrees(expected, actual, tolerance):
        yield Mismatch(path, expected, actual)


def _agrees(expected: Any, actual: Any, tolerance: float) -> bool:
    if not isinstance(expected, float):
        return not isinstance(actual, list) and bool(actual == expected)
    if not isinstance(actual, (int, float)):
        return False
    return abs(actual - expected) <= tolerance * max(1.0, abs(expected))  # False for NaN, as it should be
