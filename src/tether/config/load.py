"""From a YAML file and dotted flags to a recipe: defaults < YAML < flags.

Everything that is given is first flattened to `dotted key -> (value, where it was given)`. Merging is then a dict
update, a section given in part keeps the rest of this recipe's own defaults, and every error can name its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tether.config.base import Settings
from tether.config.items import explain_item
from tether.config.read_yaml import RecipeLoader, in_one_line, kind_of, line_of, read_mapping, read_value
from tether.config.recipes import RECIPES, Recipe
from tether.config.schema import REQUIRED, Leaf, as_yaml, defaults, describe, kinds_of, sections
from tether.errors import ConfigError

AnyRecipe = TypeVar("AnyRecipe", bound=Settings)


class Given(NamedTuple):
    """A value and where it stands: "recipes/x.yaml, line 3", or "the flags"."""

    value: Any
    where: str


class Keys:
    """The names that one recipe class knows."""

    def __init__(self, recipe_class: type[Settings]) -> None:
        self.recipe_class = recipe_class
        self.method: str = getattr(recipe_class, "method", recipe_class.__name__)
        self.leaves: dict[str, Leaf] = {leaf.key: leaf for leaf in describe(recipe_class)}
        self.sections = sections(recipe_class)

    def nearest(self, key: str) -> str | None:
        """The known key that was most likely meant: by spelling, by last name, or by what its description says."""
        parent, _, name = key.rpartition(".")
        known = [known for known in (*self.leaves, *self.sections) if known != parent]
        begun = [known for known in self.leaves if known.startswith(f"{key}_")]
        namesakes = [known for known in self.leaves if known.rpartition(".")[2] == name]
        words = set(name.split("_"))
        described = [leaf.key for leaf in self.leaves.values() if words <= set(leaf.description.lower().split())]
        close, distant = (get_close_matches(key, known, n=1, cutoff=cutoff) for cutoff in (0.75, 0.6))
        return next(iter((*begun, *close, *namesakes, *distant, *described)), None)

    def advice(self, key: str, dashes: str = "") -> str:
        """How to repair an unknown key."""
        first = key.partition(".")[0]
        if first in RECIPES and first not in self.sections:
            return f"it belongs to another method, and this is {self.method}"
        nearest = self.nearest(key)
        return f"did you mean {dashes}{nearest}?" if nearest else f"`tether train {self.method} --help` lists them all"


def load_recipe(method: str, path: str | None = None, flags: Sequence[str] = ()) -> Recipe:
    """The recipe for `method`: its defaults, under the YAML file's keys, under the flags (`--ppo.clip_range 0.1`).

    Raises ConfigError, with one line for each problem, that names the place, the dotted key and the repair.
    """
    if method not in RECIPES:
        close = get_close_matches(method, RECIPES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(RECIPES)}"
        raise ConfigError(f"unknown method {method}: {hint}")
    return load_settings(RECIPES[method], path, flags)


def load_settings(recipe_class: type[AnyRecipe], path: str | None = None, flags: Sequence[str] = ()) -> AnyRecipe:
    """The same for any class of recipe."""
    keys = Keys(recipe_class)
    given = {**read_recipe(keys, path), **read_flags(keys, flags)}
    return _with(recipe_class, defaults(recipe_class), given, keys, path)


def recipe_from_record(record: Mapping[str, Any]) -> Recipe:
    """The recipe that a run kept: every key, and its method. Raises ValueError where it is not one."""
    if not isinstance(record, dict):
        raise ValueError("it is not a mapping of keys")
    method = record.get("method")
    if method not in RECIPES:
        raise ValueError(f"it names no method of this version ({method})")
    rest = {name: value for name, value in record.items() if name != "method"}
    return RECIPES[method].model_validate_json(json.dumps(rest), strict=True)


def change_settings(recipe: AnyRecipe, flags: Sequence[str]) -> AnyRecipe:
    """A recipe with what the flags give in place of its own."""
    keys = Keys(type(recipe))
    return _with(type(recipe), recipe.model_dump(mode="json"), read_flags(keys, flags), keys, None)


def _with(
    recipe_class: type[AnyRecipe], plain: dict[str, Any], given: dict[str, Given], keys: Keys, path: str | None
) -> AnyRecipe:
    """The recipe of these plain values under the given ones."""
    for key, (value, _) in given.items():
        *parents, name = key.split(".")
        section = plain
        for parent in parents:
            section = section[parent]
        section[name] = value
    try:
        # Strict, so that `epochs: true` is not 1; through JSON, where strict still lets a list be a tuple.
        return recipe_class.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        problems = [explain(problem, keys, given, path) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error


# -- YAML ---------------------------------------------------------------------------------------------------------


def read_recipe(keys: Keys, path: str | None) -> dict[str, Given]:
    """What the file gives, by dotted key."""
    if path is None:
        return {}
    loader, top = read_mapping(path)
    reader = _Reader(keys, loader, path)
    try:
        reader.read(top)
    except yaml.YAMLError as error:
        raise ConfigError(in_one_line(error, path)) from error
    finally:
        loader.dispose()
    _raise_if_any(reader.problems)
    return reader.given


class _Reader:
    """Walks the file's nodes beside the recipe's keys, and collects what is given and what is wrong."""

    def __init__(self, keys: Keys, loader: RecipeLoader, path: str) -> None:
        self.keys, self.loader, self.path = keys, loader, path
        self.given: dict[str, Given] = {}
        self.problems: list[str] = []

    def read(self, section: yaml.MappingNode | None, prefix: str = "") -> None:
        """Take in one section; a key that comes twice, or holds a dot, is a problem."""
        first_line: dict[str, int] = {}
        for key_node, value_node in section.value if section is not None else ():
            name, line = str(self.loader.construct_plain(key_node)), line_of(key_node)
            where = f"{self.path}, line {line}"
            if name in first_line:
                both = f"{self.path}, lines {first_line[name]} and {line}"
                self.problems.append(f"key {prefix}{name} is given twice in {both}: keep one")
            elif "." in name:
                self.problems.append(f"key {prefix}{name} in {where}: nest it, as {name.replace('.', ': {')}: ...}}")
            elif prefix + name == "method":
                _same_method(self.loader.construct_plain(value_node), self.keys.method, where)
            else:
                self.read_entry(prefix + name, value_node, where)
            first_line.setdefault(name, line)

    def read_entry(self, key: str, node: yaml.Node, where: str) -> None:
        """Take in one key, be it a section or a value."""
        if key in self.keys.sections:
            if isinstance(node, yaml.MappingNode):
                self.read(node, f"{key}.")
            elif node.tag != "tag:yaml.org,2002:null":  # `kl:` with every line under it commented out says nothing
                given = kind_of(node)
                self.problems.append(f"{key} in {where}: expected a section with keys under it, was given {given}")
        elif key in self.keys.leaves:
            value = self.loader.construct_plain(node)
            try:
                json.dumps(value)
            except (TypeError, ValueError):  # only an explicit tag, such as !!set, makes one
                expected = _a(self.keys.leaves[key].type)
                self.problems.append(f"{key} in {where}: expected {expected}, was given a {node.tag}")
            else:
                self.given[key] = Given(value, where)
        else:
            self.problems.append(f"unknown key {key} in {where}: {self.keys.advice(key)}")


def _same_method(given: Any, method: str, where: str) -> None:
    if given != method:
        raise ConfigError(
            f"method in {where} is {as_yaml(given)}, but {method} was asked for: run `tether train {given}`"
        )


# -- flags --------------------------------------------------------------------------------------------------------


def read_flags(keys: Keys, flags: Sequence[str]) -> dict[str, Given]:
    """What the flags give, by dotted key. Of a flag given twice the last counts, so that a script may append."""
    given: dict[str, Given] = {}
    problems: list[str] = []
    for flag, text in _pairs(flags):
        key = flag.removeprefix("--").replace("-", "_")
        if key in keys.leaves:
            try:
                given[key] = Given(_flag_value(keys.leaves[key], text), "the flags")
            except ValueError as error:
                problems.append(str(error))
        elif key in keys.sections:
            inside = [f"--{name}" for name in keys.leaves if name.startswith(f"{key}.")]
            problems.append(f"flag --{key} is a section: set one of its keys, such as {inside[0]}")
        else:
            problems.append(f"unknown flag --{key}: {keys.advice(key, '--')}")
    _raise_if_any(problems)
    return given


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(flag, value) pairs; None where the flag stands alone. A value may start with one dash (-0.5), not with two."""
    words = list(flags)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f"unexpected word {word}: the recipe comes right after the method, and flags are --key value"
            )
        flag, equals, text = word.partition("=")
        if equals:
            yield flag, text
        elif words and not words[0].startswith("--"):
            yield flag, words.pop(0)
        else:
            yield flag, None


def _flag_value(leaf: Leaf, text: str | None) -> Any:
    """The value in a flag. Where text is wanted, a word is taken as it stands: a run may be called 7."""
    if text is None:
        if leaf.is_switch:
            return True
        raise ConfigError(f"flag --{leaf.key} needs a value: {leaf.type}")
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if leaf.takes_as_it_stands(text) and not quoted and not (leaf.takes_null and text == "null"):
        return text
    try:
        value = read_value(text)
        json.dumps(value)
    except (yaml.YAMLError, TypeError, ValueError):
        raise ConfigError(f"flag --{leaf.key}: expected {_a(leaf.type)}, was given {text}") from None
    return value


# -- what went wrong ----------------------------------------------------------------------------------------------


def explain(problem: ErrorDetails, keys: Keys, given: dict[str, Given], path: str | None) -> str:
    """One validation error as one line: where, which key, and the repair."""
    parts = [str(part) for part in problem["loc"]]
    while parts and ".".join(parts) not in (*keys.leaves, *keys.sections):
        parts.pop()  # the index of a list's item
    key = ".".join(parts)
    if key in keys.leaves and (kinds := kinds_of(keys.leaves[key].annotation)):
        where = given[key].where if key in given else "the defaults"
        return explain_item(problem, key, problem["loc"][len(parts) :], kinds, where)
    if problem["type"] == "value_error":  # a rule over several keys; its own words name them and the repair
        return _rule(str(problem.get("ctx", {}).get("error", problem["msg"])), key, given, path)
    leaf = keys.leaves.get(key)
    if leaf is None:
        return f"{key or 'recipe'}: {problem['msg']}"
    if problem["type"] == "missing" and leaf.default is REQUIRED:
        place = f"set it in {path}, or with --{key}" if path else f"set it with --{key}, or in a recipe file"
        return f"{key} is missing: {place} ({leaf.type}: {leaf.description})"
    value, where = given.get(key, Given(leaf.default, "the defaults"))
    return f"{key} in {where}: expected {_a(leaf.type)}, was given {_value_in_words(value, leaf)}"


def _rule(message: str, key: str, given: dict[str, Given], path: str | None) -> str:
    """A broken rule, with the places of the keys that it speaks of where they were given."""
    section = f"{key}: " if key else ""
    places = {name: where for name, (_, where) in given.items() if name.startswith(key) and _mentions(message, name)}
    named = "; ".join(f"{name} is set in {where}" for name, where in places.items())
    return f"{section}{message}" + (f" ({named})" if named else f" (in {path})" if path else "")


def _mentions(message: str, key: str) -> bool:
    return key in message or key.rpartition(".")[2] in message.replace(":", " ").split()


def _value_in_words(value: Any, leaf: Leaf) -> str:
    kinds = {bool: "", int: " (a whole number)", float: " (a number)", str: " (text)"}
    said = json.dumps(value) + kinds.get(type(value), "")
    wants_quotes = leaf.takes_text and isinstance(value, (bool, int, float)) and "one of" not in leaf.type
    return f"{said}: put it in quotes" if wants_quotes else said


def _a(words: str) -> str:
    return f"a {words}" if words.startswith(("number", "whole", "list", "mapping")) else words


def _raise_if_any(problems: Iterable[str]) -> None:
    if lines := "\n".join(problems):
        raise ConfigError(lines)
