"""Whether two answers to a mathematical question are the same: numbers, fractions, percentages and simple LaTeX.

Nothing is computed from what the model wrote: `2+2` is not 4 and `14/2` is not 7, for otherwise repeating the question
would be an answer to it. A fraction counts in lowest terms only. No text makes these functions raise.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from tether.rewards.extract import boxed, first_sentence, last_line, marked
from tether.rewards.numerals import DASHES, NUMERAL, close, number

_SPACING = re.compile(r"\\[,;:! ]|\\q?quad\b|\\displaystyle\b|\\left\b|\\right\b|[$~]|\\[()\[\]]")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION_NAME = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_BARE_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])")
_ASSIGNMENT = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*=\s*([^=]+)")
_UNIT = re.compile(
    r"(?P<number>.*[0-9}])\s*(?:\^\{?\\circ\}?|°|(?<=\s)[A-Za-z]{2,}(?:[ /][A-Za-z]+)*\.?\s?(?:\^\{?[23]\}?)?)"
)
_FRACTION = re.compile(r"(-?)(?:([0-9]+)(?: |(?=\\)))?(?:\\frac\{(-?[0-9]+)\}\{([0-9]+)\}|(-?[0-9]+)/([0-9]+))")
_POWER = re.compile(r"(-?[0-9.]+)(?:\\times|\\cdot|×|\*)10\^\{?(-?[0-9]{1,3})\}?")
_ANY_NUMBER = re.compile(rf"-?\\frac\{{-?[0-9]+\}}\{{[0-9]+\}}|-?[0-9]+/[0-9]+|(?:{NUMERAL.pattern})\s*(?:\\?%)?")
_MOST_CHARACTERS = 2_000  # a longer answer is no answer


def math_correct(completion: str, reference: str, tolerance: float) -> bool:
    """Whether the completion's final answer is the reference's.

    The final answer is the last `\\boxed{...}`; else what follows the last "answer:" or "answer is"; else the last
    line. Without a box, a sentence around a number or a fraction is read for the last one in it.
    """
    if (answer := boxed(completion)) is not None:
        return same_answer(answer, reference, tolerance)
    after_marker = marked(completion)
    answer = after_marker or last_line(completion)
    if answer is None:
        return False
    if same_answer(answer, reference, tolerance):
        return True
    found = _last_number(normalise(first_sentence(answer) if after_marker else answer))
    return found is not None and same_answer(found, reference, tolerance)


def same_answer(answer: str, reference: str, tolerance: float) -> bool:
    """Whether both say the same number, or the same text when white space, case and LaTeX's decoration are put aside.

    `50%` is the number 0.5, and also matches a bare 50, for questions that ask for a percentage.
    """
    ours, theirs = normalise(answer), normalise(reference)
    if _plain(ours) == _plain(theirs):
        return bool(ours)
    if (parts := _members(ours)) and (others := _members(theirs)):
        same_brackets = (ours[0], ours[-1], len(parts)) == (theirs[0], theirs[-1], len(others))
        return same_brackets and all(same_answer(*pair, tolerance) for pair in zip(parts, others, strict=True))
    (value, percent), (wanted, wanted_percent) = value_of(ours), value_of(theirs)
    if value is None or wanted is None:
        return False
    scale = Fraction(1, 100)
    exact = close(value * (scale if percent else 1), wanted * (scale if wanted_percent else 1), tolerance)
    return exact or (percent != wanted_percent and close(value, wanted, tolerance))


def normalise(text: str) -> str:
    """Without LaTeX's spacing and dollar signs, units and a leading `x =`; fractions as `\\frac{a}{b}`."""
    text = text[:_MOST_CHARACTERS].translate(DASHES).replace("{,}", ",").replace("\\$", "").replace("\\!", "")
    text = _TEXT.sub(r" \1 ", _SPACING.sub(" ", text))
    text = _BARE_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION_NAME.sub(r"\\frac", text))
    text = re.sub(r"\s*([{}])\s*", r"\1", " ".join(text.split())).strip(" .,;:*_`")
    if assignment := _ASSIGNMENT.fullmatch(text):
        text = assignment[1].strip()
    if unit := _UNIT.fullmatch(text):
        text = unit["number"].strip()
    return text


def value_of(text: str) -> tuple[Fraction | None, bool]:
    """The value of a normalised text that is one number, fraction or `a \\times 10^n`; and whether it had a percent."""
    bare = re.sub(r"\s*\\?%$", "", text)
    percent = bare != text
    squeezed = bare.replace(" ", "")
    if power := _POWER.fullmatch(squeezed):
        value = number(f"{power[1]}e{power[2]}")
    else:
        value = number(bare) if number(bare) is not None else _fraction(bare)
    return value, percent


def _fraction(text: str) -> Fraction | None:
    """`-3/4`, `\\frac{3}{4}`, `1\\frac{3}{4}` or `1 3/4`; None unless in lowest terms, with a whole part or without."""
    match = _FRACTION.fullmatch(text)
    if match is None or len(text) > 100:
        return None
    sign, whole, top, bottom = match[1], int(match[2] or 0), int(match[3] or match[5]), int(match[4] or match[6])
    if bottom < 2 or math.gcd(top, bottom) != 1 or (match[2] and not 0 < top < bottom):
        return None
    return (whole + Fraction(top, bottom)) * (-1 if sign else 1)


def _last_number(text: str) -> str | None:
    """The last number or fraction of a sentence, unless it is part of a larger expression: `2 + 3`, `5x`, `x^2`."""
    matches = list(_ANY_NUMBER.finditer(text))
    if not matches:
        return None
    before, after = text[: matches[-1].start()].rstrip(), text[matches[-1].end() :]
    in_expression = re.search(r"[-+*/^_×÷·{(]$|\\[a-z]+$", before) or re.match(r"[A-Za-z^({\\]|\s*[-+*/×÷·]", after)
    return None if in_expression else matches[-1].group().strip()


def _members(text: str) -> list[str]:
    """The members of `(a, b)`, `[a, b]` or `\\{a, b\\}`; none where there are no brackets or no comma."""
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return []
    parts = [part.strip() for part in text[1:-1].split(",")]
    flat = all(part and not set(part) & set("()[]") for part in parts)
    return parts if flat and 1 < len(parts) <= 16 else []


def _plain(text: str) -> str:
    squeezed = "".join(text.split()).casefold().rstrip(".")
    return squeezed[1:-1] if re.fullmatch(r"\([a-z]\)", squeezed) else squeezed
