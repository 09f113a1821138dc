"""YAML for recipes: safe, with line numbers, and with YAML 1.2's scalars.

`1e-5` is a number (text in PyYAML), `no` and `on` are text (booleans in PyYAML), and `2026-01-01` is text. A duplicate
key is an error (PyYAML keeps the last), and aliases are rejected.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from tether.errors import ConfigError
from tether.files import read_plain_text

MAX_BYTES = 1 << 18  # of a recipe: PyYAML reads about 100 kB per second


MAX_DIGITS = 300


class RecipeLoader(yaml.SafeLoader):
    """Scalars as in YAML 1.2's core schema; aliases are rejected."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's convention; filled below, for this class)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """One node; raises on an alias."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ComposerError(None, None, "recipes have no aliases: write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping inside a value; raises on a duplicate key."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ConstructorError(None, None, f"key {key.value} is given twice: keep one", key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_plain(self, node: yaml.Node) -> Any:
        """The node's value; every problem raises YAMLError at the node's line."""
        try:
            return self.construct_object(node, deep=True)
        except (ValueError, TypeError) as error:  # such as `!!int x`
            raise ConstructorError(None, None, str(error), node.start_mark) from error


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
        list("-+0123456789."),
    ),
):
    RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """A whole number; a leading 0 does not make it octal."""
    if len(node.value) > MAX_DIGITS:
        raise ConstructorError(None, None, f"a number has more than {MAX_DIGITS} digits", node.start_mark)
    return int(str(loader.construct_scalar(node)).replace("_", ""))


RecipeLoader.add_constructor("tag:yaml.org,2002:int", _decimal)


def read_value(text: str) -> Any:
    """One value from a flag: `1e-5`, `true`, `null`, `[0.9, 0.95]`."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"a value has {len(text):,} characters; the maximum is {MAX_BYTES:,}")
    loader = RecipeLoader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else loader.construct_plain(node)
    except RecursionError:
        raise ConfigError("a value is nested too deeply to be read") from None
    finally:
        loader.dispose()


def read_mapping(path: str) -> tuple[RecipeLoader, yaml.MappingNode | None]:
    """The file's top-level mapping as nodes with line numbers; None where the file is empty."""
    loader = None
    try:
        loader = RecipeLoader(read_plain_text(path, MAX_BYTES))
        node = loader.get_single_node()
    except RecursionError:
        raise ConfigError(f"recipe {path} is nested too deeply to be read") from None
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist{_neighbour(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(in_one_line(error, path)) from error
    if node is not None and not isinstance(node, yaml.MappingNode):
        empty = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
        if not empty:
            raise ConfigError(
                f"{path}, line {line_of(node)}: a recipe is a mapping of sections (such as `run:`), not {kind_of(node)}"
            )
        node = None
    return loader, node


def line_of(node: yaml.Node) -> int:
    """The line of a node, counted from 1."""
    return node.start_mark.line + 1


def kind_of(node: yaml.Node) -> str:
    """The kind of a node, for a message."""
    return {yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}.get(type(node), "a single value")


def in_one_line(error: yaml.YAMLError, path: str) -> str:
    """PyYAML's multi-line error as one line that starts with the file and the line number."""
    mark = getattr(error, "problem_mark", None)
    where = f"{path}, line {mark.line + 1}" if mark is not None else path
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    if problem.startswith("but "):  # the first half of PyYAML's sentence is in the context
        problem = f"{getattr(error, 'context', '')}, {problem}"
    return f"{where}: {problem}"


def _neighbour(path: str) -> str:
    folder = Path(path).parent
    names = [file.name for file in folder.glob("*.y*ml")] if folder.is_dir() else []
    close = get_close_matches(Path(path).name, names, n=1)
    return f": did you mean {folder / close[0]}?" if close else ""
