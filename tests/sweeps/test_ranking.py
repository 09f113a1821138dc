"""The statistics of a sweep against numbers that were worked out another way."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from tether.sweeps.manifest import SweepManifest, Trial
from tether.sweeps.pruning import hopeless, rung_steps
from tether.sweeps.ranking import best_of, chance_of_best, judge_settings, main_effects, ranked
from tether.sweeps.results import TrialResult, tail_mean
from tether.sweeps.student_t import mean_interval, t_quantile, within
from tether.sweeps.variation import Variation

# Two-sided 95 % and 99 % points of Student's t, from printed tables.
TABLE_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 9: 2.262, 10: 2.228, 20: 2.086, 30: 2.042}
TABLE_99 = {1: 63.657, 2: 9.925, 3: 5.841, 10: 3.169, 30: 2.750}


@pytest.mark.parametrize(("freedom", "quantile"), TABLE_95.items())
def test_quantiles_are_those_of_printed_tables(freedom: int, quantile: float):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize(("freedom", "quantile"), TABLE_99.items())
def test_quantiles_of_another_level(freedom: int, quantile: float):
    assert t_quantile(freedom, 0.99) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 6, 7])
def test_the_probability_is_the_integral_of_the_density(freedom: int):
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    t = np.linspace(0.0, 1.7, 200_001)
    density = scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    assert within(1.7, freedom) == pytest.approx(2 * np.trapezoid(density, t), rel=1e-9)


def test_an_interval_by_hand():
    # mean 2, deviation 1, 4.303 / sqrt(3) = 2.484
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.low == pytest.approx(2.0 - 2.4841, abs=1e-4) and found.high == pytest.approx(2.0 + 2.4841, abs=1e-4)
    assert mean_interval([0.5]).low is None


# -- the bootstrap


def by_hand(candidates: list[list[float]]) -> list[float]:
    """Every resample of the seeds, one at a time."""
    count = len(candidates[0])
    shares = [0.0] * len(candidates)
    every = list(itertools.product(range(count), repeat=count))
    for resample in every:
        means = [
            -math.inf if any(math.isinf(row[seed]) for seed in resample) else sum(row[seed] for seed in resample)
            for row in candidates
        ]
        winners = [place for place, mean in enumerate(means) if mean == max(means) and math.isfinite(mean)]
        for place in winners:
            shares[place] += 1.0 / len(winners)
    return [share / len(every) for share in shares]


def test_the_chance_of_being_best_by_hand():
    # Two seeds: both seed 0 (A wins), both seed 1 (B wins), mixed twice (4 > 3: A wins).
    assert chance_of_best([[4.0, 0.0], [1.0, 2.0]]) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("seeds", [1, 2, 3, 4])
def test_the_bootstrap_takes_every_resample_of_few_seeds(seeds: int):
    values = np.random.default_rng(seeds).integers(0, 4, (5, seeds)).astype(float).tolist()  # integers: exact ties
    assert chance_of_best(values) == pytest.approx(by_hand(values))


def test_a_diverged_seed_loses_every_resample_that_has_it():
    values = [[9.0, -math.inf, 9.0], [1.0, 1.0, 1.0]]
    assert by_hand(values) == pytest.approx([8 / 27, 19 / 27])
    assert chance_of_best(values) == pytest.approx([8 / 27, 19 / 27])


def test_many_seeds_are_drawn_from_a_fixed_seed():
    values = np.random.default_rng(0).normal(size=(3, 8))
    found = chance_of_best(values.tolist())
    assert found == chance_of_best(values.tolist()) and sum(found) == pytest.approx(1.0)
    rows = np.random.default_rng(7).integers(0, 8, (40_000, 8))
    best = np.argmax(values[:, rows].mean(axis=2), axis=0)
    assert found == pytest.approx([float((best == place).mean()) for place in range(3)], abs=0.02)


# -- settings


def manifest(
    settings: list[dict], sampler: str = "grid", direction: str = "max", seeds=(0, 1), **more
) -> SweepManifest:
    keys = list(settings[0])
    variations = tuple(Variation(key, tuple(dict.fromkeys(each[key] for each in settings))) for key in keys)
    recipe = {"method": "ppo", "run": {}, "store": {}}
    place, kept = Path("s"), tuple(settings)
    return SweepManifest(place, recipe, "x.yaml", variations, sampler, (0, 1), "score", direction, settings=kept)


def results(values: list[list[float | str | None]], seeds=(0, 1)) -> list[TrialResult]:
    """A number is the value of a trial that is done; a word is the state of one that is not."""
    found = []
    for setting, row in enumerate(values):
        for seed, value in zip(seeds, row, strict=True):
            trial = Trial(setting, seed)
            if isinstance(value, str):
                found.append(TrialResult(trial, value, 2))
            else:
                found.append(TrialResult(trial, "done", 1, ((0, value),)))
    return found


GRID = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 2}]


def test_settings_are_compared_with_the_best_seed_by_seed():
    sweep = manifest(GRID)
    judged = judge_settings(sweep, results([[1, 3], [2, 2.5], [0, 0], [1, 1]]))
    assert [each.interval.mean for each in judged] == [2.0, 2.25, 0.0, 1.0]
    best = best_of(judged)
    assert best is judged[1] and best.behind is None
    # against the best: 2 - 1 = 1 and 2.5 - 3 = -0.5
    assert judged[0].behind.mean == pytest.approx(0.25)
    assert judged[0].behind.high == pytest.approx(0.25 + 12.706 * 0.75, rel=1e-4)
    assert [each.number for each in ranked(judged, "max")] == [1, 0, 3, 2]


def test_less_is_better_where_it_is_said():
    sweep = manifest(GRID, direction="min")
    judged = judge_settings(sweep, results([[1, 1], [2, 2], ["diverged", 0], [3, 3]]))
    assert best_of(judged, "min") is judged[0], "a setting that diverges is not chosen, however good its other seed"
    assert judged[1].behind.mean == 1.0 and judged[2].diverged == 1
    assert [each.number for each in ranked(judged, "min")] == [0, 1, 3, 2]


def test_a_setting_that_has_not_ended_is_not_chosen():
    judged = judge_settings(manifest(GRID), results([[1, 1], [9, "waiting"], [2, 2], [0, 0]]))
    assert best_of(judged) is judged[2]
    assert judged[1].state == "unfinished" and judged[1].chance is None and judged[1].interval.mean == 9


def test_main_effects_of_a_grid_average_over_the_other_key():
    sweep = manifest(GRID)
    judged = judge_settings(sweep, results([[1, 3], [2, 2.5], [0, 0], [1, 1]]))
    first, second = main_effects(sweep, judged, {"a": 1, "b": 1})
    assert [each.seeds for each in first.values] == [(1.5, 2.75), (0.5, 0.5)]
    assert first.span == pytest.approx(2.125 - 0.5) and first.best.values == {"a": 1}
    assert [each.interval.mean for each in second.values] == [1.0, 1.625]


def test_main_effects_of_one_at_a_time_leave_the_other_keys_alone():
    settings = [{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 2}]
    sweep = manifest(settings, sampler="one-at-a-time")
    judged = judge_settings(sweep, results([[1, 1], [5, 5], [7, 7]]))
    first, second = main_effects(sweep, judged, {"a": 1, "b": 1})
    assert [each.interval.mean for each in first.values] == [1.0, 5.0]
    assert [each.interval.mean for each in second.values] == [1.0, 7.0]


def test_the_value_of_a_trial_is_the_mean_of_its_last_quarter():
    points = [(step, float(step)) for step in range(8)]
    assert tail_mean(points, 8) == 6.5 and tail_mean(points, 4) == 3.0
    assert tail_mean([(0, 1.0), (3, 2.0)], 8) == 2.0, "the last one, where none was measured late"
    assert tail_mean([(7, math.nan)], 8) is None and tail_mean([], 8) is None


# -- early stopping


def test_rungs_are_a_quarter_and_half():
    assert rung_steps(16) == [4, 8] and rung_steps(3) == [1] and rung_steps(1) == []


def test_a_setting_is_stopped_where_all_its_seeds_are_below_the_median():
    values = {0: [1.0, 2.0], 1: [5.0, 0.0], 2: [6.0, 7.0], 3: [None, None]}
    middle, stopped = hopeless(values, [0, 1, 2, 3], "max")
    assert middle == 3.5 and stopped == (0, 3), "the median of 0, 1, 2, 5, 6, 7"
    assert hopeless(values, [0, 1, 2, 3], "max", kept=frozenset({0}))[1] == (3,)
    assert hopeless(values, [0, 1, 2, 3], "min")[1] == (2, 3)
    assert hopeless({0: [1.0], 1: [2.0]}, [0, 1], "max") == (None, ())
