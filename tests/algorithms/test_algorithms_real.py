"""The lab on a real model, in its tiny form: the same prompts for all, intervals worked by hand, runs that resume."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from tether.rewards.parts import build_reward
from tether.store.recorded import RecordedRun

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import algorithms
    import algorithms_real

    return algorithms, algorithms_real


def test_an_interval_is_students(lab):
    mean, half = lab[1].with_interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3.0)))
    assert lab[1].with_interval([5.0]) == (5.0, math.inf)


def test_what_a_run_gained_and_spent(lab):
    rows = [{"step": float(n), "score": n / 10, "kl_ref_k3": n / 5, "seconds/step": 2.0} for n in range(10)]
    found = lab[1].seed_result(RecordedRun("a", "ppo", {}, rows))
    assert (found.gain, found.kl, found.seconds, found.end) == (pytest.approx(0.9), 1.8, 20.0, 0.9)
    assert "| json | PPO | 1 | 0.900 | 0.900 | 20.000 | 1.800 | 2.00 |" in lab[1].table({("json", "PPO"): [found]})


def test_every_algorithm_has_the_same_budget_and_prompts(lab, tmp_path):
    algorithms, real = lab
    options = argparse.Namespace(tiny=False, steps=5, out=str(tmp_path))
    recipes = [real.recipe_of(each, "json", 1, "x", options) for each in algorithms.VARIANTS.values()]
    assert len(recipes) == len(algorithms.VARIANTS)
    budgets = {(r.rollout.prompts_per_step, r.rollout.samples_per_prompt, r.rollout.max_new_tokens) for r in recipes}
    assert budgets == {(16, 4, 32)} and {r.optimizer.policy_lr for r in recipes} == {1e-5}
    assert len({(r.task.prompts, r.run.seed, r.run.steps, r.model.path) for r in recipes}) == 1
    assert all(build_reward(r.reward.parts, own=None, policy=None, seed=0) for r in recipes[:1])


def test_the_tiny_lab_runs_and_does_not_repeat_what_is_done(lab, tmp_path, capsys):
    algorithms, real = lab
    words = ["--tiny", "--only", "RLOO", "--tasks", "json", "--seeds", "2", "--steps", "2", "--out", str(tmp_path)]
    real.real_lab(algorithms.VARIANTS, words)
    first = (tmp_path / "table.md").read_text()
    finished = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("json/rloo/*/finished.json"))
    assert len(finished) == 2 and "| json | RLOO | 2 |" in first and (tmp_path / "curves.png").stat().st_size > 1000
    real.real_lab(algorithms.VARIANTS, words)
    assert (tmp_path / "table.md").read_text() == first
    assert finished == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.glob("json/rloo/*/finished.json"))
