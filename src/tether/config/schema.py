"""A recipe class as a flat list of dotted keys, each with its type in plain words: for flags, help and docs."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

REQUIRED: Any = type("Required", (), {"__repr__": lambda _: "required"})()
"""The default of a key that has none."""


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
        """Whether a word is a value as it stands."""
        return any(kind is str or get_origin(kind) is Literal for kind in union_members(self.annotation))

    def takes_as_it_stands(self, word: str) -> bool:
        """Whether the word itself is a value; beside a choice of words a number is still a number."""
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
        """Whether it holds a list and nothing else, null aside."""
        kinds = [kind for kind in union_members(self.annotation) if kind is not type(None)]
        return bool(kinds) and all(get_origin(kind) is tuple for kind in kinds)

    @property
    def items_are_text(self) -> bool:
        """Whether an item of its list is a word as it stands."""
        items = [
            item for kind in union_members(self.annotation) if get_origin(kind) is tuple for item in get_args(kind)
        ]
        return any(item is str or get_origin(item) is Literal for item in items)

    @property
    def takes_null(self) -> bool:
        """Whether null is a value."""
        return type(None) in union_members(self.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether the flag may stand without a value."""
        return bool in union_members(self.annotation)

    @property
    def default_text(self) -> str:
        """The default as it would be written in a recipe."""
        return "required" if self.default is REQUIRED else as_yaml(self.default)


def describe(recipe_class: type[BaseModel]) -> Iterator[Leaf]:
    """Every setting of a recipe, in order; its default is this recipe's own (GRPO's `kl.apply_to` is not PPO's)."""
    yield from _leaves(recipe_class, defaults(recipe_class), "")


def defaults(recipe_class: type[BaseModel]) -> dict[str, Any]:
    """The recipe's defaults as nested plain data, without the keys that have none."""
    plain: dict[str, Any] = {}
    for name, field in recipe_class.model_fields.items():
        if not field.is_required():
            value = field.get_default(call_default_factory=True, validated_data={})
            plain[name] = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        elif section_class(field) is not None:
            plain[name] = defaults(field.annotation)  # type: ignore[arg-type]
    return plain


def sections(recipe_class: type[BaseModel], prefix: str = "") -> dict[str, type[BaseModel]]:
    """Dotted name and class of every section, nested ones after the section that holds them."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in recipe_class.model_fields.items():
        if nested := section_class(field):
            found[prefix + name] = nested
            found |= sections(nested, f"{prefix}{name}.")
    return found


def section_class(field: FieldInfo) -> type[BaseModel] | None:
    """The settings class that the field holds, or None where it is a plain value."""
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


def kinds_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """Where a list holds settings told apart by `kind`, each kind's class by name; else nothing."""
    parts = get_args(annotation)
    members = union_members(parts[0]) if get_origin(annotation) is tuple and parts else []
    classes = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    return {get_args(member.model_fields["kind"].annotation)[0]: member for member in classes}


def in_words(annotation: Any, bounds: list[Any] | tuple[Any, ...] = ()) -> str:
    """A type as a newcomer would say it: `float | None` above 0 is "number above 0, or null"."""
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
    if origin is tuple and get_origin(parts[0]) is Literal:
        return f"list of words, each {in_words(parts[0])}"
    if origin is tuple:
        return f"list of {in_words(parts[0], bounds)}s"
    if origin is dict:
        return "mapping of names to values"
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
    """A plain value on one line, as a recipe would have it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)
