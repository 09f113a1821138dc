"""Units behind a number: which letters are one, and which of them are the same."""

from __future__ import annotations

import re

_NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "inch inches",  # not `in`, which is a word: there are 7 in all
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
    """The text without the unit behind its number, and that unit where it is one that is known by name."""
    match = UNIT.fullmatch(text)
    if match is None:
        return text, None
    if match["words"] is None:
        named = {"C": "celsius", "F": "fahrenheit"}.get(match["scale"] or "", "deg")
        return match["number"].strip(), named
    return match["number"].strip(), known_unit(match["words"])


def known_unit(words: str) -> str | None:
    """`square meters` is m^2, `km per hour` km/h; None where any word is no unit, such as `apples`."""
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
