"""Writes the table of every recipe key into docs/recipes.md: `python -m tether.config.key_table docs/recipes.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from tether.config.recipes import RECIPES
from tether.config.schema import Leaf, describe, sections

BEGIN = "<!-- fields: written by `python -m tether.config.key_table docs/recipes.md` -->"
END = "<!-- end of fields -->"


def fields_table() -> str:
    """Markdown: one heading and one table for each section; a section that methods share is shown once."""
    blocks: list[str] = []
    for section, methods in _shared_sections():
        settings = sections(RECIPES[methods[0]])[section]
        summary = (settings.__doc__ or "").strip().partition("\n")[0]
        whom = "every method" if len(methods) == len(RECIPES) else ", ".join(methods)
        rows = ["| key | default | takes | meaning |", "|---|---|---|---|"]
        rows += [_row(leaf, methods) for leaf in describe(RECIPES[methods[0]]) if leaf.section == section]
        blocks.append("\n".join([f"### `{section}` ({whom})", "", summary, "", *rows]))
    return "\n\n".join(blocks)


def rewrite(document: str) -> str:
    """The document with what stands between the two marks made anew."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{fields_table()}\n\n{END}{after}"


def _shared_sections() -> list[tuple[str, list[str]]]:
    """(section, methods) for each top-level section, told apart by keys: `reward` has two meanings.

    The sections of the most methods come first.
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
    """One key. A method whose default is its own is named beside it."""
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
