"""A recorded run by its columns."""

from __future__ import annotations

import math

from tether.store.recorded import RecordedRun

ROWS = [
    {"step": 0, "loss": 2.0},
    {"step": 3, "loss": math.nan, "score": 0.5},
    {"step": 4.0},
    {"step": 7, "score": 1},
]
RUN = RecordedRun("run", "ppo", {}, ROWS)


def test_a_column_has_the_steps_at_which_its_metric_was_measured():
    assert RUN.column("score") == ([3, 7], [0.5, 1.0])
    steps, values = RUN.column("loss")
    assert steps == [0, 3] and values[0] == 2.0 and math.isnan(values[1])
    assert RUN.column("unheard of") == ([], [])


def test_series_are_in_the_order_in_which_metrics_first_occur():
    assert list(RUN.series) == ["step", "loss", "score"]
    assert RUN.series["step"][1].tolist() == [0.0, 3.0, 4.0, 7.0]
