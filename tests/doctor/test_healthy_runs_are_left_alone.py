"""No warning and no alarm over runs that learn; this is what benchmarks/doctor.py counts."""

import pytest
from recipes_of_runs import HEALTHY
from stored_runs import read_recorded, recorded_names

from tether.doctor.doctor import Doctor, LiveDoctor

NAMES = recorded_names("healthy-")


def test_there_are_at_least_twenty_of_every_kind_that_is_trained():
    assert len(NAMES) >= 20
    assert {run.name for run in HEALTHY} <= set(NAMES)
    assert {read_recorded(name).method for name in NAMES} == {
        *("ppo", "grpo", "rloo", "reinforce", "trpo", "sft", "reward", "dpo"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_run_gets_no_warning(name: str):
    assert [found for found in Doctor().examine(read_recorded(name)) if found.severity != "note"] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_run_gets_no_warning_while_it_trains(name: str):
    run = read_recorded(name)
    doctor = LiveDoctor(run.method, run.config, every=5)
    said = [found for row in run.metrics for found in doctor.see(int(row["step"]), row)]
    assert [found for found in said if found.severity != "note"] == []
