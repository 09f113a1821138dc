"""What is varied: `ppo.clip_range=0.1,0.2,0.3`, or a range such as `kl.coef=0.01..0.3:log`.

Values are read as the flags of `tether train` are. Everything wrong is a ConfigError before anything is trained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tether.config.control_recipe import ControlRecipe
from tether.config.load import Keys, change_settings, read_flags
from tether.config.recipes import Recipe
from tether.config.schema import Leaf, union_members
from tether.errors import ConfigError

AnyRecipe: TypeAlias = Recipe | ControlRecipe

RANGE = re.compile(r"^(?P<low>[^,]*?)\.\.(?P<high>[^,:]*)(?P<log>:log)?(?::(?P<count>[^:]*))?$")
MAX_POINTS = 100  # of a range
MAX_WHOLE = 16  # whole numbers that a range without a number of points may list
# Keys that say which run it is; a sweep sets them itself.
OWN = {"run.name", "run.directory", "run.group", "run.note", "run.tags", "run.objects", "store.url"}


@dataclass(frozen=True)
class Variation:
    """One varied key: listed values, or a range from `low` to `high`."""

    key: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def is_range(self) -> bool:
        """Whether values are drawn from a range."""
        return not self.values

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that a check before the start must accept: all that are listed, or both ends."""
        return self.values or (self.low, self.high)

    @property
    def spread(self) -> str:
        """The range as it was written."""
        return f"{shown(self.low)}..{shown(self.high)}{':log' if self.log else ''}"

    def as_json(self) -> dict[str, Any]:
        """Plain data for the manifest."""
        if self.values:
            return {"key": self.key, "values": list(self.values)}
        return {"key": self.key, "low": self.low, "high": self.high, "log": self.log, "whole": self.whole}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Variation:
        """The variation that `as_json` described."""
        return cls(**{**record, "values": tuple(record.get("values", ()))})


def shown(value: Any) -> str:
    """A value as a recipe would have it, in few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def in_words(values: Mapping[str, Any]) -> str:
    """Settings on one line: `ppo.clip_range 0.1, kl.coef 0.01`."""
    return ", ".join(f"{key} {shown(value)}" for key, value in values.items()) or "as in the recipe"


# -- reading ------------------------------------------------------------------------------------------------------


def parse_options(words: Sequence[str]) -> dict[str, str]:
    """The `--vary KEY=VALUES` options by key."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip().replace("-", "_")
        if not key or not equals:
            raise ConfigError(
                f"--vary {word}: write KEY=VALUES, such as ppo.clip_range=0.1,0.2 or kl.coef=0.01..0.3:log"
            )
        if key in found:
            raise ConfigError(f"--vary {key} is given twice: give all its values at once, {found[key]},{text}")
        found[key] = text
    return found


def read_variations(recipe: AnyRecipe, vary: Mapping[str, Any]) -> tuple[Variation, ...]:
    """Every varied key with its values or range; raises ConfigError for what the recipe would reject."""
    keys = Keys(type(recipe))
    found: list[Variation] = []
    for key, given in _flat(vary, keys).items():
        leaf = keys.leaves.get(key)
        if leaf is None:
            where = "a section: vary one of its keys" if key in keys.sections else None
            raise ConfigError(f"--vary {key} is {where}" if where else keys.unknown(key, "--vary", None))
        if key == "run.seed":
            raise ConfigError("--vary run.seed: every setting is run with several seeds already; use --seeds")
        if key in OWN:
            raise ConfigError(f"--vary {key}: a sweep names, groups and stores its runs itself; vary another key")
        found.append(read_variation(keys, leaf, given))
    if not found:
        raise ConfigError("nothing is varied: add --vary KEY=VALUES, or a section `sweep:` with `vary:` to the recipe")
    for variation in found:
        for value in variation.ends:
            check_values(recipe, {variation.key: value}, alone=True)
    return tuple(found)


def _flat(vary: Mapping[str, Any], keys: Keys, prefix: str = "") -> dict[str, Any]:
    """Nested sections in a file as dotted keys."""
    found: dict[str, Any] = {}
    for name, given in vary.items():
        key = f"{prefix}{name}"
        inner = _flat(given, keys, f"{key}.") if isinstance(given, Mapping) and key in keys.sections else {key: given}
        if twice := found.keys() & inner.keys():
            raise ConfigError(f"vary: {min(twice)} is given twice: keep one")
        found |= inner
    return found


def read_variation(keys: Keys, leaf: Leaf, given: Any) -> Variation:
    """One key, as text from the command line or as a value from a file."""
    if not isinstance(given, str):
        values = given if isinstance(given, list) else [given]
        return _listed(leaf.key, [tuple(each) if isinstance(each, list) else each for each in values], "[]")
    if _is_number(leaf) and (match := RANGE.match(given.strip())):
        return _range(leaf, given, match)
    words = split_commas(given)
    values = [value for word in words for value in _one_value(keys, leaf, word)]
    return _listed(leaf.key, values, given)


def split_commas(text: str) -> list[str]:
    """The parts between commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _one_value(keys: Keys, leaf: Leaf, word: str) -> list[Any]:
    try:
        return [read_flags(keys, [f"--{leaf.key}={word}"])[leaf.key].value]
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"flag --{leaf.key}", f"--vary {leaf.key}")) from None


def _listed(key: str, values: Sequence[Any], text: str) -> Variation:
    if not values:
        raise ConfigError(f"--vary {key}={text}: no value is given; write {key}=VALUE,VALUE or {key}=LOW..HIGH")
    plain = [json.loads(json.dumps(value)) for value in values]
    for place, value in enumerate(plain):
        if any(_same(value, other) for other in plain[:place]):
            raise ConfigError(f"--vary {key}: {shown(value)} is listed twice: keep one")
    return Variation(key, tuple(plain))


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


# -- ranges -------------------------------------------------------------------------------------------------------


def _is_number(leaf: Leaf) -> bool:
    return any(kind in (int, float) for kind in union_members(leaf.annotation))


def _is_whole(leaf: Leaf) -> bool:
    kinds = [kind for kind in union_members(leaf.annotation) if kind in (int, float)]
    return kinds == [int]


def _range(leaf: Leaf, text: str, match: re.Match[str]) -> Variation:
    place, whole = f"--vary {leaf.key}={text}", _is_whole(leaf)
    low, high = (_end(place, match[name], whole) for name in ("low", "high"))
    log = match["log"] is not None
    if low > high:
        raise ConfigError(f"{place}: the low end {match['low']} is above the high end {match['high']}: exchange them")
    if low == high:
        raise ConfigError(f"{place}: the range is empty, because both ends are equal: write {leaf.key}={match['low']}")
    if log and low <= 0:
        raise ConfigError(f"{place}: a logarithmic range starts above 0, and this one starts at {match['low']}")
    if match["count"] is None:
        every = range(int(low), int(high) + 1) if whole and not log else ()
        if 0 < len(every) <= MAX_WHOLE:
            return Variation(leaf.key, tuple(every))
        return Variation(leaf.key, (), low, high, log, whole)
    count = int(match["count"]) if match["count"].isascii() and match["count"].isdecimal() else 0
    if not 2 <= count <= MAX_POINTS:
        raise ConfigError(f"{place}: the number of points is a whole number from 2 to {MAX_POINTS}")
    return Variation(leaf.key, spaced(low, high, count, log=log, whole=whole))


def _end(place: str, text: str, whole: bool) -> Any:
    try:
        number = float(text)
    except ValueError:
        what = "an end is missing" if not text.strip() else f"{text} is not a number"
        raise ConfigError(f"{place}: {what}; write LOW..HIGH, such as 0.01..0.3 or 0.01..0.3:log:5") from None
    if not math.isfinite(number):
        raise ConfigError(f"{place}: {text} is not a finite number")
    if whole and number != int(number):
        raise ConfigError(f"{place}: the key takes whole numbers, and {text} is not one")
    return int(number) if whole else number


def spaced(low: float, high: float, count: int, *, log: bool, whole: bool) -> tuple[Any, ...]:
    """`count` values from low to high, evenly spaced, or in their logarithm; whole numbers without repeats."""
    parts = [place / (count - 1) for place in range(count)]
    between = [low * (high / low) ** part if log else low + (high - low) * part for part in parts]
    exact = [low, *between[1:-1], high]
    if whole:
        return tuple(dict.fromkeys(round(value) for value in exact))
    return tuple(float(f"{value:.6g}") for value in exact)


# -- settings and the recipe --------------------------------------------------------------------------------------


def check_values(recipe: AnyRecipe, values: Mapping[str, Any], *, alone: bool = False) -> AnyRecipe:
    """The recipe with these settings; raises ConfigError that names them where it rejects them."""
    try:
        return change_settings(recipe, [], dict(values))
    except ConfigError as error:
        said = str(error).replace(" in the settings", "")
        raise ConfigError(f"--vary {in_words(values)}: {said}" if not alone else f"--vary {said}") from None


def value_in(recipe: AnyRecipe, key: str) -> Any:
    """The recipe's own value of a dotted key, as plain data."""
    found: Any = recipe.model_dump(mode="json")
    for part in key.split("."):
        found = found[part]
    return found
