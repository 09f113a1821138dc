"""Reward functions in processes of their own: time limits, lost workers, order, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_reward_functions import answers, given, reward

from tether.errors import ConfigError, DataError
from tether.rewards.pool import close_workers, in_order

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _no_workers_left():
    yield
    close_workers()


def test_a_worker_that_hangs_or_dies_is_replaced_and_its_rows_alone_fail():
    texts = ["a", "hangs", "bb", "dies", "leaves", "regex", "ccc"]
    wanted = [1.0, "timeout", 2.0, "worker_died", "worker_died", "timeout", 3.0]
    scorer = reward("misbehaves", timeout_seconds=1.0, workers=2)
    scores = scorer(answers(*texts))
    assert [score.value if score.valid else next(iter(score.parts))[7:] for score in scores] == wanted
    assert scores[1].error == "the function took more than timeout_seconds = 1"
    assert "was killed by SIGKILL" in scores[3].error and "ended by itself with exit code 0" in scores[4].error
    assert [score.value for score in scorer(answers("a", "bb"))] == [1.0, 2.0], "the workers were replaced"


def test_the_number_of_workers_changes_nothing_but_time():
    texts = [str(n) * (n + 1) for n in range(6)]
    one, three = (given("draws", *texts, workers=number) for number in (1, 3))
    assert one == three and len(set(one)) == len(one), "what a function draws depends on the answer alone"


def test_slow_calls_run_side_by_side(tmp_path: Path):
    scorer = reward("meets_another_worker", workers=2, timeout_seconds=60.0)
    assert [score.value for score in scorer(answers(*[str(tmp_path)] * 4))] == [1.0] * 4


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("trl_columns", {"batch_size": 2}, [7.0, 8.0]),
        ("of_rollouts", {}, [3.0, 4.0]),
        ("prints", {}, [1.0, 1.0]),
        ("raises", {}, ["KeyError", "KeyError"]),
        ("leaves", {}, ["SystemExit", "SystemExit"]),
        ("awaited_for_ever", {"timeout_seconds": 1.0}, ["timeout", 1.0]),
    ],
)
def test_a_function_gives_there_what_it_gives_here(name: str, settings: dict, wanted: list):
    assert given(name, "a", "bb", workers=1, **settings) == wanted


def test_a_batch_that_raises_fails_alone():
    with pytest.raises(DataError, match="user_functions:trl_raises raised RuntimeError: no more lines"):
        given("trl_raises", "a", "b", workers=1)
    assert given("trl_of_one", "a", "b", batch_size=1) == ["ValueError", 1.0]


def test_settings_that_cannot_work_together_are_told():
    with pytest.raises(ConfigError, match="would leave all but one idle: set batch_size"):
        reward("trl", workers=2)
    with pytest.raises(ConfigError, match="batch_size is for trl and rollouts"):
        reward("raises", batch_size=2)
    with pytest.raises(ConfigError, match="do not say what it takes"):
        reward("unclear", workers=1)
    rows = answers("a")
    rows[0].prompt.meta["difficulty"] = {1, 2}  # pyright: ignore[reportIndexIssue]
    with pytest.raises(DataError, match=r"cannot be sent there as JSON \(Object of type set"):
        reward("named_only", workers=1)(rows)


def alive(group: int) -> bool:
    try:
        os.kill(group, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{group}/stat").read_text().split()[2] != "Z" if Path(f"/proc/{group}").exists() else False


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_do_not_outlive_the_process_that_started_them(end: signal.Signals):
    script = (
        "import signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever runs the tests may ignore Ctrl-C
        "from tether.rewards.pool import WorkerPool\n"
        "pool = WorkerPool({'function': 'user_functions:misbehaves', 'field': 'x', 'takes': 'auto'}, 2, None)\n"
        "sample = dict.fromkeys(('prompt', 'answer', 'id', 'messages', 'finish'), '') | {'columns': {}}\n"
        "ask = lambda text: [{'seed': 0, 'samples': [sample | {'completion': text}]}] * 2\n"
        "pool.map(ask('slow'))\n"
        "print(*[worker.process.pid for worker in pool._workers], flush=True)\n"
        "pool.map(ask('hangs'))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(HERE)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert workers and all(map(alive, workers))
    time.sleep(0.3)
    parent.send_signal(end)
    parent.wait(timeout=20)
    for _ in range(200):
        if not any(map(alive, workers)):
            return
        time.sleep(0.05)
    raise AssertionError("a worker outlived its parent")


def test_results_are_in_order_and_an_error_ends_the_rest():
    def late(number: int) -> int:
        time.sleep(0.02 * (5 - number))
        return number

    assert in_order(late, range(5), 3) == list(range(5))
    begun: list[int] = []

    def fails(number: int) -> int:
        begun.append(number)
        if number == 0:
            raise ValueError("no")
        time.sleep(0.05)
        return number

    with pytest.raises(ValueError, match="no"):
        in_order(fails, range(100), 2)
    assert len(begun) < 100


def test_requests_hold_nothing_but_json():
    scorer = reward("by_column", workers=1)
    request = scorer._request(answers("a"))
    assert json.loads(json.dumps(request)) == request
    assert [score.value for score in scorer(answers("a", "bb"))] == [1.5, 1.5]
