"""Rewards and tasks that exit, give nonsense, never end, or change what is not theirs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import tether

HERE = Path(__file__).parent
SIZES = {
    "model.path": "tiny-bytes",
    "model.device": "cpu",
    "rollout.prompts_per_step": 4,
    "rollout.max_new_tokens": 4,
    "run.directory": "runs",
    "run.name": "x",
    "run.steps": 2,
    "checkpoint.every": 1,
}
ENDS = [
    *("exit_0", "exit_text", "exit_trl", "exit_awaited", "exit_at_once", "exit_in_a_thread", "exit_quietly"),
    *("another_program", "another_program_by_name", "interrupt", "generator_exit", "cancelled", "stop_iteration"),
    *("own_base_error", "error_without_words", "exits_on_iteration", "exits_as_number", "exits_as_score"),
    *("exits_when_shown", "deep_recursion"),
]
GIVES = [
    *("gives_dict", "gives_set", "gives_text", "gives_bytes", "gives_none", "gives_number", "gives_nones", "gives_nan"),
    *("gives_infinity", "gives_huge", "gives_complex", "gives_texts", "gives_lists", "gives_too_few", "gives_nothing"),
    *("gives_too_many", "gives_for_ever", "gives_scalar_tensor", "gives_wide_tensor", "gives_nan_score"),
    *("gives_text_score", "gives_score_with_text_parts", "gives_function"),
]
READ = ["gives_generator", "gives_array", "gives_tensor", "gives_tuple", "gives_scores"]
CHANGES = [
    *("sorts", "empties", "edits_messages", "edits_tokens", "keeps_references", "changes_folder", "removes_its_folder"),
    *("changes_environment", "clears_environment", "changes_seeds", "changes_threads", "changes_dtype"),
    *("changes_device", "stops_gradients", "changes_determinism", "changes_recursion", "closes_the_door"),
    *("takes_output", "prints", "masks_files"),
]
HANGS = ["loops", "sleeps", "loops_text", "sleeps_awaited", "blocks_awaited", "loops_on_errors", "bad_pattern"]
TASKS = [
    *("exiting_factory", "ExitingPrompts", "ExitingHeldOut", "ExitingReward", "RewardExits", "RewardEndsAtOnce"),
    *("RewardGivesDict", "RewardIsNone", "PromptsAreTexts"),
]


def words(method: str = "ppo", **changes: object) -> list[str]:
    sizes = {**SIZES, **({"rollout.samples_per_prompt": 2} if method in ("grpo", "rloo") else {})}
    given = {**sizes, **{key.replace("__", "."): value for key, value in changes.items()}}
    return ["train", method, *(f"--{key}={value}" for key, value in given.items())]


def by_function(name: str, extra: str = "") -> dict[str, object]:
    return {"reward__parts": f"{{kind: function, function: 'hostile_code.py:{name}'{extra}}}"}


@pytest.fixture(autouse=True)
def code(tmp_path: Path) -> None:
    shutil.copy(HERE / "hostile_code.py", tmp_path)


def weights(folder: Path) -> bytes:
    return (folder / "runs" / "x" / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ENDS)
def test_a_reward_that_ends_the_process(name: str, command, refusal) -> None:
    refusal(command(*words(**by_function(name))), 5)


@pytest.mark.parametrize(
    "name", ["exit_0", "exit_text", "exit_at_once", "interrupt", "own_base_error", "exits_as_score"]
)
def test_a_reward_that_ends_its_worker(name: str, command, refusal) -> None:
    refusal(command(*words(**by_function(name, ", workers: 1"))), 5, within=15)


@pytest.mark.parametrize("method", ["grpo", "rloo", "reinforce", "trpo"])
@pytest.mark.parametrize("name", ["exit_0", "exit_at_once"])
def test_in_every_method(name: str, method: str, command, refusal) -> None:
    refusal(command(*words(method, **by_function(name))), 5)


@pytest.mark.parametrize("name", GIVES)
def test_a_reward_that_gives_nonsense(name: str, command, refusal) -> None:
    refusal(command(*words(**by_function(name, ", takes: rollouts"))), 5)


@pytest.mark.parametrize("name", READ)
def test_a_reward_that_gives_numbers_in_another_shape(name: str, command, tmp_path: Path) -> None:
    assert command(*words(**by_function("fair"))).code == 0
    plain = weights(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    assert command(*words(**by_function(name))).code == 0
    assert weights(tmp_path) == plain


@pytest.mark.parametrize("name", CHANGES)
def test_a_reward_that_changes_what_is_not_its_own(name: str, command, tmp_path: Path) -> None:
    ended = command(*words(**by_function("fair")), "--json")
    assert ended.code == 0, ended.err
    plain = weights(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    ended = command(*words(**by_function(name)), "--json")
    assert ended.code == 0, ended.err
    assert weights(tmp_path) == plain
    assert all(line.startswith("{") for line in ended.out.splitlines()) and len(ended.out.splitlines()) == 2
    assert not list(tmp_path.glob("elsewhere/**/runs")), "the run's output went with the reward"


@pytest.mark.parametrize("name", ["sorts", "empties", "edits_messages", "edits_tokens"])
def test_another_part_is_not_misaligned(name: str, command, tmp_path: Path) -> None:
    part = "[{kind: function, function: 'hostile_code.py:%s', weight: 0}, {kind: length, target: 2}]"
    assert command(*words(reward__parts=part % "fair")).code == 0
    plain = weights(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    assert command(*words(reward__parts=part % name)).code == 0
    assert weights(tmp_path) == plain


@pytest.mark.parametrize("name", HANGS)
def test_a_reward_that_never_ends(name: str, command, refusal) -> None:
    ended = command(*words(**by_function(name), reward__timeout_seconds=0.3))
    assert "reward.timeout_seconds = 0.3" in refusal(ended, 5, within=10)


def test_a_rule_that_never_ends(command, refusal) -> None:
    pattern = "(.|[^x])*(.|[^x])*(.|[^x])*(.|[^x])*(.|[^x])*y0"
    ended = command(
        *words(reward__parts=f"{{kind: regex, pattern: '{pattern}'}}", rollout__max_new_tokens=120),
        "--reward.timeout_seconds=0.3",
    )
    assert "reward.timeout_seconds = 0.3" in refusal(ended, 5)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_that_does_so(name: str, command, refusal) -> None:
    refusal(command(*words(task__name=f"hostile_code.py:{name}")), 5)


@pytest.mark.parametrize("name", ["MovingTask", "SortingTask"])
def test_a_task_that_changes_what_is_not_its_own(name: str, command, tmp_path: Path) -> None:
    assert command(*words(task__name="hostile_code.py:GoodTask")).code == 0
    plain = weights(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    assert command(*words(task__name=f"hostile_code.py:{name}")).code == 0
    assert weights(tmp_path) == plain


def test_what_such_a_run_left_behind_is_resumed_to_the_same_bits(command, tmp_path: Path) -> None:
    """A reward that exits at its second step: the run goes on from its checkpoint once the reward is mended."""
    fair = (HERE / "hostile_code.py").read_text(encoding="utf-8")
    assert command(*words(**by_function("fair"))).code == 0
    plain = weights(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    mark = "def fair(rollouts):\n"
    (tmp_path / "hostile_code.py").write_text(
        fair.replace(mark, f"{mark}    if rollouts[0].policy_version == 1:\n        sys.exit(0)\n"), encoding="utf-8"
    )
    assert command(*words(**by_function("fair"))).code == 5
    (tmp_path / "hostile_code.py").write_text(fair, encoding="utf-8")
    ended = command("resume", "runs/x")
    assert ended.code == 0, ended.err
    assert weights(tmp_path) == plain


def test_tether_is_the_one_under_test() -> None:
    assert Path(tether.__file__).is_relative_to(HERE.parents[1])
