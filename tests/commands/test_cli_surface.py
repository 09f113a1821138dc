"""The names that scripts depend on, frozen: commands, methods and every dotted key.

After a change on purpose, run `python tests/commands/test_cli_surface.py` and say in CHANGELOG.md what changed.
"""

import json
from pathlib import Path

from tether.cli import COMMANDS
from tether.commands.train import METHODS
from tether.config import RECIPES
from tether.config.control_recipe import ControlRecipe
from tether.config.schema import describe

FILE = Path(__file__).with_name("surface.json")


def surface() -> dict[str, object]:
    return {
        "commands": list(COMMANDS),
        "methods": list(METHODS),
        "keys": {
            method: [leaf.key for leaf in describe(recipe)]
            for method, recipe in {**RECIPES, "control": ControlRecipe}.items()
        },
    }


def names(of: object, prefix: str = "") -> set[str]:
    if isinstance(of, dict):
        return {name for key, value in of.items() for name in names(value, f"{prefix}{key} ")}
    assert isinstance(of, list)
    return {f"{prefix}{name}" for name in of}


def test_the_surface_is_what_was_promised():
    promised, now = names(json.loads(FILE.read_text())), names(surface())
    assert promised == now, (
        f"The command line changed. Gone: {sorted(promised - now)}. New: {sorted(now - promised)}. "
        "If that is meant, run `python tests/commands/test_cli_surface.py` and note it in CHANGELOG.md."
    )


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=2) + "\n")
