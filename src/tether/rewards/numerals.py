"""Numbers in a model's text, as exact fractions. No text makes these functions raise, and none is ever evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 100  # a longer numeral, or a larger exponent, is no number: exact arithmetic on it could take for ever

_NUMERAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,4})?|\.[0-9]+"
# A dash is a sign only where it touches its number and does not follow another: "3-4" holds 3 and 4, "= -4" holds -4.
NUMERAL = re.compile(rf"(?P<sign>(?<![0-9A-Za-z)\]}}%.])[-+])?(?P<currency>[$€£])?(?P<digits>{_NUMERAL})")
DASHES = str.maketrans({"−": "-", "–": "-", "‑": "-"})  # minus, en dash, non-breaking hyphen


def numerals(text: str) -> list[str]:
    """Every number in the text as it is written, with its sign and without its currency or thousands separators."""
    found = NUMERAL.finditer(text.translate(DASHES))
    return [(match["sign"] or "") + match["digits"].replace(",", "") for match in found]


def last_numeral(text: str) -> str | None:
    """The last number in the text as it is written."""
    return found[-1] if (found := numerals(text)) else None


def number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else: `-1,234.50`, `$3`, `2e-3`."""
    match = NUMERAL.fullmatch(text.strip().translate(DASHES))
    if match is None:
        return None
    digits = match["digits"].replace(",", "")
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or abs(int(exponent or 0)) > MAX_DIGITS:
        return None
    return Fraction(digits) * (-1 if match["sign"] == "-" else 1)


def plain_numeral(text: str) -> str | None:
    """A text that is one number as `numerals` gives it, `6250` for `$6,250`; None for any other text."""
    match = NUMERAL.fullmatch(text.translate(DASHES))
    return None if match is None else (match["sign"] or "") + match["digits"].replace(",", "")


def last_number(text: str) -> Fraction | None:
    """The value of the last number in the text; None where there is none, or it is out of all proportion."""
    written = last_numeral(text)
    return None if written is None else number(written)


def close(value: Fraction, reference: Fraction, tolerance: float) -> bool:
    """Whole numbers are equal or they are not; other numbers are equal within `tolerance` times |reference|."""
    if value == reference:
        return True
    if value.denominator == reference.denominator == 1:
        return False
    return abs(value - reference) <= Fraction(tolerance) * abs(reference)
