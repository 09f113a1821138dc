"""What of a completion is the answer. Each way gives None where there is no such thing, and none of them raises."""

from __future__ import annotations

import itertools
import re

from tether.config.rewards import Extract
from tether.rewards.numerals import last_numeral, number

_MARKER = re.compile(r"\banswer\b[\s*_]*(?:is\b|:|=)[\s*_:]*([^\n]*)|^####([^\n]*)", re.IGNORECASE | re.MULTILINE)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def extract(completion: str, how: Extract, reference: str | None = None) -> str | None:
    """The answer in a completion.

    whole: all of it. last_line: its last line that is not blank. marker: what the last `<answer>...</answer>`, or else
    the last `answer:`, `answer is` or `####`, is followed by on its line. last_number: its last number. boxed: what is
    in the last `\\boxed{...}`. auto: boxed, else marker, else the last line; where the reference is
    a number, the last number in the box, in the marker's first sentence, or in all of it.
    """
    match how:
        case "whole":
            return completion.strip() or None
        case "last_line":
            return last_line(completion)
        case "marker":
            return marked(completion)
        case "last_number":
            return last_numeral(completion)
        case "boxed":
            return boxed(completion)
        case "auto":
            found = boxed(completion) or marked(completion)
            if reference is not None and number(reference) is not None:
                return last_numeral(completion if found is None else first_sentence(found))
            return found or last_line(completion)


def last_line(completion: str) -> str | None:
    """The last line that is not blank."""
    return next((line.strip() for line in reversed(completion.splitlines()) if line.strip()), None)


def marked(completion: str) -> str | None:
    """What stands in the last pair of answer tags, or else after the last marker on its line."""
    tags = list(_TAG.finditer(completion))
    for opening, closing in reversed(list(itertools.pairwise(tags))):
        if not opening[1] and closing[1]:
            return completion[opening.end() : closing.start()].strip() or None
    matches = list(_MARKER.finditer(completion))
    if not matches:
        return None
    return (matches[-1][1] or matches[-1][2] or "").strip(" \t\r*_`") or None


def first_sentence(text: str) -> str:
    """What comes before the first period with a space after it: the answer, in `7. I had 3 tries.`"""
    return re.split(r"\.\s", text, maxsplit=1)[0]


def boxed(completion: str) -> str | None:
    """What stands in the last `\\boxed{...}` whose braces close."""
    for opening in reversed(list(_BOX.finditer(completion))[-8:]):
        depth = 1
        for place in range(opening.end(), len(completion)):
            depth += {"{": 1, "}": -1}.get(completion[place], 0)
            if depth == 0:
                return completion[opening.end() : place].strip() or None
    return None
