"""A rank is killed, stopped or lost for good: all start again, and the run ends with the bits of one undisturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import whole
from rank_kills import Running, forked, killed_ranks, nproc, restarts_of, rules, torchrun, words_of
from same_runs import differences
from tiny_recipes import tiny

from tether.distributed.launch import fault_of, is_loss
from tether.errors import ConfigError, RankLost, UsageError
from tether.learner.ranks import Ranks, using_ranks
from tether.store.folder import RunFolder
from tether.train.resume import begun_before, start

STEPS = 16


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Path:
    """The undisturbed run."""
    return whole(tiny("sft", tmp_path_factory.mktemp("calm") / "runs", *rules(STEPS)))


def said_by(running: Running, at: dict[int, Callable[[], None]]) -> str:
    """All that is said until the end. `at` has what is done when the line of a step appears."""
    said: list[str] = []
    for line in running.lines:
        said.append(line)
        for step in [step for step in at if line.startswith(f'{{"step": {step},')]:
            at.pop(step)()
    assert not at, said
    return "".join(said)


def hit(running: Running, rank: int, number: int = signal.SIGKILL) -> Callable[[], None]:
    def strike() -> None:
        process = running.pid_of(rank)
        assert process is not None
        os.kill(process, number)

    return strike


def test_killed_ranks_start_again(tmp_path, calm):
    """Once rank 1, once rank 0; each restart is an event, and says what it cost."""
    running = forked(words_of(tmp_path / "runs", "sft", STEPS), 2, 2, 2, tmp_path)
    said = said_by(running, {3: hit(running, 1), 9: hit(running, 0)})
    assert running.wait() == 0, said
    ours = tmp_path / "runs" / "run"
    assert differences(calm, ours) == []
    assert "tether: rank 1 was killed by signal 9: starting all ranks again, 1 more times if need be" in said
    assert "resume the run" not in said
    found = restarts_of(ours)
    assert [each["fault"] for each in found] == [f"rank {rank} was killed by signal 9" for rank in (1, 0)]
    for each in found:
        assert f"{each['steps_again']} recorded steps are taken again" in said
        assert 0 <= each["steps_again"] <= 6
    assert RunFolder(ours).launch


def test_a_rank_that_is_lost_once_too_often_ends_the_run(tmp_path):
    running = forked(words_of(tmp_path / "runs", "sft", STEPS), 2, 0, 2, tmp_path)
    said = said_by(running, {3: hit(running, 1)})
    assert running.wait() == RankLost.exit_code
    assert "(killed, or its machine went away): resume the run, with as many ranks as you like" in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_missed(tmp_path, calm, rank):
    """As one whose machine hangs, or whose network went away: its connections stay open."""
    running = forked(words_of(tmp_path / "runs", "sft", STEPS), 2, 1, 2, tmp_path)
    said = said_by(running, {3: hit(running, rank, signal.SIGSTOP)})
    assert running.wait() == 0, said
    assert said.count(f"rank {rank} has not answered for 3 s (distributed.timeout)") == 1
    assert differences(calm, tmp_path / "runs" / "run") == []


def test_a_lost_rank_is_left_out(tmp_path, calm):
    """Three ranks, then two, then one: the same bits."""
    running = forked(words_of(tmp_path / "runs", "sft", STEPS), 3, 2, 1, tmp_path)
    said = said_by(running, {3: hit(running, 2), 9: hit(running, 1)})
    assert running.wait() == 0, said
    assert differences(calm, tmp_path / "runs" / "run") == []
    assert [each["ranks"] for each in restarts_of(tmp_path / "runs" / "run")] == [2, 1]


def test_a_fork_goes_on_and_does_not_begin_again(tmp_path, calm):
    place = ("--run.name", "fork", "--run.directory", str(tmp_path), "--optimizer.policy_lr", "1e-3", "--json")
    words = ["fork", str(calm), "--step", str(STEPS - 2), "--run.steps", str(2 * STEPS), *place]
    whole_fork = forked(words, 1, 0, 1, tmp_path)
    said = said_by(whole_fork, {})
    assert whole_fork.wait() == 0, said
    (tmp_path / "fork").rename(tmp_path / "calm")
    running = forked(words, 2, 1, 2, tmp_path)
    said = said_by(running, {STEPS + 4: hit(running, 1)})
    assert running.wait() == 0, said
    assert [each["steps_again"] < 8 for each in restarts_of(tmp_path / "fork")] == [True]
    both = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("calm", "fork")]
    assert both[0] == both[1]


def test_torchrun_starts_again_the_run_that_it_began(tmp_path, calm):
    """It counts its restarts by itself, and calls the same command: without a name the run is found as well."""
    words = words_of(tmp_path / "runs", "sft", STEPS)
    place = words.index("--run.name")
    running = torchrun([*words[:place], *words[place + 2 :]], 2, 1, 2, tmp_path)
    said = said_by(running, {3: hit(running, 1)})
    assert running.wait() == 0, said
    (ours,) = (file.parent for file in (tmp_path / "runs").glob("sft-*/recipe.json"))
    assert len(restarts_of(ours)) == 1
    both = [(folder / "model" / "model.safetensors").read_bytes() for folder in (calm, ours)]
    assert both[0] == both[1]


def test_the_command_line_starts_ranks_again(tmp_path, calm):
    running = nproc(words_of(tmp_path / "runs", "sft", STEPS), 2, 1, 1, tmp_path)
    said = said_by(running, {3: hit(running, 1)})
    assert running.wait() == 0, said
    assert "starting one rank again, 0 more times" in said
    assert differences(calm, tmp_path / "runs" / "run") == []


def test_a_launcher_does_not_take_over_the_run_of_another(tmp_path, monkeypatch):
    recipe = tiny("sft", tmp_path / "runs", *rules(2))
    ranks = Ranks()
    monkeypatch.setattr(ranks, "launch", "mine")
    with using_ranks(ranks):
        ours = whole(recipe)
        assert begun_before(recipe) == ours
        assert begun_before(recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": None})})) == ours
        monkeypatch.setattr(ranks, "launch", "another")
        assert begun_before(recipe) is None
        with pytest.raises(ConfigError, match="already holds a run"):
            start(recipe, json_output=True)
    assert begun_before(recipe) is None  # without a launcher


def test_a_wrong_recipe_is_not_tried_again(tmp_path):
    words = words_of(tmp_path / "runs", "sft", 2)
    running = forked([*words, "--model.device", "cuda:7"], 2, 3, 2, tmp_path)
    said = said_by(running, {})
    assert running.wait() == 2
    assert "starting" not in said


def test_a_ppo_run_whose_ranks_are_killed_ends_with_the_same_bits():
    verdict = killed_ranks("forked", 4, seed=3)
    assert verdict.wrong == []
    assert verdict.kills == 4
    assert verdict.restarts >= 1


def test_what_exit_codes_say():
    lost = RankLost.exit_code
    assert fault_of([lost, lost, -9]) == "rank 2 was killed by signal 9"
    assert fault_of([-6, lost]) == "rank 0 was killed by signal 6"
    assert fault_of([lost, None]) == "rank 1 did not answer"
    assert fault_of([lost, 5, lost]) == "rank 1 ended with exit code 5"
    assert [code for code in range(9) if is_loss(code)] == [7, 8]
    assert is_loss(-9)


@pytest.mark.parametrize(
    "words",
    [
        ("--restarts", "2"),
        ("--min-nproc", "1"),
        ("--nproc", "2", "--min-nproc", "1"),
        ("--nproc", "1", "--min-nproc", "2", "--restarts", "1"),
    ],
)
def test_options_that_do_not_go_together(words):
    from tether.cli import _launched

    with pytest.raises(UsageError, match="--min-nproc"):
        _launched("train", ["sft", *words])
