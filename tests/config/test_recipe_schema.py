"""The flat list of keys, and the documents made from it."""

from pathlib import Path

import pytest

from tether.config import RECIPES
from tether.config.schema import REQUIRED, describe, fields_table, in_words, rewrite

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("method", RECIPES)
def test_every_key_is_described_in_plain_words(method: str):
    for leaf in describe(RECIPES[method]):
        assert leaf.description.endswith("."), f"{leaf.key} needs a description that is a sentence"
        assert "typing" not in leaf.type and "<" not in leaf.type, f"{leaf.key}: {leaf.type} is not plain words"


def test_defaults_are_the_recipes_own():
    own = {method: {leaf.key: leaf.default for leaf in describe(recipe)} for method, recipe in RECIPES.items()}
    assert own["ppo"]["kl.apply_to"] == "reward" and own["grpo"]["kl.apply_to"] == "loss"
    assert own["sft"]["data.train"] is REQUIRED and own["sft"]["data.max_length"] == 1024


def test_types_in_words():
    assert in_words(int | None) == "whole number, or null"
    assert in_words(tuple[float, float]) == "list of 2 numbers"
    words = {leaf.key: leaf.type for leaf in describe(RECIPES["ppo"])}
    assert words["ppo.dual_clip"] == "number above 1, or null"
    assert words["rollout.top_p"] == "number above 0 and at most 1"
    assert words["ppo.aggregation.fixed_length"] == "whole number of at least 1, or null"
    assert words["ppo.gamma"] == "number from 0 to 1"


def test_the_table_in_the_docs_is_up_to_date():
    document = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert rewrite(document) == document, "run: python -m tether.config.schema docs/recipes.md"


def test_the_table_has_every_key():
    table = fields_table()
    missing = {leaf.key for recipe in RECIPES.values() for leaf in describe(recipe) if f"| `{leaf.key}` |" not in table}
    assert not missing


def test_a_document_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        rewrite("nothing here")
