"""The pages about sweeps in a real browser."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from studio_browser import Served, Visitor, expect, serving

sys.path.append(str(Path(__file__).parents[1] / "sweeps"))  # sweep_folders.py

from sweep_folders import make_sweep

from tether.store.database.open import workspace_at


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("sweeps")
    make_sweep(root, diverged=True)
    with serving(workspace_at(root / "runs", None)) as found:
        yield found


def test_a_sweep_is_found_read_and_followed_to_a_run_with_the_keyboard(visitor: Visitor, served: Served):
    page = visitor.go("#/runs")
    visitor.press("g")
    visitor.press("s")
    expect(page.locator("table.sweeps td.name")).to_contain_text("study")
    visitor.press("Enter")
    expect(page.locator("h1")).to_have_text("study")
    expect(page.locator("table.sweeps tbody tr")).to_have_count(6)
    expect(page.locator("table.sweeps tr.at .name")).to_have_text("ppo.epochs 2")  # the rest is the recipe's
    expect(page.locator(".effect h3")).to_have_text(["ppo.clip_range", "ppo.epochs"])
    expect(page.locator("input[type=checkbox]:checked")).to_have_count(3)
    visitor.press("x")
    expect(page.locator("input[type=checkbox]:checked")).to_have_count(2)
    expect(page.locator("table.sweeps .trials").last).to_contain_text("1 diverged")
    visitor.press("Enter")
    expect(page.locator("h1")).to_contain_text("study/003-seed0")


def test_a_workspace_without_sweeps_says_how_to_start_one(browser, tmp_path: Path):
    workspace = workspace_at(tmp_path / "runs", None)
    (tmp_path / "runs").mkdir()
    with serving(workspace) as found:
        visitor = Visitor(browser, found)
        page = visitor.go("#/sweeps")
        expect(page.locator(".empty p")).to_contain_text("several settings and seeds")
        expect(page.locator(".empty code")).to_contain_text("tether sweep recipes/sensitivity.yaml")
        assert visitor.faults == []
        visitor.close()
