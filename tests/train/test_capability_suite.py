"""`evaluation.suite`: measured before the first and after the last step, kept over kills, and changing no bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import attempt, broken_in_every_step, step_by_step, whole
from same_runs import differences, metrics_table
from tiny_recipes import TOP, tiny

from tether.distributed.group_ranks import check_recipe
from tether.errors import ConfigError
from tether.evaluation.suite.capability_suite import SuiteResult, run_suite
from tether.evaluation.suite.suite_model import SuiteModel
from tether.models.load import load_causal_lm
from tether.reports.capability_table import EVENT, changes_of
from tether.seeds import derive_seed
from tether.store.read import find_run, open_workspace, read_run
from tether.store.recorded import RecordedRun
from tether.train import capability_hook
from tether.train.resume import fork_run

SUITE = ("--evaluation.suite", "[perplexity, repetition]", "--evaluation.suite_items", "3", "--run.steps", "3")
LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")


def read(path: Path) -> RecordedRun:
    with open_workspace(str(path.parent)) as opened:
        find_run(opened, path.name)
        return read_run(opened, path.name)


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """The parts that were measured, one entry for each measurement."""
    calls: list[str] = []

    def counted(model, names, **options):
        calls.append(",".join(names))
        return run_suite(model, names, **options)

    monkeypatch.setattr(capability_hook, "run_suite", counted)
    return calls


def test_before_and_after_are_metrics_and_an_event(tmp_path, measured):
    path = whole(tiny("ppo", tmp_path / "runs", *SUITE))
    run, names = read(path), ("bits_per_byte", "perplexity", "repetition", "sameness")
    assert len(measured) == 2
    for name in names:
        assert run.column(f"suite/start/{name}")[0] == [0] and run.column(f"suite/{name}")[0] == [2]
    start = load_causal_lm("tiny-bytes", dtype="float32", device="cpu", seed=derive_seed(0, "model"))
    expected = run_suite(SuiteModel.of_loaded(start), ("perplexity", "repetition"), items=3)
    assert SuiteResult.from_json(json.loads((path / "suite.json").read_text())["start"]) == expected
    end = load_causal_lm(str(path / "model"), dtype="float32", device="cpu", seed=0)
    after = run_suite(SuiteModel.of_loaded(end), ("perplexity", "repetition"), items=3)
    changes = {change.name: change for change in changes_of(run)}
    assert tuple(changes) == names
    change = changes["bits_per_byte"]
    assert change.start[0] == expected.estimates["bits_per_byte"].value
    assert change.end[0] == pytest.approx(after.estimates["bits_per_byte"].value, rel=1e-5)
    assert change.difference[0] == pytest.approx(change.end[0] - change.start[0])
    assert run.column("suite/bits_per_byte")[1] == [change.end[0]]


@pytest.mark.parametrize(
    ("method", "flags"),
    [("ppo", ()), ("ppo", (*LORA, "--roles.critic", "head")), ("ppo", TOP), ("grpo", ("--rollout.lag", "1"))],
)
def test_the_suite_changes_no_bit_of_training(tmp_path, method, flags):
    without = whole(tiny(method, tmp_path / "without", *flags, "--run.steps", "3"))
    measured = whole(tiny(method, tmp_path / "with", *SUITE, *flags))
    others = [row for row in metrics_table(measured) if not row[1].startswith("suite/")]
    assert others == metrics_table(without)


def test_a_run_that_is_stopped_after_every_step_keeps_its_start(tmp_path, measured):
    calm = whole(tiny("rloo", tmp_path / "calm", *SUITE, *TOP))
    stopped = step_by_step(tiny("rloo", tmp_path / "stopped", *SUITE, *TOP, "--checkpoint.every", "0"))
    assert len(measured) == 4  # two for each run
    assert differences(calm, stopped) == []
    assert changes_of(read(calm)) == changes_of(read(stopped)) != []


def test_a_run_that_is_killed_within_every_step_keeps_its_start(tmp_path, monkeypatch, measured):
    flags = (*SUITE, "--checkpoint.every", "1")
    calm = whole(tiny("ppo", tmp_path / "calm", *flags))
    broken = broken_in_every_step(tiny("ppo", tmp_path / "broken", *flags), monkeypatch, "update")
    assert differences(calm, broken) == []
    assert [event.kind for event in read(broken).events].count(EVENT) == 1
    assert changes_of(read(calm)) == changes_of(read(broken))


def test_a_damaged_first_measurement_is_measured_again(tmp_path, measured):
    recipe = tiny("rloo", tmp_path / "runs", *SUITE)
    attempt(recipe, stop_after=1)
    path = tmp_path / "runs" / "run"
    first = json.loads((path / "suite.json").read_text())
    (path / "suite.json").write_text("{")
    assert attempt(recipe).finished
    assert json.loads((path / "suite.json").read_text()) == first and len(measured) == 3


def test_a_run_that_ends_early_is_compared_as_well(tmp_path):
    flags = ("--evaluation.every", "1", "--evaluation.patience", "1", "--optimizer.policy_lr", "0", "--run.steps", "6")
    done = attempt(tiny("rloo", tmp_path / "runs", *SUITE, *flags))
    assert done.finished and done.steps < 6
    changes = changes_of(read(tmp_path / "runs" / "run"))
    assert changes and all(change.difference == (0.0, 0.0, 0.0) for change in changes)  # nothing was learned


def test_a_fork_starts_from_its_own_measurement(tmp_path):
    whole(tiny("rloo", tmp_path / "runs", *SUITE, "--checkpoint.every", "1"))
    words = ["--run.name", "child", "--run.steps", "4"]
    assert fork_run(str(tmp_path / "runs" / "run"), str(tmp_path / "runs"), 2, words, json_output=True) == 0
    record = json.loads((tmp_path / "runs" / "child" / "suite.json").read_text())
    parent = json.loads((tmp_path / "runs" / "run" / "suite.json").read_text())
    assert (parent["first_step"], record["first_step"]) == (0, 2) and record["start"] != parent["start"]
    assert read(tmp_path / "runs" / "child").column("suite/start/bits_per_byte")[0] == [2]


def test_a_worker_that_samples_elsewhere_gives_the_same_measurement(tmp_path):
    flags = (*SUITE, "--rollout.workers", "1", "--distributed.rollout_chunk", "2", "--run.steps", "1")
    here = whole(tiny("ppo", tmp_path / "here", *SUITE, "--run.steps", "1"))
    there = whole(tiny("ppo", tmp_path / "there", *flags))
    assert [change.start for change in changes_of(read(there))] == [change.start for change in changes_of(read(here))]


def test_what_is_not_possible_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="'perplx' is no part of the suite"):
        tiny("ppo", tmp_path / "runs", "--evaluation.suite", "[perplx]")
    with pytest.raises(ConfigError, match=r"evaluation\.suite is not available with several ranks"):
        check_recipe(tiny("ppo", tmp_path / "runs", *SUITE))
