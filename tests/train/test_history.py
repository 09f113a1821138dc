"""A run's history belongs to the run: whatever happens to its folder or its store, every step is there at the end."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from in_process import attempt, whole
from same_runs import differences, metrics_table
from tiny_recipes import tiny

from tether.store.header import header_file
from tether.store.read import find_run, list_runs, open_workspace, read_run
from tether.train.resume import stored_recipe
from tether.train.run import train_recipe

RULES = ("--run.steps", "6", "--checkpoint.every", "2", "--run.doctor_every", "0")


def stopped(workspace: Path, after: int = 4, name: str = "run"):
    recipe = tiny("sft", workspace, *RULES, name=name)
    attempt(recipe, stop_after=after)
    return recipe


def resumed(folder: Path) -> list[str]:
    """Go on with the run in a folder; what was said."""
    said: list[str] = []
    done = train_recipe(
        stored_recipe(folder), stop=lambda: False, advance=lambda step, row: None, notify=said.append, resume=True
    )
    assert done.steps == 6
    return said


def steps_of(workspace: Path, name: str = "run", url: str | None = None) -> list[int]:
    with open_workspace(workspace, url) as opened:
        return [int(row["step"]) for row in read_run(opened, name).metrics]


def remove(place: Path) -> None:
    (place / "tether.db").unlink()


def empty(place: Path) -> None:
    (place / "tether.db").write_bytes(b"")


@pytest.mark.parametrize("lose", [remove, empty], ids=["deleted", "emptied"])
def test_a_store_that_is_gone_gets_the_history_back_from_the_runs_folder(tmp_path, lose):
    calm = whole(tiny("sft", tmp_path / "calm", *RULES))
    stopped(tmp_path / "runs")
    lose(tmp_path / "runs")
    said = resumed(tmp_path / "runs" / "run")
    assert any("lacked metrics of steps 0 to 3: they were restored" in text for text in said)
    assert differences(calm, tmp_path / "runs" / "run") == []
    with open_workspace(tmp_path / "runs") as opened:
        kinds = [event.kind for event in read_run(opened, "run").events]
    assert kinds[0] == "stopped" and "resumed" in kinds, "what happened to the run is put back too"


def test_an_older_store_gets_the_steps_that_it_lacks(tmp_path):
    recipe = stopped(tmp_path / "runs", after=2)
    shutil.copy(tmp_path / "runs" / "tether.db", tmp_path / "older.db")
    attempt(recipe, stop_after=2)
    shutil.copy(tmp_path / "older.db", tmp_path / "runs" / "tether.db")
    said = resumed(tmp_path / "runs" / "run")
    assert any("lacked metrics of steps 2 to 3" in text for text in said)
    assert steps_of(tmp_path / "runs") == list(range(6))


def test_another_store_gets_the_whole_history(tmp_path, monkeypatch):
    stopped(tmp_path / "runs")
    monkeypatch.setenv("TETHER_STORE", f"sqlite:///{tmp_path}/other.db")
    said = resumed(tmp_path / "runs" / "run")
    assert any("lacked metrics of steps 0 to 3" in text for text in said)
    assert steps_of(tmp_path / "runs", url=f"sqlite:///{tmp_path}/other.db") == list(range(6))


def test_a_run_that_was_renamed_takes_its_records_along_tokens_included(tmp_path):
    recipe = tiny("grpo", tmp_path / "runs", "--run.steps", "3", "--run.doctor_every", "0")
    attempt(recipe, stop_after=2)
    (tmp_path / "runs" / "run").rename(tmp_path / "runs" / "run2")
    said: list[str] = []
    moved = stored_recipe(tmp_path / "runs" / "run2")
    train_recipe(moved, stop=lambda: False, advance=lambda step, row: None, notify=said.append, resume=True)
    assert any("was recorded as run and continues as run2" in text for text in said)
    with open_workspace(tmp_path / "runs") as opened:
        assert [run.name for run in list_runs(opened)] == ["run2"]
        run = read_run(opened, "run2")
        assert run.rollout_steps == [0, 1, 2] and len(run.metrics) == 3


def test_names_that_were_swapped_swap_their_records(tmp_path):
    runs = tmp_path / "runs"
    stopped(runs, name="one")
    stopped(runs, after=2, name="other")
    (runs / "one").rename(runs / "old")
    (runs / "other").rename(runs / "one")
    resumed(runs / "one")
    resumed(runs / "old")
    with open_workspace(runs) as opened:
        assert sorted(run.name for run in list_runs(opened)) == ["old", "one"]
    assert steps_of(runs, "one") == steps_of(runs, "old") == list(range(6))


def test_a_new_run_of_an_old_name_does_not_take_the_records_of_the_run_that_moved(tmp_path):
    runs = tmp_path / "runs"
    stopped(runs)
    before = metrics_table(runs / "run")
    (runs / "run").rename(runs / "old")
    stopped(runs, after=1)
    assert len(steps_of(runs)) == 1
    assert metrics_table(runs / "old") == before


def test_a_copy_becomes_a_run_of_its_own_with_a_copy_of_the_records(tmp_path):
    runs = tmp_path / "runs"
    stopped(runs)
    shutil.copytree(runs / "run", runs / "copy")
    said = resumed(runs / "copy")
    assert any("This is a copy of the run run" in text for text in said)
    first, second = header_file(runs / "run"), header_file(runs / "copy")
    assert first is not None and second is not None and first.uid != second.uid
    assert steps_of(runs, "run") == list(range(4)), "the first one is left alone"
    assert steps_of(runs, "copy") == list(range(6))
    assert not any("copy of the run" in text for text in resumed(runs / "run"))
    assert metrics_table(runs / "run") == metrics_table(runs / "copy")


@pytest.mark.parametrize("from_elsewhere", [False, True])
def test_a_folder_that_was_replaced_by_a_link_is_the_same_run(tmp_path, monkeypatch, from_elsewhere):
    stopped(tmp_path / "runs")
    (tmp_path / "big").mkdir()
    (tmp_path / "runs" / "run").rename(tmp_path / "big" / "run")
    (tmp_path / "runs" / "run").symlink_to(tmp_path / "big" / "run")
    if from_elsewhere:
        monkeypatch.chdir(tmp_path)
    resumed(Path("runs/run") if from_elsewhere else tmp_path / "runs" / "run")
    assert not (tmp_path / "big" / "tether.db").exists()
    assert steps_of(tmp_path / "runs") == list(range(6))
    with open_workspace(tmp_path / "runs") as opened:
        assert find_run(opened, str(tmp_path / "runs" / "run")).name == "run"


def test_damaged_metrics_and_events_are_put_back_from_the_log_and_lines_of_the_log_from_the_store(tmp_path):
    runs = tmp_path / "runs"
    recipe = stopped(runs)
    calm = whole(tiny("sft", tmp_path / "calm", *RULES))
    database = sqlite3.connect(runs / "tether.db")
    with database:
        database.execute("UPDATE metrics SET value = value + 1e-9 WHERE step = 1 AND name = 'loss'")
        database.execute("UPDATE events SET text = '\"never happened\"' WHERE kind = 'stopped'")
    database.close()
    log = runs / "run" / "records.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    place = next(index for index, line in enumerate(lines) if b'"step": 2, ' in line and b'"kind": "step"' in line)
    lines[place] = lines[place].replace(b'"loss": ', b'"lose": ')
    log.write_bytes(b"".join(lines))
    said = resumed(run_folder := runs / "run")
    assert any("had damaged metrics of step 1" in text for text in said)
    assert any("lacked step 2" in text and "records.jsonl" in text for text in said)
    assert any("damaged 1 events" in text for text in said)
    assert differences(calm, run_folder) == []
    assert resumed(run_folder) == []
    assert recipe.run.name == "run"


def test_damaged_tokens_are_told_and_the_rest_can_be_read(tmp_path):
    from tether.errors import StorageError

    recipe = tiny("grpo", tmp_path / "runs", "--run.steps", "3", "--run.doctor_every", "0")
    attempt(recipe, stop_after=2)
    database = sqlite3.connect(tmp_path / "runs" / "tether.db")
    with database:
        database.execute("UPDATE rollouts SET score = score + 1 WHERE step = 1 AND place = 2")
        database.execute("DELETE FROM rollouts WHERE step = 0 AND place = 3")
    database.close()
    said: list[str] = []
    attempt(recipe, notify=said.append)
    assert any("damaged or missing tokens of steps 0 to 1" in text for text in said)
    with open_workspace(tmp_path / "runs") as opened:
        run = read_run(opened, "run")
        assert len(run.rollouts(2)) == 8
        with pytest.raises(StorageError, match="step 1, sample 2 is damaged"):
            run.rollouts(1)


def test_a_run_of_a_tether_without_headers_and_logs_gets_them(tmp_path):
    runs = tmp_path / "runs"
    stopped(runs)
    for name in ("run.json", "records.jsonl"):
        (runs / "run" / name).unlink()
    for path in (runs / "run" / "checkpoints").iterdir():
        _without_run(path)
    assert not any("lacked" in text for text in resumed(runs / "run"))
    assert header_file(runs / "run") is not None
    assert steps_of(runs) == list(range(6))
    (runs / "tether.db").unlink()
    (runs / "run" / "finished.json").unlink()
    said = resumed(runs / "run")
    assert any("steps 0 to 5" in text and "restored" in text for text in said)


def _without_run(path: Path) -> None:
    """A checkpoint as older versions wrote it."""
    from tether.store import checkpoints

    found = checkpoints.read(path)
    values = {name: value for name, value in found.values.items() if name not in ("run", "ground")}
    checkpoints.write(path.parent, checkpoints.Checkpoint(found.step, found.tensors, values))
