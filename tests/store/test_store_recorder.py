"""What is recorded is read back: exactly, step by step, in SQLite and in PostgreSQL."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import CONFIG, Recording, same, synthetic

from tether.errors import ConfigError, StorageError
from tether.store.database.apply import KeepRollouts
from tether.store.database.open import workspace_at
from tether.store.database.records import RecordSource
from tether.store.lineage import describe_environment, git_state, sources_of
from tether.store.read import find_run, list_runs, open_workspace, read_run, workspace_of


def test_metrics_rollouts_and_events_come_back_as_they_were(tmp_path: Path, store_url):
    recording = Recording(tmp_path, store_url, name="demo/ppo")
    exact = {"tenth": 0.1, "tiny": 5e-324, "big": 1.7976931348623157e308, "minus": -0.0}
    rows = [synthetic(0, row, completion="nul \x00 half \ud83d") for row in range(3)]
    recording.recorder.record(0, exact, rows)
    recording.recorder.record(1, {"nan": math.nan, "inf": math.inf})
    recording.recorder.event("checkpoint", "step \x00 zero", step=0, data={"bytes": 12, "rate": math.inf})
    assert recording.recorder.flush() and recording.recorder.close("done") and recording.said == []
    with open_workspace(tmp_path / "runs", store_url) as opened:
        run = read_run(opened, "demo/ppo")
        assert (run.name, run.method, run.config) == ("demo/ppo", "ppo", CONFIG)
        assert run.metrics[0] == {"step": 0, **exact}
        assert run.column("nan")[0] == [1] and all(math.isnan(run.metrics[1][name]) for name in ("nan", "inf"))
        [event] = run.events
        assert (event.kind, event.text, event.step) == ("checkpoint", "step \x00 zero", 0)
        assert event.data == {"bytes": 12, "rate": None}
        assert run.rollout_steps == [0] and run.rollouts(1) == []
        assert all(same(one, other) for one, other in zip(run.rollouts(0), rows, strict=True))


@settings(max_examples=8, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.floats(), max_size=5))
def test_any_metric_survives(tmp_path_factory, metrics):
    root = tmp_path_factory.mktemp("any")
    recording = Recording(root)
    recording.recorder.record(0, metrics)
    recording.recorder.close("done")
    assert recording.said == []
    with open_workspace(root / "runs") as opened:
        [row] = read_run(opened, "a").metrics
    for name, value in metrics.items():
        kept = row[name.replace("\x00", "").encode("utf-8", "replace").decode()] if name != "step" else value
        clash = sum(other.replace("\x00", "") == name.replace("\x00", "") for other in metrics) > 1
        assert clash or kept == value or (math.isnan(kept) and not math.isfinite(value))


def test_a_rewound_run_has_every_step_once(tmp_path: Path, store_url):
    first = Recording(tmp_path, store_url)
    first.steps(0, 1, 2, 3, rollouts=2)
    first.recorder.event("begun", "no step")
    first.recorder.event("skipped", "early", step=1)
    first.recorder.event("skipped", "late", step=3)
    first.recorder.close("stopped")
    second = Recording(tmp_path, store_url, resumes=True)
    second.recorder.rewind(2)
    second.recorder.record(2, {"score": 9.0})
    second.recorder.close("done")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        run, summary = read_run(opened, "a"), find_run(opened, "a")
        assert [row["step"] for row in run.metrics] == [0, 1, 2] and run.metrics[2] == {"step": 2, "score": 9.0}
        assert run.rollout_steps == [0, 1] and [event.text for event in run.events] == ["no step", "early"]
        assert (summary.steps_done, summary.steps_target, summary.state) == (3, 10, "done")


def test_a_rewind_takes_the_step_it_names_and_leaves_the_one_before(tmp_path: Path, store_url):
    recording = Recording(tmp_path, store_url)
    recording.steps(0, 1, 2, rollouts=1)
    recording.recorder.rewind(1)
    recording.recorder.close("stopped")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        run = read_run(opened, "a")
        assert [row["step"] for row in run.metrics] == [0] and run.rollout_steps == [0]
        assert find_run(opened, "a").steps_done == 1


def test_a_step_that_is_recorded_again_replaces_the_first(tmp_path: Path, store_url):
    recording = Recording(tmp_path, store_url)
    recording.steps(0, rollouts=3)
    recording.recorder.record(0, {"loss": 1.0}, [synthetic(0, 0)])
    recording.recorder.close("done")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        run = read_run(opened, "a")
        assert list(run.metrics) == [{"step": 0, "loss": 1.0}] and len(run.rollouts(0)) == 1


def test_a_new_run_of_an_old_name_takes_its_place(tmp_path: Path, store_url):
    old = Recording(tmp_path, store_url)
    old.steps(0, 1, rollouts=1)
    old.recorder.close("done")
    new = Recording(tmp_path, store_url)
    new.steps(0)
    new.recorder.close("done")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        assert len(list_runs(opened)) == 1
        run = read_run(opened, "a")
        assert len(run.metrics) == 1 and run.rollout_steps == []


def test_two_recorders_of_one_run_are_refused(tmp_path: Path):
    first = Recording(tmp_path)
    with pytest.raises(StorageError, match="another process"):
        Recording(tmp_path, resumes=True)
    first.recorder.close("done")
    Recording(tmp_path, resumes=True).recorder.close("done")


def test_workspaces_that_share_a_store_do_not_see_each_other(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/shared.db"
    for place in ("one", "two"):
        Recording(tmp_path / place, url).recorder.close("done")
    with open_workspace(tmp_path / "one" / "runs", url) as opened:
        assert [run.folder for run in list_runs(opened)] == [tmp_path / "one" / "runs" / "a"]


# -- which rollouts are kept


@pytest.mark.parametrize(
    ("steps", "most", "dropped"),
    [
        ([0, 1, 2, 3], 4, []),
        ([0, 1, 2, 3, 4], 4, [1]),  # all gaps are equal: the oldest goes
        ([0, 2, 3, 4, 5], 4, [3]),
        ([0, 2, 4, 6, 7], 4, [6]),
        ([0, 10, 20, 21], 3, [20]),
        ([5, 6, 7], 1, [6]),  # first and last stay
        ([0, 1, 2], None, []),
    ],
)
def test_the_one_whose_neighbours_are_closest_goes(steps, most, dropped):
    assert KeepRollouts(most=most).to_drop(steps) == dropped


def test_every_nth_step_and_at_most_so_many_are_kept(tmp_path: Path, store_url):
    recording = Recording(tmp_path, store_url, keep=KeepRollouts(every=2, most=3))
    recording.steps(*range(13), rollouts=1)
    recording.recorder.close("done")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        run = read_run(opened, "a")
        assert len(run.metrics) == 13
        assert len(run.rollout_steps) == 3 and run.rollout_steps[0] == 0 and run.rollout_steps[-1] == 12


def test_no_rollouts_are_kept_where_none_are_wanted(tmp_path: Path):
    recording = Recording(tmp_path, keep=KeepRollouts(every=0))
    recording.steps(0, 1, rollouts=1)
    recording.recorder.close("done")
    with open_workspace(tmp_path / "runs") as opened:
        assert read_run(opened, "a").rollout_steps == []


# -- lists, lineage, environment


def test_a_list_of_runs_says_where_each_came_from_and_how_it_does(tmp_path: Path, store_url):
    Recording(tmp_path, store_url, name="sft").recorder.close("done")
    sources = [RecordSource("model", "runs/sft/model", run="sft"), RecordSource("data", "x.jsonl", sha256="ab" * 32)]
    second = Recording(tmp_path, store_url, name="ppo", sources=sources)
    second.recorder.record(0, {"score": 0.5, "kl_ref_k3": math.inf})
    second.recorder.flush()
    with open_workspace(tmp_path / "runs", store_url) as opened:
        ppo, sft = list_runs(opened)
        assert (ppo.name, ppo.state, sft.name, sft.state) == ("ppo", "running", "sft", "done")
        assert [(one.role, one.run) for one in ppo.lineage] == [("model", "sft"), ("data", None)]
        assert ppo.lineage[1].sha256 == "ab" * 32
        assert ppo.latest["score"] == 0.5 and math.isnan(ppo.latest["kl_ref_k3"])
    second.recorder.close("stopped")


def test_a_run_is_found_by_its_name_and_by_its_folder(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("TETHER_STORE", raising=False)
    Recording(tmp_path, name="demo/ppo").recorder.close("done")
    monkeypatch.chdir(tmp_path)
    for words in ("demo/ppo", "runs/demo/ppo", "runs/demo/ppo/", str(tmp_path / "runs" / "demo" / "ppo")):
        assert Path(workspace_of(words)).resolve() == tmp_path / "runs"
        with open_workspace(workspace_of(words)) as opened:
            assert find_run(opened, words).name == "demo/ppo"
    with open_workspace() as opened, pytest.raises(ConfigError, match="did you mean demo/ppo"):
        find_run(opened, "demo/pp")


def test_a_folder_without_runs_is_told_and_not_filled(tmp_path: Path):
    with pytest.raises(ConfigError, match="--workspace"):
        open_workspace(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_lineage_is_read_off_the_recipe(tmp_path: Path):
    workspace = workspace_at(tmp_path)
    for name in ("sft", "demo/reward"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "recipe.json").write_text("{}")
    data = tmp_path / "pairs.jsonl"
    data.write_bytes(b"abc")
    config = {
        "model": {"path": str(tmp_path / "sft" / "model")},
        "roles": {"critic_init": str(tmp_path / "demo" / "reward")},
        "reward": {"parts": [{"kind": "model", "path": str(tmp_path / "demo/reward/model")}, {"kind": "ended"}]},
        "data": {"train": str(data), "held_out": None},
        "task": {"prompts": str(tmp_path / "missing.jsonl")},
    }
    found = {source.role: source for source in sources_of(config, workspace)}
    assert {role: source.run for role, source in found.items() if source.run} == {
        "model": "sft",
        "critic": "demo/reward",
        "reward": "demo/reward",
    }
    assert found["data"].sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2
    assert found["prompts"].sha256 is None and "held_out" not in found
    assert sources_of({"model": {"path": "smollm2-135m"}}, workspace) == [RecordSource("model", "smollm2-135m")]


def test_the_environment_is_json_and_knows_the_commit(tmp_path: Path):
    import subprocess

    described = json.loads(json.dumps(describe_environment(seed=3, device="cpu")))
    assert described["seed"] == 3 and described["python"].startswith("3.") and described["torch"]
    assert git_state(tmp_path) == {}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    state = git_state(tmp_path)
    assert len(state["git_commit"]) == 40 and state["git_dirty"] is False
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path)["git_dirty"] is True
