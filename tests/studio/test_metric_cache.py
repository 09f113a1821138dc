"""Curves in memory are the database's numbers, bit for bit, however and in whatever order they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, insert

import tether.studio.metric_cache as module
from tether.errors import StorageError
from tether.store.database.open import open_engine, workspace_at
from tether.store.database.schema import metrics, runs, step_digest, steps
from tether.store.read import OpenWorkspace, read_run
from tether.studio.metric_cache import MetricCache

NAMES = ("score", "loss", "held_out/score", "κ")
Step = dict[str, float | None]

finite = st.floats(allow_nan=False, allow_infinity=False)
a_number = st.none() | finite.map(lambda value: value + 0.0)  # SQLite has no -0
a_step = st.dictionaries(st.sampled_from(NAMES), a_number)
a_question = st.none() | st.lists(st.sampled_from([*NAMES, "unheard of"]), unique=True)


class Written:
    """A run whose rows are put into the database one by one, and remembered here as well."""

    def __init__(self, opened: OpenWorkspace) -> None:
        self.opened, self.kept = opened, list[Step]()
        with opened.engine.begin() as connection:
            connection.execute(delete(runs))
            described = {"workspace": opened.workspace.key, "name": "run", "method": "ppo", "state": "done", "uid": "u"}
            numbers = {"created": 0.0, "updated": 0.0, "steps_target": 99, "steps_done": 0}
            connection.execute(insert(runs).values(id=1, **described, **numbers, config={}, environment={}))

    def add(self, new: list[Step]) -> None:
        with self.opened.engine.begin() as connection:
            for step, values in enumerate(new, start=len(self.kept)):
                digest = step_digest(step, values)
                connection.execute(insert(steps).values(run_id=1, step=step, recorded=float(step), digest=digest))
                for name, value in values.items():
                    connection.execute(insert(metrics).values(run_id=1, step=step, name=name, value=value))
        self.kept += new

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """What a curve has to be."""
        found = [(step, values[name]) for step, values in enumerate(self.kept) if name in values]
        return [step for step, _ in found], [math.nan if value is None else value for _, value in found]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenWorkspace]:
    folder = tmp_path_factory.mktemp("metrics")
    workspace = workspace_at(folder, f"sqlite:///{folder}/tether.db")
    with OpenWorkspace(workspace, open_engine(workspace, kept=2)) as found:
        yield found


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_A_TIME", 3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.tuples(st.lists(a_step, max_size=5), a_question), min_size=1, max_size=4))
def test_curves_are_the_numbers_of_the_database(
    opened: OpenWorkspace, parts: list[tuple[list[Step], list[str] | None]]
):
    written, cache = Written(opened), MetricCache(opened)
    for new, asked in parts:
        written.add(new)
        there = {name for values in written.kept for name in values}
        found = cache.series(1, asked)
        assert set(found) == there & set(NAMES if asked is None else asked)
        for name, series in found.items():
            at, was = written.column(name)
            assert series.steps.tolist() == at and series.values.tobytes() == np.array(was, dtype=np.float64).tobytes()
    assert cache.names(1) == sorted({name for values in written.kept for name in values})


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.lists(a_step, max_size=5), asked=a_question, then=st.lists(a_step, max_size=3))
def test_rows_are_those_of_the_run_store_with_steps_that_measured_nothing(
    opened: OpenWorkspace, first: list[Step], asked: list[str] | None, then: list[Step]
):
    written, cache = Written(opened), MetricCache(opened)
    written.add(first)
    cache.series(1, asked)
    written.add(then)
    assert in_order(cache.rows(1)) == in_order(read_run(opened, "run").metrics)


def in_order(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Each row by its names; as text, in which NaN is like NaN."""
    return [repr(sorted(row.items())) for row in rows]


def test_a_read_that_failed_half_way_leaves_nothing_behind(opened: OpenWorkspace, monkeypatch: pytest.MonkeyPatch):
    written, cache = Written(opened), MetricCache(opened)
    written.add([{"score": float(step)} for step in range(10)])
    read = module._new_rows

    def breaks_off(*words: object):
        yield next(iter(read(*words)))  # pyright: ignore[reportArgumentType]
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patched, pytest.raises(StorageError):
        patched.setattr(module, "_new_rows", breaks_off)
        cache.series(1)
    assert cache.series(1)["score"].values.tolist() == [float(step) for step in range(10)]
