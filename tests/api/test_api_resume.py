"""Stopping and going on from Python: to the bit, and with the objects that a recipe cannot hold."""

import os
import signal

import pytest
from same_runs import differences
from small_runs import PROMPTS, SMALL, share_of_letters

import tether
from tether.cli import main

STEPS = {"steps": 4, "name": "run"}


def stop_after(steps: int):
    return lambda step: step.step + 1 < steps


def test_a_run_stopped_by_on_step_goes_on_to_the_same_bits(small_ppo):
    calm = small_ppo(workspace="calm", **STEPS)
    stopped = small_ppo(workspace="stopped", on_step=stop_after(2), **STEPS)
    assert not stopped.finished and stopped.steps == 2 and stopped.state == "stopped"
    assert stopped.resume(progress=False).finished  # with the reward that the run object holds
    assert differences(calm.path, stopped.path) == []


def test_a_run_found_on_disk_goes_on_with_its_reward_passed_again(small_ppo, tmp_path):
    calm = small_ppo(workspace="calm", **STEPS)
    small_ppo(workspace="stopped", on_step=stop_after(1), **STEPS)
    found = tether.load_run("run", tmp_path / "stopped")
    with pytest.raises(tether.ConfigError) as refused:
        found.resume(progress=False)
    assert "reward share_of_letters" in str(refused.value)
    assert f"tether.load_run('{found.path}').resume(reward=...)" in str(refused.value)
    with pytest.raises(tether.ConfigError, match=r"started from Python with objects .*share_of_letters"):
        found.resume(reward={"another": share_of_letters}, progress=False)
    with pytest.raises(tether.ConfigError, match=r"had weight 1 when the run started, and 2 is given"):
        found.resume(reward=(share_of_letters, 2.0), progress=False)
    heard: list[int] = []
    done = found.resume(reward=share_of_letters, on_step=lambda step: heard.append(step.step), progress=False)
    assert done.finished
    assert heard == [1, 2, 3]
    assert differences(calm.path, found.path) == []


def test_the_command_line_names_the_repair(small_ppo, capsys):
    run = small_ppo(on_step=stop_after(1), **STEPS)
    assert main(["resume", str(run.path)]) == 2
    said = capsys.readouterr().err
    assert "started from Python with objects that its recipe cannot hold (reward share_of_letters)" in said
    assert f"tether.load_run('{run.path}').resume(reward=...)" in said
    assert main(["fork", str(run.path)]) == 2
    assert f"tether.load_run('{run.path}').fork(reward=...)" in capsys.readouterr().err
    assert main(["export", str(run.path), "--checkpoint", "-1", "--model", str(run.path.parent / "taken")]) == 0


def test_a_finished_run_is_evaluated_by_the_command_line_with_the_repair(small_ppo, capsys):
    run = small_ppo(steps=1, held_out=["pink:"])
    assert main(["eval", str(run.path)]) == 2
    said = capsys.readouterr().err
    assert (
        "share_of_letters is a function that was passed from Python" in said and "my_file.py:share_of_letters" in said
    )


def test_a_stopped_run_generates_and_saves_from_its_checkpoint(small_ppo, tmp_path):
    run = small_ppo(on_step=stop_after(2), **STEPS)
    assert not run.model_path.exists()
    before = run.generate(PROMPTS, temperature=0.0, max_new_tokens=8)
    saved = run.save(tmp_path / "half")
    shorter = small_ppo(workspace="shorter", steps=2, name="run")  # constant rates: the same two steps
    assert (saved / "model.safetensors").read_bytes() == (shorter.model_path / "model.safetensors").read_bytes()
    assert shorter.generate(PROMPTS, temperature=0.0, max_new_tokens=8) == before


def test_a_fork_goes_on_with_more_steps_as_a_run_of_its_own(small_ppo):
    run = small_ppo(steps=2, name="run")
    longer = run.fork(steps=4, progress=False)
    assert longer.path.name == "run-fork-2" and longer.finished and longer.steps == 4
    assert [row["step"] for row in longer.metrics_rows()] == [2, 3]
    whole = small_ppo(workspace="whole", **STEPS)
    assert differences(whole.path, longer.path, since=2) == []
    with pytest.raises(tether.ConfigError, match=r"run.steps is 2, and step 2 is not before it"):
        run.fork(name="no-further", progress=False)


def test_a_fork_takes_another_reward(small_ppo):
    def zero(prompt, completion):
        return 0.0

    run = small_ppo(steps=1, name="run")
    other = run.fork(steps=2, reward=zero, name="other", progress=False)
    assert other.settings["run"]["objects"] == ["reward zero"]
    assert {answer.score for answer in other.answers()} == {0.0}


def test_the_same_recipe_by_command_and_by_python_has_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def share_of_letters(prompt, completion):\n"
        "    return sum(letter.isascii() and letter.isalpha() for letter in completion) / max(1, len(completion))\n"
    )
    python = tether.ppo(
        "tiny-bytes", PROMPTS, share_of_letters, directory="by-python", settings=SMALL, progress=False, **STEPS
    )
    flags = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    prompts = python.settings["task"]["prompts"]
    flags += ["--task.prompts", prompts, "--run.steps", "4", "--run.name", "run", "--run.directory", "by-command"]
    flags += ["--model.path", "tiny-bytes"]
    part = "[{kind: function, function: 'mine.py:share_of_letters', name: share_of_letters}]"
    assert main(["train", "ppo", *flags, "--reward.parts", part, "--json"]) == 0
    assert differences(python.path, tmp_path / "by-command" / "run") == []


def test_a_recipe_file_is_trained_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sections: dict[str, list[str]] = {}
    for key, value in SMALL.items():
        section, name = key.split(".")
        sections.setdefault(section, []).append(f"  {name}: {value}")
    (tmp_path / "small.yaml").write_text(
        "".join(f"{name}:\n" + "\n".join(rows) + "\n" for name, rows in sections.items())
    )
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in PROMPTS))
    settings = {"task.prompts": "prompts.jsonl", "run": {"steps": 2}, "run.name": "file"}
    run = tether.train_recipe("rloo", "small.yaml", settings=settings, reward=share_of_letters, progress=False)
    assert run.finished and run.method == "rloo" and run.path.resolve() == tmp_path / "runs" / "file"
    assert run.settings["rollout"]["max_new_tokens"] == 4
    assert tether.load_run("file").steps == 2


def test_ctrl_c_ends_after_the_step_at_hand_and_nothing_is_lost(small_ppo):
    calm = small_ppo(workspace="calm", **STEPS)

    def interrupt(step):
        if step.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(tether.Stopped) as stopped:
        small_ppo(workspace="stopped", on_step=interrupt, **STEPS)
    assert signal.getsignal(signal.SIGINT) is before
    run = stopped.value.run
    assert "stopped after 2 of 4 steps" in str(stopped.value) and f"tether.load_run('{run.path}')" in str(stopped.value)
    assert run.resume(progress=False).finished
    assert differences(calm.path, run.path) == []


def test_a_second_ctrl_c_is_a_keyboard_interrupt_at_once_even_within_a_reward(small_ppo):
    calls: list[str] = []

    def reward(prompt, completion):
        calls.append(completion)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        small_ppo(reward=reward, workspace="stopped", **STEPS)
    assert len(calls) == 3


def test_an_error_of_on_step_leaves_a_run_that_can_go_on(small_ppo, tmp_path):
    def fail(step):
        raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        small_ppo(on_step=fail, settings={"checkpoint.every": 1}, **STEPS)
    run = tether.load_run(tmp_path / "runs" / "run")
    assert run.state == "failed" and run.steps == 1
    assert run.resume(reward=share_of_letters, progress=False).finished
