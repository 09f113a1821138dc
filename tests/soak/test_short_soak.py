"""The soak in small: `make soak` does the same with hundreds of kills."""

from __future__ import annotations

import pytest
from same_runs import differences
from soak import killed_at_random, killed_while_writing
from tiny_recipes import TOP, tiny

from tether.store import checkpoints

RULES = ("--checkpoint.every", "3")


def quiet(text: str) -> None:
    """Nobody wants to know."""


def test_a_ppo_run_that_is_killed_8_times_ends_with_the_bits_of_one_that_is_not():
    steps = ("--run.steps", "12")
    verdict = killed_at_random("ppo", lambda place: tiny("ppo", place, *RULES, *steps), 8, seed=1, tell=quiet)
    assert verdict.wrong == []
    assert verdict.kills == verdict.resumes == 8


@pytest.mark.parametrize("roles", [(), TOP])
def test_an_sft_run_that_is_killed_4_times_ends_with_the_bits_of_one_that_is_not(roles):
    flags = (*RULES, *roles, "--run.steps", "24")
    verdict = killed_at_random("sft", lambda place: tiny("sft", place, *flags), 4, seed=2, tell=quiet)
    assert verdict.wrong == []


def test_10_kills_inside_checkpoint_writing_lose_no_checkpoint():
    flags = ("--checkpoint.every", "1", "--run.steps", "12")
    verdict = killed_while_writing("sft", lambda place: tiny("sft", place, *flags), 10, seed=3, tell=quiet)
    assert verdict.wrong == []
    assert verdict.while_writing_checkpoint > 0


def test_the_comparison_sees_one_bit(tmp_path):
    import sqlite3

    from in_process import whole

    runs = [whole(tiny("ppo", tmp_path / name, "--run.steps", "2")) for name in ("one", "other")]
    assert differences(*runs) == []
    database = sqlite3.connect(tmp_path / "other" / "tether.db")
    with database:
        database.execute("UPDATE metrics SET value = value * (1 + 1e-15) WHERE step = 1 AND name = 'loss'")
    assert differences(*runs) == ["the table of metrics differs at [(1, 'loss')]"]
    with database:
        database.execute("DELETE FROM steps WHERE step = 0")
    database.close()
    weights = runs[0] / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    found = differences(*runs)
    assert "model/model.safetensors differs" in found
    assert any("recorded the steps [1]" in text for text in found)
    folder = runs[0] / "checkpoints"
    saved = checkpoints.read(folder / "step-00000002")
    name = next(iter(saved.tensors["learner"]))
    saved.tensors["learner"][name].view(-1)[0] += 1e-6
    checkpoints.write(folder, saved)
    assert f"the last checkpoint's learner differs in {name}" in differences(*runs)
