"""Cutting a text at the end of a paragraph, so that a row fits. A paragraph ends at a newline."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_BREAK = re.compile(r"[^\S\n]*\n\s*")


def cut_end(text: str, fits: Callable[[str], bool]) -> str | None:
    """`text` up to the last end of a paragraph at which it `fits`; None where not even the first paragraph does.

    `fits` must hold for every beginning of a text that it holds for. For answers: what is left is how it began.
    """
    return _longest([text[: found.start()] for found in _breaks(text)], fits)


def cut_middle(text: str, fits: Callable[[str], bool]) -> str | None:
    """`text` without as few paragraphs as will do, taken from just before the last; None where that is not enough.

    For prompts: the papers cut the post and keep the "TL;DR:" after it; instructions and questions stand first or last.
    The first paragraph and the last are always kept.
    """
    breaks = _breaks(text)
    if len(breaks) < 2:
        return None
    last = text[breaks[-1].start() :]
    return _longest([text[: found.start()] + last for found in breaks[:-1]], fits)


def _breaks(text: str) -> list[re.Match[str]]:
    """The breaks between paragraphs: none before the first, and none after the last."""
    first = len(text) - len(text.lstrip())
    return list(_BREAK.finditer(text, first, len(text.rstrip())))


def _longest(candidates: Sequence[str], fits: Callable[[str], bool]) -> str | None:
    """The last of the candidates, each longer than the one before, that fits; found by halving."""
    low, high = 0, len(candidates)  # all before `low` fit, none from `high` on
    while low < high:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            low = middle + 1
        else:
            high = middle
    return candidates[low - 1] if low else None
