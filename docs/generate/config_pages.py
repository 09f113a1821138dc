"""The configuration reference, from the classes in `tether.config`: every key, its type, default and description."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from markdown_text import code, escaped, table
from pydantic import BaseModel

from tether.commands.train import METHODS
from tether.config import RECIPES
from tether.config.recipes import DemoRecipe
from tether.config.schema import REQUIRED, Leaf, as_yaml, describe, in_words, kinds_of, sections

Pages = dict[str, str]
"""Path of a page below `docs/` -> its Markdown."""

FOLDER = "reference/config"
DOCS_PAGE = re.compile(r"docs/([a-z]+\.md)")


class MissingDescriptionError(Exception):
    """A key without a description: the reference would have nothing to say of it."""


@dataclass(frozen=True)
class Section:
    """A section of recipes as several methods have it. `reward` of RL and `reward` of a reward model are two."""

    name: str
    summary: str
    methods: tuple[str, ...]
    leaves: tuple[Leaf, ...]


def config_pages() -> Pages:
    """All pages of the configuration reference."""
    pages = {f"{FOLDER}/index.md": index_page()}
    pages |= {f"{FOLDER}/methods/{method}.md": method_page(method) for method in RECIPES}
    pages |= {f"{FOLDER}/sections/{name}.md": section_page(name) for name in section_names()}
    pages[f"{FOLDER}/reward-parts.md"] = reward_parts_page()
    pages[f"{FOLDER}/demo.md"] = demo_page()
    return pages


def config_nav() -> list[object]:
    """The configuration reference in the navigation."""
    return [
        f"{FOLDER}/index.md",
        {"By method": [{method: f"{FOLDER}/methods/{method}.md"} for method in RECIPES]},
        {"By section": [{name: f"{FOLDER}/sections/{name}.md"} for name in section_names()]},
        {"Reward parts": f"{FOLDER}/reward-parts.md"},
        {"Demo": f"{FOLDER}/demo.md"},
    ]


@cache
def all_sections() -> tuple[Section, ...]:
    """The sections of all recipes; methods that have the same keys in a section share it."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for method, recipe in RECIPES.items():
        leaves = list(describe(recipe))
        for name in recipe.model_fields:
            keys = tuple(leaf.key for leaf in leaves if leaf.section == name)
            found.setdefault((name, keys), []).append(method)
    return tuple(
        Section(
            name,
            _section_summary(RECIPES[methods[0]], name),
            tuple(methods),
            tuple(leaf for leaf in describe(RECIPES[methods[0]]) if leaf.section == name),
        )
        for (name, _), methods in found.items()
    )


def _section_summary(recipe: type[BaseModel], name: str) -> str:
    """What a section is for; a key at the top level stands on a page of its own."""
    settings = sections(recipe).get(name)
    return "A key of its own, in no section." if settings is None else _summary(settings)


def section_names() -> list[str]:
    """The names of all sections, each once: those of most methods first."""
    users: dict[str, int] = {}
    for section in all_sections():
        users[section.name] = users.get(section.name, 0) + len(section.methods)
    return sorted(users, key=lambda name: -users[name])


def index_page() -> str:
    """Where to look for a key."""
    methods = [
        [
            f"[{code(method)}](methods/{method}.md)",
            escaped(METHODS[method]),
            ", ".join(f"[{code(name)}](sections/{name}.md)" for name in recipe.model_fields),
        ]
        for method, recipe in RECIPES.items()
    ]
    return "\n\n".join(
        [
            "# Configuration",
            "A recipe is a YAML file of sections. Every key is also a flag of `tether train METHOD`: the key "
            "`run.steps` is the flag `--run.steps`. [Recipes and flags](../../recipes.md) says how values are written "
            "and which one wins.",
            table(["method", "what it trains", "sections"], methods),
            "A section page describes each key. A method page lists all keys of a method with that method's defaults. "
            "The items of `reward.parts` have [a page of their own](reward-parts.md), and so do the keys of "
            "[`tether demo`](demo.md).",
        ]
    )


def method_page(method: str) -> str:
    """All keys of one method, with its own defaults."""
    parts = [
        "---\nsearch:\n  exclude: true\n---",
        f"# {code(method)}: every key",
        f"`tether train {method}`: {escaped(METHODS[method])}. Follow a key to its description.",
    ]
    leaves = list(describe(RECIPES[method]))
    for name in RECIPES[method].model_fields:
        rows = [
            [
                f"[{code(leaf.key)}](../sections/{name}.md#{anchor(leaf.key, method)})",
                _default(leaf),
                escaped(leaf.type),
            ]
            for leaf in leaves
            if leaf.section == name
        ]
        parts += [f"## {code(name)}", table(["key", "default", "type"], rows)]
    return "\n\n".join(parts)


def section_page(name: str) -> str:
    """All keys of one section, for each group of methods that share them."""
    variants = [section for section in all_sections() if section.name == name]
    parts = ["---\nsearch:\n  boost: 2\n---", f"# Section {code(name)}"]
    for section in variants:
        methods = "every method" if len(section.methods) == len(RECIPES) else _listed(section.methods)
        if len(variants) > 1:
            parts.append(f"## For {_listed(section.methods)}")
        parts += [escaped(section.summary), f"Used by {methods}."]
        for leaf in section.leaves:
            default = _default(leaf) + _other_defaults(leaf, section.methods)
            place = _anchor(leaf.key, section)
            parts.append(_entry(leaf.key, leaf.type, default, leaf.description, place, to_docs="../../../"))
    return "\n\n".join(parts)


def reward_parts_page() -> str:
    """Every kind of reward part and its keys."""
    [leaf] = [leaf for leaf in describe(RECIPES["ppo"]) if kinds_of(leaf.annotation)]
    parts = [
        "# Reward parts",
        f"{code(leaf.key)} is a list of parts, told apart by `kind`. [Rewards](../../rewards.md) shows each at work.",
    ]
    for kind, settings in kinds_of(leaf.annotation).items():
        parts += [f"## {code(kind)}", escaped(_summary(settings))]
        for name, field in settings.model_fields.items():
            if name == "kind":
                continue
            default = (
                REQUIRED if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
            )
            shown = "required" if default is REQUIRED else code(as_yaml(default))
            words = in_words(field.annotation, field.metadata)
            about, place, part = field.description or "", f"{kind}.{name}", f"reward part {kind}"
            parts.append(_entry(name, words, shown, about, place, to_docs="../../", of=part))
    return "\n\n".join(parts)


def demo_page() -> str:
    """The keys of `tether demo` that no method has."""
    stages = [name for name, settings in sections(DemoRecipe).items() if settings in RECIPES.values()]
    leaves = [leaf for leaf in describe(DemoRecipe) if leaf.section not in stages]
    parts = [
        "# Demo",
        f"`tether demo` takes one recipe with a section for each stage. {_listed(stages)} hold the whole recipe of "
        "that method: `--ppo.run.steps` is `run.steps` of the PPO stage. The other keys are below. "
        "[The demo](../../demo.md) explains the stages.",
        "Without a file, `tether demo` reads the recipe that it ships, which sets many keys: `recipes/demo.yaml`. "
        "The defaults below are those of the keys that a recipe leaves out.",
    ]
    for leaf in leaves:
        parts.append(_entry(leaf.key, leaf.type, _default(leaf), leaf.description, leaf.key, to_docs="../../"))
    return "\n\n".join(parts)


def anchor(key: str, method: str) -> str:
    """The anchor of a method's key on the page of its section."""
    section = key.partition(".")[0]
    for variant in all_sections():
        if variant.name == section and method in variant.methods:
            return _anchor(key, variant)
    raise KeyError(key)


def _anchor(key: str, section: Section) -> str:
    first = next(other for other in all_sections() if other.name == section.name and key in _keys(other))
    return key if first == section else f"{key}-{section.methods[0]}"


def _keys(section: Section) -> set[str]:
    return {leaf.key for leaf in section.leaves}


def _entry(key: str, kind: str, default: str, description: str, place: str, *, to_docs: str, of: str = "") -> str:
    """One key: its name, type and default, and what it means. `to_docs` leads from the page to docs/."""
    if not description.strip():
        raise MissingDescriptionError(f"{of + ': ' if of else ''}{key} has no description: give its Field one")
    told = f"{escaped(kind)}, {default if default == 'required' else f'default {default}'}"
    heading = f"#### {code(key)} {{ #{place} .key }}"
    return f"{heading}\n\n{told}\n{{ .takes }}\n\n{_linked(escaped(description), to_docs)}"


def _linked(text: str, to_docs: str) -> str:
    """`docs/data.md` in a description, as a link."""
    return DOCS_PAGE.sub(lambda found: f"[{found[1]}]({to_docs}{found[1]})", text)


def _default(leaf: Leaf) -> str:
    return "required" if leaf.default is REQUIRED else code(leaf.default_text)


def _other_defaults(leaf: Leaf, methods: tuple[str, ...]) -> str:
    """The defaults of methods that have their own."""
    own = {method: _default(next(o for o in describe(RECIPES[method]) if o.key == leaf.key)) for method in methods}
    others = [f"{method}: {text}" for method, text in own.items() if text != _default(leaf)]
    return f" ({', '.join(others)})" if others else ""


def _listed(names: tuple[str, ...] | list[str]) -> str:
    shown = [code(name) for name in names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _summary(settings: type[BaseModel]) -> str:
    return (settings.__doc__ or "").strip().partition("\n")[0]
