"""Build a recipe from a YAML file and dotted flags: defaults < YAML < flags.

Everything given is first flattened to `dotted key -> (value, where it was given)`. Merging is then a dict update, a
partly given section keeps the recipe's defaults for the rest, and every error can name its place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tether.config.base import Settings
from tether.config.control_recipe import ControlRecipe
from tether.config.foreign import answer, leads_to
from tether.config.read_yaml import RecipeLoader, in_one_line, kind_of, line_of, read_mapping, read_value
from tether.config.recipes import RECIPES, Recipe
from tether.config.schema import REQUIRED, Leaf, as_yaml, defaults, describe, explain_item, kinds_of, sections
from tether.errors import ConfigError

AnyRecipe = TypeVar("AnyRecipe", bound=Settings)


FLAGS = "the flags"
SETTINGS = "the settings"  # from a Python program
APART = ("sweep",)  # sections of a recipe's file that other commands than `tether train` read
MAX_PROBLEMS, MAX_LINE = 8, 600  # limits on the length of an error message


class Given(NamedTuple):
    """A value and where it was given: "recipes/x.yaml, line 3", or "the flags"."""

    value: Any
    where: str


class Keys:
    """The keys of one recipe class."""

    def __init__(self, recipe_class: type[Settings], page: str = "") -> None:
        """`page` is the page of docs/ that lists the keys, where no `--help` does."""
        self.recipe_class, self.page = recipe_class, page
        self.method: str = getattr(recipe_class, "method", recipe_class.__name__)
        self.leaves: dict[str, Leaf] = {leaf.key: leaf for leaf in describe(recipe_class)}
        self.sections = sections(recipe_class)

    def nearest(self, key: str) -> str | None:
        """The known key that was most likely meant: by spelling, by last name, or by its description."""
        parent, _, name = key.rpartition(".")
        known = [known for known in (*self.leaves, *self.sections) if known != parent]
        begun = [known for known in self.leaves if known.startswith(f"{key}_")]
        namesakes = [known for known in self.leaves if known.rpartition(".")[2] == name]
        words = set(name.split("_"))
        described = [leaf.key for leaf in self.leaves.values() if words <= set(leaf.description.lower().split())]
        close, distant = (get_close_matches(key, known, n=1, cutoff=cutoff) for cutoff in (0.75, 0.6))
        return next(iter((*begun, *close, *namesakes, *distant, *described)), None)

    def unknown(self, key: str, where: str, given: str | None, dashes: str = "") -> str:
        """The message for an unknown key: Tether's name for it, or the key that was most likely meant."""
        section, _, name = key.rpartition(".")
        place = f"{dashes}{key}{f' in {where}' if where else ''}"
        ours = leads_to(name, self.method, self.leaves) if self.method in RECIPES else None
        if ours is not None and (not section or ours.startswith(f"{section}.")):
            return f"{place}: {answer(name, self.method, self.leaves, given, dashes)}"
        return f"unknown {'flag' if dashes else 'key'} {place}: {self.advice(key, dashes)}"

    def advice(self, key: str, dashes: str = "") -> str:
        """How to repair an unknown key."""
        first = key.partition(".")[0]
        if first in RECIPES and first not in self.sections:
            return f"it belongs to another method, and this is {self.method}"
        nearest = self.nearest(key)
        command = f"tether train {self.method}" if self.method in RECIPES else f"tether {self.method}"
        all_keys = f"docs/{self.page} lists them all" if self.page else f"`{command} --help` lists them all"
        return f"did you mean {dashes}{nearest}?" if nearest else all_keys


def load_recipe(
    method: str, path: str | None = None, flags: Sequence[str] = (), settings: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe for `method`: its defaults, overridden by the YAML file, overridden by flags (`--ppo.clip_range 0.1`).

    A Python program passes `settings` by dotted key, as values, in place of flags.
    Raises ConfigError with one line per problem, which names the place, the dotted key and the repair.
    """
    if method not in RECIPES:
        close = get_close_matches(method, RECIPES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(RECIPES)}"
        raise ConfigError(f"unknown method {method}: {hint}")
    return load_settings(RECIPES[method], path, flags, settings)


def load_settings(
    recipe_class: type[AnyRecipe],
    path: str | None = None,
    flags: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> AnyRecipe:
    """`load_recipe` for any recipe class."""
    keys = Keys(recipe_class)
    given = {**read_recipe(keys, path), **read_flags(keys, flags), **read_settings(keys, settings or {})}
    return recipe_with(recipe_class, defaults(recipe_class), given, keys, path)


def load_section(
    section_class: type[AnyRecipe], name: str, path: str | None, flags: Sequence[str], settings: Mapping[str, Any]
) -> AnyRecipe:
    """The section `name` of a file, which is no part of the recipe, overridden by flags and settings."""
    keys = Keys(section_class)
    given = {**read_recipe(keys, path, name), **read_flags(keys, flags), **read_settings(keys, settings)}
    return recipe_with(section_class, defaults(section_class), given, keys, path)


def recipe_from_record(record: Mapping[str, Any]) -> Recipe:
    """The recipe that a run stored: every key, and its method. Raises ValueError where it is invalid."""
    if not isinstance(record, dict):
        raise ValueError("it is not a mapping of keys")
    method = record.get("method")
    if method == ControlRecipe.method:
        raise ConfigError("a run of `tether control` has no language model and no answers: this takes other runs")
    if method not in RECIPES:
        raise ValueError(f"it names a method that this version does not have ({method})")
    return _from_record(RECIPES[method], record)


def control_from_record(record: Mapping[str, Any]) -> ControlRecipe:
    """The recipe of a run of `tether control`. Raises ValueError where it is invalid."""
    return _from_record(ControlRecipe, record)


def _from_record(recipe_class: type[AnyRecipe], record: Mapping[str, Any]) -> AnyRecipe:
    rest = {name: value for name, value in record.items() if name != "method"}
    return recipe_class.model_validate_json(json.dumps(rest), strict=True)


def change_settings(recipe: AnyRecipe, flags: Sequence[str], settings: Mapping[str, Any] | None = None) -> AnyRecipe:
    """The recipe with changes from flags or from a program's settings."""
    keys = Keys(type(recipe))
    given = {**read_flags(keys, flags), **read_settings(keys, settings or {})}
    return recipe_with(type(recipe), recipe.model_dump(mode="json"), given, keys, None)


def recipe_with(
    recipe_class: type[AnyRecipe], plain: dict[str, Any], given: dict[str, Given], keys: Keys, path: str | None
) -> AnyRecipe:
    """The recipe from plain values, overridden by the given ones."""
    _one_length(given, keys)
    for key, (value, _) in given.items():
        *parents, name = key.split(".")
        section = plain
        for parent in parents:
            section = section[parent]
        section[name] = value
    _no_half_characters(given)
    try:
        # Strict, so that `epochs: true` is not 1; as JSON, where strict mode still accepts a list for a tuple.
        return recipe_class.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        problems = [explain(problem, keys, given, path) for problem in error.errors(include_url=False)]
        raise ConfigError(_shown(list(dict.fromkeys(problems)))) from error


def _no_half_characters(given: dict[str, Given]) -> None:
    """Reject text with a lone surrogate, which no file or terminal can represent."""
    for key, (value, where) in given.items():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ConfigError(f"{key} in {where}: the text holds half a character (a lone surrogate)") from None


def _one_length(given: dict[str, Given], keys: Keys) -> None:
    """The length is given as steps or as epochs: a flag overrides the file, and both in one place are an error."""
    for epochs in (key for key in keys.leaves if key == "run.epochs" or key.endswith(".run.epochs")):
        steps = f"{epochs.removesuffix('epochs')}steps"
        if steps not in given:
            continue
        if epochs in given and given[epochs].value is not None:
            by_flag = {key: given[key].where in (FLAGS, SETTINGS) for key in (steps, epochs)}
            if by_flag[steps] == by_flag[epochs]:
                raise ConfigError(
                    f"{steps} ({given[steps].where}) and {epochs} ({given[epochs].where}) both set the length of the "
                    "run: set one of them"
                )
            if by_flag[epochs]:
                del given[steps]
                continue
        given[epochs] = Given(None, given[steps].where)


# -- YAML ---------------------------------------------------------------------------------------------------------


def read_recipe(keys: Keys, path: str | None, section: str | None = None) -> dict[str, Given]:
    """The file's settings, by dotted key; with `section`, those of one of its sections."""
    if path is None:
        return {}
    loader, top = read_mapping(path)
    reader = RecipeReader(keys, loader, path)
    try:
        reader.read(top) if section is None else reader.read_only(top, section)
    except yaml.YAMLError as error:
        raise ConfigError(in_one_line(error, path)) from error
    finally:
        loader.dispose()
    raise_if_any(reader.problems)
    return reader.given


class RecipeReader:
    """Walks the file's nodes along the recipe's keys, and collects settings and problems."""

    def __init__(self, keys: Keys, loader: RecipeLoader, path: str) -> None:
        self.keys, self.loader, self.path = keys, loader, path
        self.given: dict[str, Given] = {}
        self.problems: list[str] = []

    def read(self, section: yaml.MappingNode | None, prefix: str = "") -> None:
        """Read one section; a duplicate key, or a key with a dot, is a problem."""
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
            elif prefix + name in APART and name not in self.keys.leaves:
                pass
            else:
                self.read_entry(prefix + name, value_node, where)
            first_line.setdefault(name, line)

    def read_only(self, top: yaml.MappingNode | None, section: str) -> None:
        """Read one section of the file and nothing else."""
        for key_node, value_node in top.value if top is not None else ():
            if self.loader.construct_plain(key_node) != section:
                continue
            if not isinstance(value_node, yaml.MappingNode):
                where = f"{self.path}, line {line_of(key_node)}"
                raise ConfigError(f"{section} in {where}: expected a section with keys under it")
            self.read(value_node)

    def read_entry(self, key: str, node: yaml.Node, where: str) -> None:
        """Read one key, a section or a value."""
        if key in self.keys.sections:
            if isinstance(node, yaml.MappingNode):
                self.read(node, f"{key}.")
            elif node.tag != "tag:yaml.org,2002:null":  # `kl:` with every line under it commented out is allowed
                given = kind_of(node)
                self.problems.append(f"{key} in {where}: expected a section with keys under it, got {given}")
        elif key in self.keys.leaves:
            value = self.loader.construct_plain(node)
            try:
                json.dumps(value)
            except (TypeError, ValueError):  # only an explicit tag, such as !!set, gets here
                expected = _a(self.keys.leaves[key].type)
                self.problems.append(f"{key} in {where}: expected {expected}, got a {node.tag}")
            else:
                leaf = self.keys.leaves[key]
                alone = leaf.is_list and value is not None and not isinstance(value, list)
                self.given[key] = Given([value] if alone else value, where)
        else:
            given = str(node.value) if isinstance(node, yaml.ScalarNode) else None
            self.problems.append(self.keys.unknown(key, where, given))


def _same_method(given: Any, method: str, where: str) -> None:
    if given != method:
        raise ConfigError(
            f"method in {where} is {as_yaml(given)}, but {method} was asked for: run `tether train {given}`"
        )


# -- flags --------------------------------------------------------------------------------------------------------


def read_flags(keys: Keys, flags: Sequence[str]) -> dict[str, Given]:
    """The settings in flags, by dotted key. The last of repeated flags wins, so that a script may append flags.

    A key that holds a list takes its items as words: one, several with commas between, or one flag per item. A list in
    brackets is a whole list and replaces what was given before it.
    """
    given: dict[str, Given] = {}
    problems: list[str] = []
    for flag, text in flag_pairs(flags):
        key = flag.removeprefix("--").replace("-", "_")
        if key in keys.leaves:
            try:
                leaf = keys.leaves[key]
                value = _list_value(leaf, text) if leaf.is_list else _flag_value(leaf, text)
                adds = leaf.is_list and key in given and not _is_bracketed(text)
                given[key] = Given([*given[key].value, *value] if adds else value, FLAGS)
            except ValueError as error:
                problems.append(str(error))
        elif key in keys.sections:
            inside = [f"--{name}" for name in keys.leaves if name.startswith(f"{key}.")]
            problems.append(f"flag --{key} is a section: set one of its keys, such as {inside[0]}")
        else:
            problems.append(keys.unknown(key, "", text, "--"))
    raise_if_any(problems)
    return given


def read_settings(keys: Keys, settings: Mapping[str, Any]) -> dict[str, Given]:
    """The settings of a Python program, by dotted key; a mapping under a section's name is flattened."""
    given: dict[str, Given] = {}
    problems: list[str] = []
    for key, value in settings.items():
        if key in keys.leaves:
            leaf = keys.leaves[key]
            alone = leaf.is_list and value is not None and not isinstance(value, list | tuple)
            try:
                plain = json.loads(json.dumps([value] if alone else value, default=_plain_value))
            except (TypeError, ValueError):
                problems.append(f"{key} in {SETTINGS}: expected {_a(leaf.type)}, got a {type(value).__name__}")
                continue
            given[key] = Given(plain, SETTINGS)
        elif key in keys.sections and isinstance(value, Mapping):
            given |= read_settings(keys, {f"{key}.{name}": inner for name, inner in value.items()})
        elif key in keys.sections:
            problems.append(f"{key} in {SETTINGS}: expected a mapping of its keys, got a {type(value).__name__}")
        else:
            problems.append(keys.unknown(str(key), SETTINGS, str(value)))
    raise_if_any(problems)
    return given


def _plain_value(value: Any) -> Any:
    """Convert a path to text, and a NumPy or torch number to a Python number."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(type(value).__name__)


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings by dotted key as command-line words, each `--key=value` in one word.

    A value is never a separate word, so none can be mistaken for a flag. A text is used as it is, anything else as YAML
    (JSON is a subset).
    """
    flags: list[str] = []
    for key, value in settings.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{key[:80]!r} is not a setting: use a dotted key, such as run.steps")
        text = value if isinstance(value, str) else json.dumps(value)
        if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"{key}: the text has a character that a command line cannot contain")
        flags.append(f"--{key}={text}")
    return flags


_KEY = re.compile(r"[A-Za-z0-9_]+([.-][A-Za-z0-9_]+)*")


def flag_pairs(flags: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(flag, value) pairs; None for a flag without a value. A value may start with one dash (-0.5), not with two."""
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


def _is_bracketed(text: str | None) -> bool:
    return text is not None and text.strip()[:1] == "["


def _list_value(leaf: Leaf, text: str | None) -> list[Any]:
    """The items in a flag of a list: `a`, `a,b`, `[a, b]`, or one mapping such as `{kind: ended}` or just `ended`."""
    if text is None:
        raise ConfigError(f"flag --{leaf.key} needs a value: {leaf.type}")
    if _is_bracketed(text):
        value = _flag_value(leaf, text)
        return value if isinstance(value, list) else [value]
    kinds = kinds_of(leaf.annotation)
    if kinds:
        value = _flag_value(leaf, text)
        return (
            [{"kind": value} if isinstance(value, str) and value in kinds else value]
            if not isinstance(value, dict)
            else [value]
        )
    words = [word.strip() for word in text.split(",")]
    if leaf.items_are_text:
        return [word for word in words if word]
    return [_flag_value(leaf, word) for word in words if word]


def _flag_value(leaf: Leaf, text: str | None) -> Any:
    """The value of a flag. Where text is expected, the word is used as it is: a run may be called 7."""
    if text is None:
        if leaf.is_switch:
            return True
        raise ConfigError(f"flag --{leaf.key} needs a value: {leaf.type}")
    listed = leaf.takes_list and text.startswith("[") and text.endswith("]")
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if leaf.takes_as_it_stands(text) and not quoted and not listed and not (leaf.takes_null and text == "null"):
        return text
    try:
        value = read_value(text)
        json.dumps(value)
    except (yaml.YAMLError, TypeError, ValueError):
        raise ConfigError(f"flag --{leaf.key}: expected {_a(leaf.type)}, got {text}") from None
    return value


# -- error messages -----------------------------------------------------------------------------------------------


def explain(problem: ErrorDetails, keys: Keys, given: dict[str, Given], path: str | None) -> str:
    """One validation error as one line: the place, the key, and the repair."""
    parts = [str(part) for part in problem["loc"]]
    while parts and ".".join(parts) not in (*keys.leaves, *keys.sections):
        parts.pop()  # the index of a list item
    key = ".".join(parts)
    if key in keys.leaves and (kinds := kinds_of(keys.leaves[key].annotation)):
        where = given[key].where if key in given else "the defaults"
        return explain_item(problem, key, problem["loc"][len(parts) :], kinds, where)
    if problem["type"] == "value_error":  # a rule over several keys; its message names them and the repair
        return _rule(str(problem.get("ctx", {}).get("error", problem["msg"])), key, given, path)
    leaf = keys.leaves.get(key)
    if leaf is None:
        return f"{key or 'recipe'}: {problem['msg']}"
    if problem["type"] == "missing" and leaf.default is REQUIRED:
        place = f"set it in {path}, or with --{key}" if path else f"set it with --{key}, or in a recipe file"
        return f"{key} is missing: {place} ({leaf.type}: {leaf.description})"
    value, where = given.get(key, Given(leaf.default, "the defaults"))
    return f"{key} in {where}: expected {_a(leaf.type)}, got {_value_in_words(value, leaf)}"


def _rule(message: str, key: str, given: dict[str, Given], path: str | None) -> str:
    """A broken rule, with the places of the keys that it names."""
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


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise ConfigError with the problems, one per line."""
    if lines := list(problems):
        raise ConfigError(_shown(lines))


def _shown(problems: Sequence[str]) -> str:
    """The problems, one per line, limited in number and length."""
    lines = [line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..." for line in problems[:MAX_PROBLEMS]]
    more = [f"and {len(problems) - MAX_PROBLEMS} more problems"] if len(problems) > MAX_PROBLEMS else []
    return "\n".join([*lines, *more])
