"""Mathematical answers as small trees that are compared by value: numbers, units, terms.

A text becomes one of

- `Quantity`: q * sqrt(n) * pi^k with q a fraction, n squarefree, such as `6\\pi`, `\frac{\\sqrt{3}}{2}`, `1,234.50`;
- `Group`: a set, a list, a union, a sum or a product, which are unordered; a tuple or an interval, which are ordered;
- `Words`: everything else, compared character by character.

Numbers are exact fractions, and a known unit after a number is split off. Nothing is computed from what the model
wrote: `2+2` is a sum and not 4; `14/2`, `\\sqrt{16}` and `2/4` are words. Otherwise repeating the question would count
as an answer. No text makes these functions raise, and none is evaluated.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 100  # longer numerals and larger exponents are rejected: exact arithmetic on them could run forever

_NUMERAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,4})?|\.[0-9]+"
# A dash is a sign only if it touches its number and follows no other: "3-4" contains 3 and 4, "= -4" contains -4.
NUMERAL = re.compile(rf"(?P<sign>(?<![0-9A-Za-z)\]}}%.])[-+])?(?P<currency>[$€£])?(?P<digits>{_NUMERAL})")
DASHES = str.maketrans({"−": "-", "–": "-", "‑": "-"})  # minus, en dash, non-breaking hyphen


def numerals(text: str) -> list[str]:
    """Every number in the text as written, with its sign, without currency or thousands separators."""
    found = NUMERAL.finditer(text.translate(DASHES))
    return [(match["sign"] or "") + match["digits"].replace(",", "") for match in found]


def last_numeral(text: str) -> str | None:
    """The last number in the text as written."""
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
    """A text that is one number, in the form of `numerals`: `6250` for `$6,250`; None for any other text."""
    match = NUMERAL.fullmatch(text.translate(DASHES))
    return None if match is None else (match["sign"] or "") + match["digits"].replace(",", "")


def last_number(text: str) -> Fraction | None:
    """The value of the last number in the text; None where there is none or it exceeds MAX_DIGITS."""
    written = last_numeral(text)
    return None if written is None else number(written)


def close(value: Fraction, reference: Fraction, tolerance: float) -> bool:
    """Whether two numbers match: exactly for whole numbers, otherwise within `tolerance` times |reference|."""
    if value == reference:
        return True
    if value.denominator == reference.denominator == 1:
        return False
    return abs(value - reference) <= Fraction(tolerance) * abs(reference)


_NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "inch inches",  # not `in`, which is also a word: "there are 7 in all"
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram gramme",
    "kg": "kg kilogram kilogramme",
    "t": "t ton tonne",
    "lb": "lb pound",
    "oz": "oz ounce",
    "ml": "ml milliliter millilitre",
    "l": "l liter litre",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week",
    "month": "month",
    "year": "year yr",
    "deg": "deg degree",
    "rad": "rad radian",
    "celsius": "celsius",
    "fahrenheit": "fahrenheit",
    "K": "kelvin",
    "N": "n newton",
    "J": "j joule",
    "kJ": "kj kilojoule",
    "W": "w watt",
    "kW": "kw kilowatt",
    "V": "v volt",
    "A": "ampere amp",
    "Hz": "hz hertz",
    "Pa": "pa pascal",
    "mph": "mph",
    "dollar": "dollar usd buck",
    "cent": "cent",
    "euro": "euro eur",
}
UNITS = {alias: unit for unit, aliases in _NAMES.items() for alias in aliases.split()}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
_WORD = re.compile(r"[A-Za-z]+|\^\{?[23]\}?|/")
_ATTACHED = "|".join(sorted((alias for alias in UNITS if len(alias) > 1), key=len, reverse=True))

_DEGREES = r"(?:\^\{?\\circ\}?|°|º)\s*(?P<scale>[CF]\b)?"
_ONE_LETTER = "[" + "".join(sorted({*"mgtlshNJWVACFKLG"})) + "]"
_SPACED = rf"(?<=\s)(?:[A-Za-z]{{2,}}|{_ONE_LETTER})(?:(?:\s?/\s?|\s)[A-Za-z]+)*\.?\s?(?:\^\{{?[23]\}}?)?"
UNIT = re.compile(
    rf"(?P<number>.*[0-9}}\]i]|.*\\pi)\s*(?:{_DEGREES}|(?P<words>{_SPACED}|(?<=[0-9])(?:{_ATTACHED})\b(?:\^\{{?[23]\}}?)?))"
)


def split_unit(text: str) -> tuple[str, str | None]:
    """The text without the unit after its number, and that unit where it is a known one."""
    match = UNIT.fullmatch(text)
    if match is None:
        return text, None
    if match["words"] is None:
        named = {"C": "celsius", "F": "fahrenheit"}.get(match["scale"] or "", "deg")
        return match["number"].strip(), named
    return match["number"].strip(), known_unit(match["words"])


def known_unit(words: str) -> str | None:
    """`square meters` is m^2, `km per hour` km/h; None where any word is not a unit, such as `apples`."""
    named: list[str] = []
    pending = ""
    for word in _WORD.findall(words):
        lower = word.lower()
        if lower in ("/", "per"):
            named.append("/")
        elif lower in _POWERS:
            pending = "^" + _POWERS[lower]
            if lower in ("squared", "cubed") and named:
                named[-1], pending = named[-1] + pending, ""
        elif word.startswith("^"):
            if not named:
                return None
            named[-1] += "^" + word.strip("^{}")
        else:
            unit = UNITS.get(lower) or UNITS.get(lower.removesuffix("s")) or UNITS.get(lower.removesuffix("es"))
            if unit is None:
                return None
            named.append(unit + pending)
            pending = ""
    return "".join(named) or None


MAX_MEMBERS = 16
MAX_RADICAND = 1_000_000

_OPENING, _CLOSING = "([{", ")]}"
_SQRT = r"\\sqrt\{(?P<radicand>[0-9]{1,7})\}"
_PI = r"\\pi(?:\^\{?(?P<power>[1-9])\}?)?"
_TIMES = r"(?:(?:\\cdot|\\times|\*)(?=\\))?"  # before a root or pi only
_TERM = re.compile(rf"(?:(?P<coefficient>[0-9][0-9,.]*|\.[0-9]+){_TIMES})?(?:{_SQRT}{_TIMES})?(?:{_PI})?")
_FRACTION = re.compile(
    r"(?P<whole>[0-9]+)?\\frac\{(?P<top>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}\{(?P<bottom>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_SLASHED = re.compile(r"(?:(?P<whole>[0-9]+) )?(?P<top>[^/]+)/(?P<bottom>[^/]+)")
_SCIENTIFIC = re.compile(
    r"(?P<mantissa>[0-9][0-9.]*)(?:\\times|\\cdot|\*)10\^(?:\{(?P<braced>-?[0-9]{1,3})\}|(?P<bare>-?[0-9]{1,3}))"
)
_FACTORS = re.compile(r"(?P<coefficient>-?[0-9]*)(?P<factors>(?:\([^()]+\)(?:\^\{?[0-9]\}?)?)+)")
_FACTOR = re.compile(r"\([^()]+\)(?:\^\{?[0-9]\}?)?")


@dataclass(frozen=True)
class Quantity:
    r"""`value * sqrt(radicand) * pi ** power`."""

    value: Fraction
    radicand: int = 1
    power: int = 0


@dataclass(frozen=True)
class Words:
    """A text, without white space and in lower case."""

    text: str


@dataclass(frozen=True)
class Group:
    """Several answers in one. `kind` distinguishes sets, lists, sums, and the brackets of tuples and intervals."""

    kind: str
    members: tuple[Term, ...]

    @property
    def ordered(self) -> bool:
        """Whether the order of the members matters: True for tuples and intervals."""
        return self.kind[0] in "(["


Term = Quantity | Words | Group


def same_term(ours: Term, theirs: Term, tolerance: float) -> bool:
    """Whether two trees are equal: numbers by `close`, members in any order unless the group is ordered."""
    match ours, theirs:
        case Quantity(), Quantity():
            like = (ours.radicand, ours.power) == (theirs.radicand, theirs.power)
            return like and close(ours.value, theirs.value, tolerance)
        case Group(), Group():
            if ours.kind != theirs.kind or len(ours.members) != len(theirs.members):
                return False
            if ours.ordered:
                pairs = zip(ours.members, theirs.members, strict=True)
                return all(same_term(mine, yours, tolerance) for mine, yours in pairs)
            return _same_members(ours.members, theirs.members, tolerance)
        case _:
            return ours == theirs


def _same_members(ours: tuple[Term, ...], theirs: tuple[Term, ...], tolerance: float) -> bool:
    left = list(theirs)
    for mine in ours:
        found = next((place for place, yours in enumerate(left) if same_term(mine, yours, tolerance)), None)
        if found is None:
            return False
        del left[found]
    return True


def parse_term(text: str, depth: int = 0) -> Term:
    """The tree of a normalized text; see `math_answer.normalise`."""
    if (quantity := parse_quantity(text)) is not None:
        return quantity
    if depth < 4:
        for parse in (_list, _union, _bracketed, _sum, _product):
            if (group := parse(text, depth)) is not None:
                return group
    return words(text)


def words(text: str) -> Words:
    """The text itself, without the brackets around a single letter, as in `(B)`."""
    squeezed = "".join(text.split()).casefold().rstrip(".")
    return Words(squeezed[1:-1] if re.fullmatch(r"\([a-z]\)", squeezed) else squeezed)


# -- quantities ---------------------------------------------------------------------------------------------------


def parse_quantity(text: str) -> Quantity | None:
    r"""`-3`, `1,234.5`, `3/4`, `1 3/4`, `\frac{\sqrt{3}}{2}`, `\frac{1}{2}\pi`, `3\times10^{4}`; None for all else."""
    if len(text) > 120:
        return None
    sign, text = (-1, text[1:].lstrip()) if text.startswith("-") else (1, text)
    text = text.removeprefix("+") if sign == 1 else text
    found = _term(text) or _scientific(text) or _fraction(text)
    return None if found is None else Quantity(sign * found.value, found.radicand, found.power)


def _term(text: str) -> Quantity | None:
    """A coefficient, a root and a power of pi, two of which may be absent."""
    plain = number(text) if re.match(r"[0-9.$€£]", text) else None
    if plain is not None:
        return Quantity(plain)
    match = _TERM.fullmatch("".join(text.split()))
    if match is None or not (match["radicand"] or "\\pi" in text):
        return None
    coefficient = number(match["coefficient"]) if match["coefficient"] else Fraction(1)
    radicand = int(match["radicand"] or 1)
    if coefficient is None or not (match["radicand"] is None or _squarefree(radicand)):
        return None
    return Quantity(coefficient, radicand, int(match["power"] or 1) if "\\pi" in text else 0)


def _squarefree(radicand: int) -> bool:
    """Whether the root is in simplest form: no square divides it, and it is not 1."""
    if not 1 < radicand <= MAX_RADICAND:
        return False
    return all(radicand % (root * root) for root in range(2, math.isqrt(radicand) + 1))


def _scientific(text: str) -> Quantity | None:
    match = _SCIENTIFIC.fullmatch(text.replace(" ", ""))
    value = match and number(f"{match['mantissa']}e{match['braced'] or match['bare']}")
    return None if value is None else Quantity(value)


def _fraction(text: str) -> Quantity | None:
    r"""`a/b` and `\frac{a}{b}` in lowest terms, with a whole part before or a root or pi after; b may hold a root."""
    match = _SLASHED.fullmatch(text)
    behind = Quantity(Fraction(1))
    if match is None:
        match = _FRACTION.match(text.replace(" ", ""))
        if match is None:
            return None
        rest = match.string[match.end() :]
        if rest and (match["whole"] or (found := _term(rest)) is None or found.value != 1):
            return None
        behind = _term(rest) or behind if rest else behind
    top, bottom = _signed_term(match["top"].strip()), _term(match["bottom"].strip())
    if top is None or bottom is None or bottom.power or not bottom.value:
        return None
    if not _lowest_terms(top.value, bottom, whole=match["whole"]):
        return None
    value = top.value / bottom.value / bottom.radicand
    if 1 not in (top.radicand, bottom.radicand) or 1 not in (top.radicand * bottom.radicand, behind.radicand):
        return None  # a product of two roots is not simplified
    root = top.radicand * bottom.radicand * behind.radicand
    value += int(match["whole"] or 0)
    return Quantity(value, root, top.power + behind.power)


def _signed_term(text: str) -> Quantity | None:
    inner = _term(text.removeprefix("-"))
    return Quantity(-inner.value, inner.radicand, inner.power) if inner and text.startswith("-") else inner


def _lowest_terms(top: Fraction, bottom: Quantity, *, whole: str | None) -> bool:
    if top.denominator != 1 or bottom.value.denominator != 1:
        return False
    if bottom.value < 2 and bottom.radicand == 1:
        return False
    if whole and not 0 < top < bottom.value:
        return False
    return math.gcd(top.numerator, bottom.value.numerator) == 1


# -- groups -------------------------------------------------------------------------------------------------------


def _list(text: str, depth: int) -> Group | None:
    """`2, 3`, `2 and 3`, `x = 2 or x = 3`: an unordered list without brackets."""
    parts = split_top(re.sub(r",?\s(?:and|or)\s", ", ", text), ",")
    if not 1 < len(parts) <= MAX_MEMBERS:
        return None
    return Group("list", tuple(parse_term(without_name(part), depth + 1) for part in parts))


def _union(text: str, depth: int) -> Group | None:
    parts = split_top(text.replace("\\cup", "∪"), "∪")
    return Group("union", _members(parts, depth)) if 1 < len(parts) <= MAX_MEMBERS else None


def _bracketed(text: str, depth: int) -> Group | None:
    r"""`(a, b)`, `[a, b)` in their order, `\{a, b\}` in any."""
    braces = re.fullmatch(r"\\?\{(.*?)\\?\}", text)
    if braces is None and not (len(text) > 2 and text[0] in "([" and text[-1] in ")]"):
        return None
    inner = braces[1] if braces else text[1:-1]
    if not _balanced(inner):
        return None
    parts = split_top(inner, ",")
    if not all(parts) or not (1 if braces else 2) <= len(parts) <= MAX_MEMBERS:
        return None
    if braces and len(parts) == 1 and not text.startswith("\\{"):
        return None  # braces that only group LaTeX
    kind = "set" if braces else text[0] + text[-1]
    return Group(kind, _members(parts, depth))


def _sum(text: str, depth: int) -> Group | None:
    """`3+2x` equals `2x+3`; the members of a sum are not added up."""
    parts = _signed_parts(text)
    return Group("sum", _members(parts, depth)) if 1 < len(parts) <= MAX_MEMBERS else None


def _product(text: str, depth: int) -> Group | None:
    """`2(x+1)(x-3)` equals `2(x-3)(x+1)`; nothing is multiplied out."""
    match = _FACTORS.fullmatch("".join(text.split()))
    if match is None:
        return None
    factors: list[Term] = []
    for factor in _FACTOR.findall(match["factors"]):
        inner, _, power = factor.rpartition(")")
        factors.append(
            Group("product", (parse_term(inner[1:], depth + 1), Words(power)))
            if power
            else parse_term(inner[1:], depth + 1)
        )
    if len(factors) < 2 and not match["coefficient"]:
        return None
    coefficient = {"": Fraction(1), "-": Fraction(-1)}.get(match["coefficient"])
    head = Quantity(coefficient if coefficient is not None else number(match["coefficient"]) or Fraction(0))
    return Group("product", (head, *factors)) if len(factors) <= MAX_MEMBERS else None


def _members(parts: list[str], depth: int) -> tuple[Term, ...]:
    return tuple(parse_term(part, depth + 1) for part in parts)


def without_name(text: str) -> str:
    r"""Without a leading `x =`, `f(x) =` or `x \in`."""
    name = re.match(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*(?:=(?!=)|\\in\b)\s*(?=\S)", text)
    rest = text[name.end() :] if name else text
    return text if name and "=" in rest else rest


def split_top(text: str, separator: str) -> list[str]:
    """The parts between separators outside brackets; the thousands of a number stay together."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == separator and depth == 0 and not (separator == "," and _thousands(text, place)):
            parts.append(text[start:place].strip())
            start = place + 1
    parts.append(text[start:].strip())
    return parts if all(parts) else [text]


def _thousands(text: str, place: int) -> bool:
    """Whether the comma at `place` separates the thousands of a number: `1,234`."""
    before, after = re.search(r"[0-9]+$", text[:place]), re.match(r"[0-9]+", text[place + 1 :])
    return before is not None and after is not None and len(before[0]) <= 3 and len(after[0]) == 3


def _signed_parts(text: str) -> list[str]:
    """The terms of a sum, each with its sign; signs inside brackets, exponents and at the start split nothing."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        head = text[start:place].strip()
        if character in "+-" and depth == 0 and head and head[-1] not in "^_*/=+-(<>e,":
            parts.append(head)
            start = place
    parts.append(text[start:].strip())
    cleaned = ["-" + part[1:].strip() if part.startswith("-") else part.removeprefix("+").strip() for part in parts]
    return cleaned if all(part.strip("-") for part in cleaned) and depth == 0 else [text]


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth < 0:
            return False
    return depth == 0
