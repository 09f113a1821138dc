"""Whatever happens to the store, training goes on, and nothing that can be kept is lost, doubled or torn."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from recording import Recording, experience, rollouts_of, same, synthetic

import tether.store.database.journal as journal_module
import tether.store.recorder as writer_module
from tether.store.database.journal import Spool, is_being_recorded
from tether.store.database.records import StoreRecord
from tether.store.read import find_run, list_runs, open_workspace, read_run
from tether.store.tokens import StepRollouts

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(journal_module, "FIRST_RETRY", 0.05)


def recorded_steps(root: Path, name: str = "a") -> list[int]:
    with open_workspace(root / "runs") as opened:
        return [int(row["step"]) for row in read_run(opened, name).metrics]


def wait_until(true, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)


# -- a store that cannot be written


def test_a_locked_store_is_told_once_waited_for_on_disk_and_caught_up_in_order(tmp_path: Path):
    recording = Recording(tmp_path)
    recording.steps(0)
    assert recording.recorder.flush()
    other = sqlite3.connect(recording.workspace.file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    recording.steps(1, 2, 3, rollouts=2)
    recording.recorder.event("note", "while it was away", step=2)
    assert recording.recorder.flush(), "files beside the store are durable too"
    assert len(list((recording.folder / "spool").glob("*.record"))) == 4
    other.execute("ROLLBACK")
    wait_until(lambda: any("up to date" in text for text in recording.said))
    recording.steps(4)
    recording.recorder.close("done")
    assert recorded_steps(tmp_path) == [0, 1, 2, 3, 4]
    away, back = recording.said
    assert "locked" in away and "Training continues" in away and "4 records" in back
    assert not (recording.folder / "spool").exists() and recording.recorder.dropped == 0
    with open_workspace(tmp_path / "runs") as opened:
        run = read_run(opened, "a")
        assert [event.text for event in run.events] == ["while it was away"]
        assert same(run.rollouts(2)[1], synthetic(2, 1))


def test_a_store_that_was_never_there_does_not_stop_the_start(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tether.db").mkdir()  # a folder where the file should be
    recording = Recording(tmp_path)
    recording.steps(0, 1)
    assert recording.recorder.flush()
    (tmp_path / "runs" / "tether.db").rmdir()
    wait_until(lambda: any("up to date" in text for text in recording.said))
    recording.recorder.close("done")
    assert recorded_steps(tmp_path) == [0, 1]


def test_a_server_that_is_down_does_not_stop_the_run(tmp_path: Path):
    pytest.importorskip("psycopg")
    url = f"postgresql://nobody:secret@/none?host={tmp_path}"
    recording = Recording(tmp_path, url)
    recording.steps(0, 1)
    assert recording.recorder.close("done")
    assert "cannot be written" in recording.said[0] and not any("secret" in text for text in recording.said)
    assert len(Spool(recording.folder).files()) == 4  # start, two steps, state


def test_a_removed_store_is_begun_anew_rather_than_written_out_of_sight(tmp_path: Path):
    recording = Recording(tmp_path)
    recording.steps(0)
    recording.recorder.flush()
    for path in (tmp_path / "runs").glob("tether.db*"):
        path.unlink()
    recording.steps(1)
    recording.recorder.close("done")
    assert recorded_steps(tmp_path) == [1]


def test_a_store_that_is_damaged_does_not_stop_the_run(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tether.db").write_bytes(b"not a database at all" * 500)
    recording = Recording(tmp_path)
    recording.steps(0)
    assert recording.recorder.close("done") and "not a database" in recording.said[0]


def test_what_an_ended_run_could_not_write_is_taken_in_by_the_next_reader(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tether.db").mkdir()
    recording = Recording(tmp_path)
    recording.steps(0, 1, rollouts=1)
    recording.recorder.close("done")
    (tmp_path / "runs" / "tether.db").rmdir()
    with open_workspace(tmp_path / "runs") as opened:
        assert find_run(opened, "a").state == "done" and read_run(opened, "a").rollout_steps == [0, 1]
    assert not (recording.folder / "spool").exists()


def test_a_resumed_run_takes_in_what_waits_and_rewinds_it(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tether.db").mkdir()
    first = Recording(tmp_path)
    first.steps(0, 1, 2)
    first.recorder.close("stopped")
    (tmp_path / "runs" / "tether.db").rmdir()
    second = Recording(tmp_path, resumes=True)
    second.recorder.rewind(1)
    second.recorder.record(1, {"again": 1.0})
    second.recorder.close("done")
    with open_workspace(tmp_path / "runs") as opened:
        rows = read_run(opened, "a").metrics
        assert [row["step"] for row in rows] == [0, 1] and "again" in rows[1]


# -- a working folder that changes


def test_a_changed_working_folder_takes_no_records_with_it(tmp_path: Path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    recording = Recording(Path())
    recording.steps(0)
    assert recording.recorder.flush()
    monkeypatch.chdir("elsewhere")
    recording.steps(1, 2, rollouts=1)
    assert recording.recorder.close("done")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert recorded_steps(tmp_path) == [0, 1, 2]


# -- memory that is short


class UntellableError(Exception):
    """Short of memory, even making the text of an error fails."""

    def __repr__(self) -> str:
        raise MemoryError


def test_the_thread_outlives_an_error_that_cannot_be_told(tmp_path: Path, monkeypatch):
    recording = Recording(tmp_path)
    write = recording.recorder._journal.write

    def fails_at_step_1(record):
        if record.data.get("step") == 1:
            raise UntellableError
        write(record)

    monkeypatch.setattr(recording.recorder._journal, "write", fails_at_step_1)
    recording.steps(0, 1, 2)
    assert recording.recorder.flush()
    assert recording.recorder.close("done")
    assert recorded_steps(tmp_path) == [0, 2]


def test_a_flush_that_fails_is_answered(tmp_path: Path, monkeypatch):
    recording = Recording(tmp_path)

    def no_memory():
        raise MemoryError

    monkeypatch.setattr(recording.recorder._log, "sync", no_memory)
    assert answered(recording.recorder.flush) is False
    monkeypatch.undo()
    assert recording.recorder.flush(), "the thread goes on"
    recording.recorder.close("done")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_is_gone(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(writer_module, "LOOK_EVERY", 0.01)
    recording = Recording(tmp_path)
    assert recording.recorder.flush()

    def ends(record):
        raise SystemExit

    monkeypatch.setattr(recording.recorder._journal, "write", ends)
    recording.steps(0)
    assert answered(recording.recorder.flush) is False
    assert answered(lambda timeout: recording.recorder.close("failed", timeout)) is False


def answered(call, timeout: float = 3600.0):
    """What `call(timeout)` returns, long before its time is over."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(timeout)), daemon=True)
    thread.start()
    thread.join(60.0)
    assert found, "it was waited for"
    return found[0]


def test_a_record_that_finds_no_memory_waits_on_disk(tmp_path: Path, monkeypatch):
    recording = Recording(tmp_path)
    recording.steps(0)
    assert recording.recorder.flush()
    apply, fails = journal_module.apply_record, [MemoryError()]

    def short(*given):
        if fails:
            raise fails.pop()
        apply(*given)

    monkeypatch.setattr(journal_module, "apply_record", short)
    recording.steps(1, 2)
    assert recording.recorder.close("done")
    assert fails == [] and recording.recorder.dropped == 0
    assert recorded_steps(tmp_path) == [0, 1, 2]


# -- a disk that cannot be written


def test_without_store_and_disk_the_newest_are_kept_in_memory_and_the_rest_is_counted(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(journal_module, "MAX_IN_MEMORY", 3)
    away = True
    add, apply = Spool.add, journal_module.Database.apply

    def no_space(self, record):
        if away:
            raise OSError(28, "No space left on device")
        add(self, record)

    def no_store(self, record):
        if away:
            raise journal_module.Unavailable("database or disk is full")
        apply(self, record)

    monkeypatch.setattr(Spool, "add", no_space)
    monkeypatch.setattr(journal_module.Database, "apply", no_store)
    recording = Recording(tmp_path)
    recording.steps(*range(6))
    assert recording.recorder.flush() is False, "what is in memory alone is not durable"
    assert recording.recorder.dropped == 4  # the start and three steps
    away = False
    wait_until(lambda: any("up to date" in text for text in recording.said))
    assert recording.recorder.close("done") is True
    assert recorded_steps(tmp_path) == [3, 4, 5]
    told = " ".join(recording.said)
    assert told.count("No space left") == 1 and told.count("are being lost") == 1


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="a small disk needs root to be mounted")
def test_a_disk_that_is_really_full_does_not_stop_the_run(tmp_path: Path):
    disk = tmp_path / "runs"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    recording = Recording(tmp_path)
    try:
        recording.steps(0, rollouts=1)
        assert recording.recorder.flush()
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        recording.steps(*range(1, 60), rollouts=8)
        recording.recorder.flush()
        assert any("cannot be written" in text for text in recording.said)
        filler.unlink()
        wait_until(lambda: any("up to date" in text for text in recording.said))
        recording.recorder.close("done")
        assert recording.recorder.dropped == 0
        assert recorded_steps(tmp_path) == list(range(60))
    finally:
        recording.recorder.close("failed")
        subprocess.run(["umount", str(disk)], check=True)


def test_a_damaged_waiting_file_is_set_aside_and_the_rest_is_taken_in(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tether.db").mkdir()
    recording = Recording(tmp_path)
    recording.steps(0, 1, 2)
    recording.recorder.close("done")
    (tmp_path / "runs" / "tether.db").rmdir()
    middle = Spool(recording.folder).files()[2]
    content = bytearray(middle.read_bytes())
    content[len(content) // 2] ^= 1
    middle.write_bytes(content)
    assert recorded_steps(tmp_path) == [0, 2]
    assert [path.name for path in (recording.folder / "spool").iterdir()] == [f"{middle.stem}.refused"]


def test_what_waits_is_listed_in_the_order_of_its_numbers_and_numbered_on(tmp_path: Path):
    (tmp_path / "spool").mkdir()
    for number in (3, 11, 5, 100, 4):
        (tmp_path / "spool" / f"{number:010d}.record").write_bytes(b"")
    (tmp_path / "spool" / "notes.record").write_bytes(b"")
    spool = Spool(tmp_path)
    spool.add(StoreRecord("rewind", {"step": 0}))
    assert [int(path.stem) for path in spool.files()] == [3, 4, 5, 11, 100, 101]


def test_a_record_in_a_file_is_whole_or_refused():
    record = StoreRecord("step", {"step": 1, "value": 0.1, "bad": float("nan")}, (b"one", b"", b"three"))
    content = record.to_bytes()
    back = StoreRecord.from_bytes(content)
    assert back == StoreRecord("step", {"step": 1, "value": 0.1, "bad": None}, (b"one", b"", b"three"))
    for place in range(len(content)):
        with pytest.raises(ValueError):
            StoreRecord.from_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(ValueError):
            StoreRecord.from_bytes(content[:place])


# -- what goes wrong on our side of the store


def test_pieces_that_fail_cost_the_texts_and_nothing_else(tmp_path: Path):
    def failing(tokens):
        raise RuntimeError("no such token")

    recording = Recording(tmp_path, pieces=failing)
    batch = experience([3, 2], np.random.default_rng(0))
    recording.recorder.record(0, {"score": 1.0}, StepRollouts(batch, rollouts_of(batch)))
    recording.recorder.record(1, {"score": 1.0}, StepRollouts(batch, rollouts_of(batch)[:1]))  # rows do not match
    recording.recorder.close("done")
    with open_workspace(tmp_path / "runs") as opened:
        run = read_run(opened, "a")
        assert len(run.metrics) == 2 and run.rollout_steps == [0] and list(run.rollouts(0)[0].pieces) == []
    assert "no such token" in recording.said[0] and "step 1" in recording.said[1]


def test_a_notify_that_raises_hurts_no_one(tmp_path: Path):
    def rude(text):
        raise RuntimeError("the console is gone")

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tether.db").mkdir()
    recording = Recording(tmp_path, notify=rude)
    recording.steps(0)
    assert recording.recorder.close("done")


def test_a_store_that_hangs_costs_tokens_and_never_metrics(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_WAITING", 2)
    monkeypatch.setattr(writer_module, "PATIENCE", 0.01)
    gate, apply = threading.Event(), journal_module.Database.apply

    def slow(self, record):
        gate.wait(20)
        apply(self, record)

    monkeypatch.setattr(journal_module.Database, "apply", slow)
    recording = Recording(tmp_path)
    recording.steps(*range(6), rollouts=1)
    gate.set()
    recording.recorder.close("done")
    assert recorded_steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    with open_workspace(tmp_path / "runs") as opened:
        assert read_run(opened, "a").rollout_steps == [0, 1]
    assert sum("too slow" in text for text in recording.said) == 1


# -- other processes

WRITING = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from recording import Recording, synthetic
recording = Recording(Path(sys.argv[2]), sys.argv[5] or None, name=sys.argv[3], wait=20.0)
last = int(sys.argv[4])
for step in range(last):
    recording.steps(step, rollouts=3)
    recording.recorder.flush()
    print(step, flush=True)
assert recording.recorder.close("done"), recording.said
assert not recording.said, recording.said
"""


def writing(root: Path, name: str, steps: int, url: str | None = None) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITING, str(HERE), str(root), name, str(steps), url or ""]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_runs_write_to_one_workspace_at_once(tmp_path: Path, store_url):
    both = [writing(tmp_path, name, 25, store_url) for name in ("one", "two")]
    for process in both:
        process.communicate(timeout=60)
        assert process.returncode == 0
    with open_workspace(tmp_path / "runs", store_url) as opened:
        for name in ("one", "two"):
            run = read_run(opened, name)
            assert [row["step"] for row in run.metrics] == list(range(25))
            assert run.rollout_steps == list(range(25)) and same(run.rollouts(24)[2], synthetic(24, 2))


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_leaves_whole_steps_and_all_that_it_flushed(tmp_path: Path, seed: int, store_url):
    process = writing(tmp_path, "a", 100_000, store_url)
    draw = random.Random(seed)
    assert process.stdout is not None
    flushed = [int(process.stdout.readline()) for _ in range(draw.randint(1, 8))]
    time.sleep(draw.random() * 0.02)
    process.send_signal(signal.SIGKILL)
    flushed += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.wait()
    with open_workspace(tmp_path / "runs", store_url) as opened:
        run = read_run(opened, "a")
        steps = [int(row["step"]) for row in run.metrics]
        assert steps == list(range(len(steps))) and steps[-1] >= flushed[-1]
        assert all({"score", "third"} <= set(row) for row in run.metrics)
        assert list(run.rollout_steps) == steps and all(len(run.rollouts(step)) == 3 for step in steps)
        assert find_run(opened, "a").state == "interrupted"
    resumed = Recording(tmp_path, store_url, resumes=True)
    resumed.recorder.rewind(flushed[-1])
    resumed.steps(flushed[-1], rollouts=1)
    resumed.recorder.close("done")
    with open_workspace(tmp_path / "runs", store_url) as opened:
        assert [row["step"] for row in read_run(opened, "a").metrics] == flushed


def test_a_reader_sees_a_run_that_is_being_written(tmp_path: Path):
    recording = Recording(tmp_path)
    assert is_being_recorded(recording.folder)
    for step in range(5):
        recording.steps(step, rollouts=2)
        recording.recorder.flush()
        assert recorded_steps(tmp_path) == list(range(step + 1))
    with open_workspace(tmp_path / "runs") as opened:
        assert list_runs(opened)[0].state == "running"
    recording.recorder.close("done")
    assert not is_being_recorded(recording.folder)
