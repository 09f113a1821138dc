"""Sittings of a run within the test's own process: stopped between two steps, or broken off in the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tether.config.recipes import Recipe
from tether.store.folder import is_run, run_path
from tether.train.attempt import Attempt
from tether.train.run import Trained, train_recipe


class Broken(Exception):  # noqa: N818 (stands for a kill)
    """The process dies here."""


def attempt(
    recipe: Recipe,
    *,
    stop_after: int | None = None,
    advance: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    notify: Callable[[str], None] = lambda text: None,
) -> Trained:
    """Begin the run or go on with it, for at most so many steps."""
    taken: list[int] = []

    def note(step: int, metrics: dict[str, float]) -> None:
        taken.append(step)
        advance(step, metrics)

    return train_recipe(
        recipe,
        stop=lambda: stop_after is not None and len(taken) >= stop_after,
        advance=note,
        notify=notify,
        resume=is_run(run_path(recipe)),
    )


def whole(recipe: Recipe) -> Path:
    """Run it in one attempt; where it is."""
    assert attempt(recipe).steps == recipe.run.steps
    return run_path(recipe)


def step_by_step(recipe: Recipe) -> Path:
    """Run it in as many attempts as it has steps; where it is."""
    for done in range(1, recipe.run.steps + 1):
        assert attempt(recipe, stop_after=1).steps == done
    return run_path(recipe)


def broken_in_every_step(recipe: Recipe, monkeypatch, words: str) -> Path:
    """Run it, broken off once in each step where that is at `words`; where it is."""
    heartbeat = Attempt.heartbeat
    broken: set[str] = set()

    def breaking(self: Attempt, said: str) -> None:
        heartbeat(self, said)
        if said.startswith(words) and said not in broken:
            broken.add(said)
            raise Broken(said)

    monkeypatch.setattr(Attempt, "heartbeat", breaking)
    for _ in range(recipe.run.steps):
        try:
            attempt(recipe)
        except Broken:
            continue
        raise AssertionError("nothing was broken off")
    monkeypatch.undo()
    assert attempt(recipe).steps == recipe.run.steps
    assert len(broken) == recipe.run.steps
    return run_path(recipe)
