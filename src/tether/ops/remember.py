"""Answers that are remembered for as long as what they are about lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


def remembered(find: Callable[..., T]) -> Callable[..., T]:
    """`find`, which remembers what it said of its first argument for as long as that lives.

    Where a batch's tokens stand is asked by every role, and on a device each answer makes the host wait. So this is
    for questions about the masks of frozen batches, which nobody writes to.
    """
    known: Any = WeakIdKeyDictionary()

    @functools.wraps(find)
    def ask(first: Any, *others: Any) -> T:
        if first not in known:
            known[first] = find(first, *others)
        return known[first]

    return ask
