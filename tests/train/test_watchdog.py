"""A run that hangs ends with its stacks on paper; one that is only slow does not end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tether.errors import Stalled
from tether.train.failures import Watchdog

HEAD = """
import re, sys, threading, time
from pathlib import Path
from tether.train.failures import Watchdog
"""


def run(body: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = HEAD + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_hang_ends_the_process_with_its_own_code_and_the_stacks_of_all_threads(tmp_path):
    ended = run(
        """
        def waits_for_a_lock_that_nobody_lets_go():
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()

        def another_thread():
            time.sleep(600)

        threading.Thread(target=another_thread, daemon=True).start()
        try:
            with Watchdog(0.5, Path(sys.argv[1])) as watchdog:
                watchdog.heartbeat("rollout, step 12")
                waits_for_a_lock_that_nobody_lets_go()
        finally:
            print("cleaned up")
        """,
        tmp_path,
    )
    assert ended.returncode == Stalled.exit_code == 7
    (file,) = tmp_path.glob("stall-*.txt")
    for text in (file.read_text(), ended.stderr):
        assert "no progress for 0.5 seconds" in text
        assert "last: rollout, step 12" in text
        assert "in waits_for_a_lock_that_nobody_lets_go" in text
        assert "in another_thread" in text
    assert ended.stdout == ""


def test_a_slow_loop_that_pats_is_never_ended(tmp_path):
    ended = run(
        """
        with Watchdog(1.5, Path(sys.argv[1])) as watchdog:
            for step in range(10):
                watchdog.heartbeat(f"step {step}")
                time.sleep(0.2)
        print("done")
        """,
        tmp_path,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_hang_that_never_lets_go_of_pythons_lock_ends_too(tmp_path):
    """A regular expression that backtracks for ever is one call in C: no other Python thread runs meanwhile."""
    ended = run(
        """
        with Watchdog(0.3, Path(sys.argv[1]), grace=0.2) as watchdog:
            watchdog.heartbeat("reward, step 3")
            re.match("(a+)+$", "a" * 60 + "b")
        """,
        tmp_path,
    )
    assert ended.returncode != 0
    assert "Thread" in ended.stderr


def test_a_run_folder_that_cannot_be_written_does_not_keep_a_stuck_run_alive(tmp_path):
    ended = run(
        """
        with Watchdog(0.2, Path(sys.argv[1]) / "missing") as watchdog:
            time.sleep(600)
        """,
        tmp_path,
    )
    assert ended.returncode == Stalled.exit_code
    assert "last: start" in ended.stderr


def test_standard_error_that_nobody_reads_does_not_keep_a_stuck_run_alive(tmp_path):
    """The pipe is full, so writing to it waits for ever; the stacks are in the folder by then."""
    program = HEAD + textwrap.dedent(
        """
        import fcntl, os
        flags = fcntl.fcntl(2, fcntl.F_GETFL)
        fcntl.fcntl(2, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        try:
            while True:
                os.write(2, b"x" * 4096)
        except BlockingIOError:
            fcntl.fcntl(2, fcntl.F_SETFL, flags)
        with Watchdog(0.2, Path(sys.argv[1]), grace=0.3):
            time.sleep(600)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stderr=subprocess.PIPE)
    try:
        assert process.wait(timeout=60) == Stalled.exit_code
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    assert len(list(tmp_path.glob("stall-*.txt"))) == 1


def test_nought_seconds_is_off():
    before = threading.active_count()
    with Watchdog(0.0) as watchdog:
        watchdog.heartbeat("step 0")
        assert threading.active_count() == before


@pytest.mark.parametrize("error", [None, ValueError("x")])
def test_it_ends_with_its_block(error):
    before = threading.active_count()
    try:
        with Watchdog(60.0) as watchdog:
            watchdog.heartbeat("step 0")
            assert threading.active_count() == before + 1
            if error is not None:
                raise error
    except ValueError as raised:
        assert raised is error
    assert threading.active_count() == before
