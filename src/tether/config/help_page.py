"""A method's recipe keys as a page of help: `tether train METHOD --help`."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.config.recipes import RECIPES
from tether.config.schema import describe, sections


def print_fields(method: str, summary: str) -> None:
    """Every key of a method's recipe, by section."""
    recipe_class = RECIPES[method]
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120, highlight=False)
    leaves = list(describe(recipe_class))
    widths = [max(len(leaf.key) for leaf in leaves) + 2, max(len(leaf.default_text) for leaf in leaves)]
    with console.capture() as captured:  # rich would exit by itself on a closed pipe
        console.print(f"Usage: tether train {method} [RECIPE.yaml] [--section.key VALUE ...] [--json]", markup=False)
        console.print(f"\n{summary[0].upper()}{summary[1:]}.", markup=False)
        for section, settings in sections(recipe_class).items():
            inside = [leaf for leaf in leaves if leaf.key.rpartition(".")[0] == section]
            about = (settings.__doc__ or "").strip().partition("\n")[0]
            console.print(f"\n[bold]{section}[/bold]  {escape(about)}")
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
            table.add_column(style="cyan", no_wrap=True, width=widths[0])
            table.add_column(style="green", width=widths[1])
            table.add_column(ratio=1)
            for leaf in inside:
                meaning = f"{escape(leaf.description)} [dim]({escape(leaf.type)})[/dim]"
                table.add_row(f"--{leaf.key}", escape(leaf.default_text), meaning)
            console.print(table)
    print(captured.get(), end="")
