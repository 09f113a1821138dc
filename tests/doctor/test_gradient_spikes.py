"""Spikes of the gradient's norm, against a slow reading of what a spike is."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tether.doctor.findings import Curve
from tether.doctor.learning import ABOVE_START, MIN_ITERATIONS, SPIKE, SPIKE_WINDOW, _spikes


def spikes_one_by_one(values: list[float]) -> list[int]:
    """The places above the beginning's largest norm and above the median of up to a window of norms before them."""
    found: list[int] = []
    for place in range(MIN_ITERATIONS, len(values)):
        before = sorted(values[max(0, place - SPIKE_WINDOW) : place])
        middle = (before[(len(before) - 1) // 2] + before[len(before) // 2]) / 2
        if values[place] > ABOVE_START * max(values[:MIN_ITERATIONS]) and values[place] > SPIKE * middle:
            found.append(place)
    return found


@given(values=st.lists(st.sampled_from([0.25, 0.5, 1.0, 4.0, 16.0, 64.0]), min_size=2 * MIN_ITERATIONS, max_size=60))
def test_spikes_are_found_where_a_slow_reading_finds_them(values: list[float]):
    assert _spikes(Curve("norm", np.arange(len(values)), np.array(values))) == spikes_one_by_one(values)


def test_a_norm_that_jumps_in_the_first_window_and_after_it_is_found_both_times():
    values = np.ones(60)
    values[[8, 45]] = 11.0
    assert _spikes(Curve("norm", np.arange(60), values)) == [8, 45]
