"""A few of the recipes that `make fuzz` runs by the hundred."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from draw import draw_case
from fuzz import command, fuzz, places_for

NUMBERS = list(range(12))


def test_a_number_is_always_the_same_recipe():
    places = places_for("preferences", Path("FOLDER"))
    cases = [draw_case(number, places) for number in NUMBERS[:2]]
    assert cases == [draw_case(number, places) for number in NUMBERS[:2]] and cases[0].flags != cases[1].flags


def test_random_recipes_end_in_success_or_in_one_clear_sentence():
    found = [outcome for outcome in fuzz(NUMBERS, jobs=1, resume=0.1) if outcome.finding]
    if found:
        pytest.fail("\n\n".join(f"{command(outcome.number)}\n{outcome.finding}" for outcome in found))
