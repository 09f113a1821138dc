"""Progress where nobody looks on: plain lines that come in time, and nothing else, on standard error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest

from tether.progress import PlainProgress, clock_time, numbers_of, say, working

LINE = re.compile(r"^(sft|grpo) \d+/\d+  (took )?\d+ (s|min)")


def lines_of(total: int, seconds: float, done: int = 0) -> list[str]:
    """The lines of a run whose steps take so many seconds each."""
    now, written = [0.0], []
    lines = PlainProgress("ppo", total, done, write=written.append, clock=lambda: now[0])
    for step in range(done, total):
        now[0] += seconds
        lines.advance(step + 1, "score 0.5")
    return written


def test_quick_steps_make_a_line_every_ten_seconds_and_slow_ones_a_line_each():
    assert len(lines_of(1000, 0.1)) == 1 + 9 + 1  # the first, every ten seconds, the last
    assert len(lines_of(20, 30.0)) == 20
    assert lines_of(3, 0.1) == ["ppo 1/3  0 s left  score 0.5", "ppo 3/3  took 0 s  score 0.5"]


def test_the_time_that_is_left_counts_this_sitting_alone():
    assert lines_of(10, 60.0)[0] == "ppo 1/10  9 min 00 s left  score 0.5"
    assert lines_of(10, 60.0, done=8)[0] == "ppo 9/10  1 min 00 s left  score 0.5"
    assert [clock_time(seconds) for seconds in (0.4, 59.7, 3725)] == ["0 s", "1 min 00 s", "1 h 02 min"]


def test_a_step_that_takes_long_says_what_it_is_at():
    now, written = [0.0], []
    lines = PlainProgress("ppo", 9, write=written.append, clock=lambda: now[0])
    lines.doing("rollout, step 0")
    lines.advance(1)
    now[0] = 31.0
    lines.doing("update, step 1")
    lines.doing("rollout, step 2")
    assert written[1:] == ["ppo 1/9  update, step 1"]


def test_work_without_steps_says_that_it_still_goes_on():
    written: list[str] = []
    with working("sampling", every=0.02, write=written.append):
        time.sleep(0.07)
    assert written[0] == "sampling"
    assert written[1].startswith("sampling: ")
    count = len(written)
    time.sleep(0.05)
    assert len(written) == count, "nothing is written once it has ended"


def test_a_line_has_no_control_characters(capsys):
    say("a\rb\x1b[31mc\nd")
    assert capsys.readouterr().err == "a b [31mc d\n"
    numbers = {"score": 0.5, "kl_ref_k3": 0.01, "seconds/step": 2.0, "tokens/learned": 5000.0, "held_out/score": 0.4}
    assert numbers_of(numbers) == "score 0.5  kl_ref_k3 0.01  held_out/score 0.4  2,500 tokens/s"


@pytest.mark.parametrize("json_output", [False, True])
def test_a_log_file_holds_plain_lines_and_standard_output_only_json(tmp_path, json_output):
    records = tmp_path / "x.jsonl"
    records.write_text("".join(json.dumps({"prompt": f"q{n}", "completion": "a"}) + "\n" for n in range(6)))
    words = ["train", "sft", "--data.train", "x.jsonl", "--run.steps", "3", "--sft.batch_size", "2"]
    command = [sys.executable, "-m", "tether", *words, *(["--json"] if json_output else [])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=True)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", done.stderr), "no control characters, no carriage returns"
    progress = [line for line in done.stderr.splitlines() if LINE.match(line)]
    if json_output:
        assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [0, 1, 2]
        assert progress == []
    else:
        assert done.stdout == ""
        assert done.stderr.startswith("sft: loading tiny-bytes\n")
        assert progress[0].startswith("sft 1/3")
        assert "loss" in progress[0]
        assert "tokens/s" in progress[0]
        assert progress[-1].startswith("sft 3/3  took")
