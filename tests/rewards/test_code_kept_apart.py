"""Users' code is kept apart: it ends no run, hangs none, and changes nothing that is not its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rollout_factory import rollout_of

from tether.errors import DataError
from tether.rewards.scoring import CodeReward, score_rollouts
from tether.user_code import TimeLimitError, apart, time_limit

ROWS = [rollout_of(text, "gold", tokens=[1, 2]) for text in ("b", "a", "c")]


def test_the_process_is_as_it_was_and_the_code_finds_what_it_set(tmp_path: Path) -> None:
    before = (Path.cwd(), dict(os.environ), torch.get_default_dtype(), torch.is_grad_enabled())
    with apart():
        os.chdir(tmp_path)
        os.environ["SET_BY_A_REWARD"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
    assert (Path.cwd(), dict(os.environ), torch.get_default_dtype(), torch.is_grad_enabled()) == before
    with apart():
        assert tmp_path.samefile(Path.cwd()) and os.environ["SET_BY_A_REWARD"] == "1"
        os.chdir(before[0])
        del os.environ["SET_BY_A_REWARD"]
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert (Path.cwd(), dict(os.environ)) == before[:2]


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), StopIteration()])
def test_whatever_is_raised_is_the_rewards_fault(error: BaseException) -> None:
    def reward(rollouts):
        raise error

    with pytest.raises(DataError, match=f"raised {type(error).__name__}"):
        score_rollouts(CodeReward(reward, "the reward"), ROWS, max_failure_rate=0.0)


@pytest.mark.parametrize("given", [{"a": 1.0, "b": 2.0, "c": 3.0}, {1.0, 2.0, 3.0}, "123", 1.0, None])
def test_what_is_no_list_is_refused(given: object) -> None:
    with pytest.raises(DataError, match="it must return a list with one number for each answer"):
        score_rollouts(lambda rollouts: given, ROWS, max_failure_rate=0.0)  # type: ignore[arg-type, return-value]


def test_a_generator_without_an_end_is_refused() -> None:
    def reward(rollouts):
        while True:
            yield 1.0

    with pytest.raises(DataError, match="returned more than 3 scores for 3 rollouts"):
        score_rollouts(reward, ROWS, max_failure_rate=0.0)  # type: ignore[arg-type]


def test_a_reward_that_hangs_is_ended() -> None:
    def reward(rollouts):
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue

    with pytest.raises(DataError, match=r"reward.timeout_seconds = 0.1"):
        score_rollouts(CodeReward(reward, "the reward", 0.1), ROWS, max_failure_rate=0.0)


def test_a_limit_ends_code_that_keeps_pythons_lock() -> None:
    import re

    with pytest.raises(TimeLimitError), time_limit(0.2, "a pattern"):
        re.match(r"(a+)+$", "a" * 60 + "b")
    time.sleep(0.01)  # nothing follows it


RUN = """
import sys
from tether.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_no_way_out_with_exit_code_0(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef score(rollouts):\n    os._exit(0)\n")
    words = ["train", "ppo", "--model.path=tiny-bytes", "--model.device=cpu", "--run.steps=1", "--run.name=x"]
    words += ["--rollout.prompts_per_step=2", "--rollout.max_new_tokens=2"]
    words += ["--reward.parts={kind: function, function: 'mine.py:score'}"]
    done = subprocess.run([sys.executable, "-c", RUN, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert "without a message" in done.stderr
