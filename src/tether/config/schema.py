"""A recipe class as a flat list of dotted keys, each with its type in plain words.

It serves flags, error messages, the help page of `tether train METHOD --help`, and the table in docs/recipes.md, which
`python -m tether.config.schema docs/recipes.md` writes. It also explains errors inside lists such as `reward.parts`, in
one line that names the item and the repair.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.config.base import InWords
from tether.config.recipes import RECIPES

REQUIRED: Any = type("Required", (), {"__repr__": lambda _: "required"})()
"""The default of a required key."""


@dataclass(frozen=True)
class Leaf:
    """One setting: a dotted key that takes a value."""

    key: str
    type: str  # in plain words
    default: Any  # plain JSON data, or REQUIRED
    description: str
    annotation: Any

    @property
    def section(self) -> str:
        """The first part of the key."""
        return self.key.partition(".")[0]

    @property
    def takes_text(self) -> bool:
        """Whether any word is a valid value."""
        return any(kind is str or get_origin(kind) is Literal for kind in union_members(self.annotation))

    def takes_as_it_stands(self, word: str) -> bool:
        """Whether the word itself is a valid value; in a union with choices, a number stays a number."""
        kinds = [kind for kind in union_members(self.annotation) if kind is not type(None)]
        choices = [kind for kind in kinds if get_origin(kind) is Literal]
        chosen = any(word in get_args(choice) for choice in choices)
        return self.takes_text and (str in kinds or len(choices) == len(kinds) or chosen)

    @property
    def takes_list(self) -> bool:
        """Whether a list is a value."""
        return any(get_origin(kind) is tuple for kind in union_members(self.annotation))

    @property
    def is_list(self) -> bool:
        """Whether it holds only a list, apart from null."""
        kinds = [kind for kind in union_members(self.annotation) if kind is not type(None)]
        return bool(kinds) and all(get_origin(kind) is tuple for kind in kinds)

    @property
    def items_are_text(self) -> bool:
        """Whether an item of its list is plain text."""
        items = [
            item for kind in union_members(self.annotation) if get_origin(kind) is tuple for item in get_args(kind)
        ]
        kinds = [kind for item in items for kind in (union_members(item) if _is_union(item) else [item])]
        return any(kind is str or get_origin(kind) is Literal for kind in kinds)

    @property
    def takes_null(self) -> bool:
        """Whether null is a value."""
        return type(None) in union_members(self.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether the flag works without a value."""
        return bool in union_members(self.annotation)

    @property
    def default_text(self) -> str:
        """The default as written in a recipe."""
        return "required" if self.default is REQUIRED else as_yaml(self.default)


def describe(recipe_class: type[BaseModel]) -> Iterator[Leaf]:
    """Every setting of a recipe, in order, with this recipe's default (GRPO's `kl.apply_to` is not PPO's)."""
    yield from _leaves(recipe_class, defaults(recipe_class), "")


def defaults(recipe_class: type[BaseModel]) -> dict[str, Any]:
    """The recipe's defaults as nested plain data, without required keys."""
    plain: dict[str, Any] = {}
    for name, field in recipe_class.model_fields.items():
        if not field.is_required():
            value = field.get_default(call_default_factory=True, validated_data={})
            plain[name] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        elif section_class(field) is not None:
            plain[name] = defaults(field.annotation)  # type: ignore[arg-type]
    return plain


def sections(recipe_class: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """Dotted name and class of every section; nested sections follow their parent."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in recipe_class.model_fields.items():
        if nested := section_class(field):
            found[prefix + name] = nested
            found |= sections(nested, f"{prefix}{name}.")
    return found


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """The settings class of the field, or None where it is a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _leaves(settings: type[BaseModel], plain: dict[str, Any], prefix: str) -> Iterator[Leaf]:
    for name, field in settings.model_fields.items():
        if nested := section_class(field):
            yield from _leaves(nested, plain[name], f"{prefix}{name}.")
        else:
            yield Leaf(
                key=prefix + name,
                type=in_words(field.annotation, field.metadata),
                default=plain.get(name, REQUIRED),
                description=field.description or "",
                annotation=field.annotation,
            )


def union_members(annotation: Any) -> list[Any]:
    """The members of a union, each without its bounds."""
    if get_origin(annotation) is Annotated:
        return union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for member in get_args(annotation) for kind in union_members(member)]
    return [annotation]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def kinds_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """For a list of settings with a `kind`: each kind's class by name; else empty."""
    parts = get_args(annotation)
    members = union_members(parts[0]) if get_origin(annotation) is tuple and parts else []
    classes = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    return {get_args(member.model_fields["kind"].annotation)[0]: member for member in classes}


def in_words(annotation: Any, bounds: list[Any] | tuple[Any, ...] = ()) -> str:
    """A type in plain words: `float | None` above 0 is "number above 0, or null"."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [limit for extra in parts[1:] for limit in getattr(extra, "metadata", [extra])]
        return in_words(parts[0], [*bounds, *inner])
    if origin in (Union, types.UnionType):
        words = [in_words(part, bounds) for part in parts if part is not type(None)]
        return " or ".join(words) + (", or null" if type(None) in parts else "")
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin is tuple and parts[-1] is not Ellipsis:
        return f"list of {len(parts)} {in_words(parts[0], bounds)}s"
    if origin is tuple and (kinds := kinds_of(annotation)):
        return f"list of mappings, each with a kind: {', '.join(kinds)}"
    if origin is tuple and any(get_origin(kind) is Literal for kind in union_members(parts[0])):
        return f"list of words, each {in_words(parts[0])}"
    if origin is tuple:
        return f"list of {in_words(parts[0], bounds)}s"
    if origin is dict:
        return "mapping of names to values"
    if words := [bound.words for bound in bounds if isinstance(bound, InWords)]:
        return words[0]
    name = {bool: "true or false", int: "whole number", float: "number", str: "text"}.get(annotation, str(annotation))
    return name + _bounds_in_words(bounds)


def _bounds_in_words(bounds: list[Any] | tuple[Any, ...]) -> str:
    limits = {
        name: getattr(bound, name) for bound in bounds for name in ("gt", "ge", "lt", "le") if hasattr(bound, name)
    }
    if limits.keys() == {"ge", "le"}:
        return f" from {limits['ge']} to {limits['le']}"
    phrases = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
    said = [f"{phrases[name]} {limits[name]}" for name in phrases if name in limits]
    return " " + " and ".join(said) if said else ""


def as_yaml(value: Any) -> str:
    """A plain value on one line of YAML."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


TOP, NO_SECTION = "top level", "Keys that are in no section."


def _summary(settings: type[BaseModel]) -> str:
    return (settings.__doc__ or "").strip().partition("\n")[0]


def print_fields(recipe_class: type[BaseModel], command: str, summary: str) -> None:
    """Print every key of a recipe, by section; `command` is how it is used."""
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120, highlight=False)
    leaves = list(describe(recipe_class))
    widths = [max(len(leaf.key) for leaf in leaves) + 2, max(len(leaf.default_text) for leaf in leaves)]
    with console.capture() as captured:  # rich would exit on a closed pipe
        console.print(f"Usage: tether {command} [RECIPE.yaml] [--section.key VALUE ...] [--json]", markup=False)
        console.print(f"\n{summary[0].upper()}{summary[1:]}.", markup=False)
        abouts = {name: _summary(settings) for name, settings in sections(recipe_class).items()}
        abouts |= {"": NO_SECTION} if any("." not in leaf.key for leaf in leaves) else {}
        for section, about in abouts.items():
            inside = [leaf for leaf in leaves if leaf.key.rpartition(".")[0] == section]
            console.print(f"\n[bold]{section or TOP}[/bold]  {escape(about)}")
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
            table.add_column(style="cyan", no_wrap=True, width=widths[0])
            table.add_column(style="green", width=widths[1])
            table.add_column(ratio=1)
            for leaf in inside:
                meaning = f"{escape(leaf.description)} [dim]({escape(leaf.type)})[/dim]"
                table.add_row(f"--{leaf.key}", escape(leaf.default_text), meaning)
            console.print(table)
    print(captured.get(), end="")


BEGIN = "<!-- fields: written by `python -m tether.config.schema docs/recipes.md` -->"
END = "<!-- end of fields -->"


def fields_table() -> str:
    """Markdown: one heading and one table per section; a section that methods share appears once."""
    blocks: list[str] = []
    for section, methods in _shared_sections():
        settings = sections(RECIPES[methods[0]]).get(section)
        summary = "A key of its own, in no section." if settings is None else _summary(settings)
        whom = "every method" if len(methods) == len(RECIPES) else ", ".join(methods)
        rows = ["| key | default | takes | meaning |", "|---|---|---|---|"]
        rows += [_row(leaf, methods) for leaf in describe(RECIPES[methods[0]]) if leaf.section == section]
        blocks.append("\n".join([f"### `{section}` ({whom})", "", summary, "", *rows]))
    return "\n\n".join(blocks)


def rewrite(document: str) -> str:
    """The document with the text between the two marks regenerated."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{fields_table()}\n\n{END}{after}"


def _shared_sections() -> list[tuple[str, list[str]]]:
    """(section, methods) for each top-level section; sections are equal if their keys are (`reward` has two meanings).

    Sections of the most methods come first.
    """
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for method, recipe_class in RECIPES.items():
        leaves = list(describe(recipe_class))
        for section in recipe_class.model_fields:
            keys = tuple(leaf.key for leaf in leaves if leaf.section == section)
            found.setdefault((section, keys), []).append(method)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return [(section, methods) for (section, _), methods in ordered]


def _row(leaf: Leaf, methods: list[str]) -> str:
    """One table row. Methods with another default are named beside it."""
    own = {method: _default(method, leaf.key) for method in methods}
    default = f"`{leaf.default_text}`" if leaf.default_text != "required" else "required"
    others = [f"{method}: `{text}`" for method, text in own.items() if text != leaf.default_text]
    shown = default + (f" ({', '.join(others)})" if others else "")
    return f"| `{leaf.key}` | {shown} | {leaf.type} | {leaf.description.replace('|', chr(92) + '|')} |"


def _default(method: str, key: str) -> str:
    return next(leaf.default_text for leaf in describe(RECIPES[method]) if leaf.key == key)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")


def explain_item(
    problem: ErrorDetails, key: str, inside: tuple[int | str, ...], kinds: dict[str, type[BaseModel]], where: str
) -> str:
    """One validation error; `inside` is its place within the list: (index, kind, field, ...)."""
    index, kind, field = (*inside, None, None, None)[:3]
    item = f"{key}[{index}]" if index is not None else key
    named = f"{item} ({kind}) in {where}" if kind in kinds else f"{item} in {where}"
    settings = kinds.get(str(kind))
    given = problem.get("input")
    match problem["type"]:
        case "union_tag_not_found":
            return f"{named}: set its kind to one of {', '.join(kinds)}"
        case "union_tag_invalid":
            tag = str(problem.get("ctx", {}).get("tag"))
            close = get_close_matches(tag, kinds, n=1)
            return f"{named}: unknown kind {tag}: " + (f"did you mean {close[0]}?" if close else _choose(list(kinds)))
        case "extra_forbidden" if settings is not None:
            known = list(settings.model_fields)
            close = get_close_matches(str(field), known, n=1)
            return f"{named}: unknown key {field}: " + (f"did you mean {close[0]}?" if close else _choose(known))
        case "missing" if settings is not None:
            return f"{named}: {field} is missing ({settings.model_fields[str(field)].description})"
        case "value_error":
            return f"{named}: {problem.get('ctx', {}).get('error', problem['msg'])}"
        case "string_pattern_mismatch":
            return f"{named}: {field} {given!r} does not match {problem.get('ctx', {}).get('pattern')}"
        case _ if settings is not None and field in settings.model_fields:
            about = settings.model_fields[str(field)]
            return f"{named}: {field} must be {in_words(about.annotation, about.metadata)}, not {given!r}"
        case _ if index is not None:
            return f"{named}: expected a mapping such as {{kind: ended}}, got {given!r}"
        case _:
            return f"{named}: expected a list of mappings such as [{{kind: ended}}], got {given!r}"


def _choose(known: list[str]) -> str:
    return f"choose one of {', '.join(known)}"
