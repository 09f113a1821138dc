"""Recipes that are no recipes: each command that reads one answers with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

RECIPES = {
    "empty": b"",
    "not a mapping": b"- 1\n- 2\n",
    "a scalar": b"hello",
    "tab": b"run:\n\tsteps: 1\n",
    "nul byte": b"run: {name: 'a\x00b'}\n",
    "not utf-8": b"run: {name: '\xff\xfe'}\n",
    "utf-16": "run: {steps: 1}\n".encode("utf-16"),
    "python tag": b"run: !!python/object/apply:os.system ['echo hi']\n",
    "unclosed": b"run: {steps: 1\n",
    "two documents": b"run: {steps: 1}\n---\nrun: {steps: 2}\n",
    "unknown alias": b"run: *nothing\n",
    "complex key": b"? [1, 2]\n: 3\n",
    "merge key of a list": b"<<: [1, 2]\n",
}
ALLOWED = {"empty", "utf-16"}


@pytest.mark.parametrize("subcommand", [("train", "ppo"), ("train", "sft"), ("plan",)], ids=" ".join)
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ALLOWED])
def test_a_recipe_that_is_none(name: str, subcommand: tuple[str, ...], tmp_path: Path, command, refusal) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(RECIPES[name])
    assert "recipe.yaml" in refusal(command(*subcommand, path), 2)
