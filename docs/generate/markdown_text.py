"""Plain text as Markdown: what both the configuration and the Python reference need."""

from __future__ import annotations

import re
import textwrap

SPECIAL = re.compile(r"([\\*_<>\[\]#|$~^{}])")
CODE_SPAN = re.compile(r"(`[^`\n]+`)")


EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}(?=[\w`])|(?<=[\w`.])\*{1,2}(?![\w*])")
HELD = "\x00"
"""Stands for an asterisk that is kept while others are escaped."""


def escaped(text: str) -> str:
    """Text whose characters mean themselves; `code spans` and *emphasis* stay what they are."""
    held = EMPHASIS.sub(lambda found: HELD * len(found[0]), text)
    parts = CODE_SPAN.split(held)
    whole = "".join(part if place % 2 else _escape(part) for place, part in enumerate(parts))
    return whole.replace(HELD, "*")


def _escape(text: str) -> str:
    return SPECIAL.sub(lambda found: f"&#{ord(found[0])};", text)


def code(text: str) -> str:
    """A code span, also in a table and also of text that holds a backtick."""
    fence = "``" if "`" in text else "`"
    padding = " " if "`" in text else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def cell(markdown: str) -> str:
    """Markdown that fits into one cell of a table."""
    return " ".join(markdown.split()).replace("|", "&#124;" if "`" not in markdown else "\\|")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table; cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell(text) for text in line)} |" for line in lines)


def from_docstring(text: str) -> str:
    """A docstring as Markdown: paragraphs as text, indented and column-aligned lines as they stand."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", textwrap.dedent(text).strip("\n")):
        aligned = block.startswith("    ") or bool(re.search(r"\S {2,}\S", block))
        if aligned and blocks and blocks[-1].startswith("```text"):
            blocks[-1] = blocks[-1].removesuffix("\n```") + f"\n\n{block}\n```"
        elif aligned:
            blocks.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            blocks.append(escaped(block))
    return "\n\n".join(blocks)
