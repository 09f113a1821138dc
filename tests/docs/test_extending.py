"""Every example of docs/extending.md runs as it stands, and every error that the page promises is raised."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tether
from tether import cli
from tether.algorithms.algorithm import AdvantageSettings, Algorithm, MinibatchEpochs
from tether.algorithms.objectives import Clip, PolicyObjective
from tether.protocols import RolloutEngine
from tether.rollout.scripted import ScriptedEngine
from tether.types import Prompt

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
FILES = {match[1]: text for _, text in BLOCKS if (match := re.match(r"# (\w+\.\w+)\n", text))}
PROGRAMS = [name for name in FILES if name.endswith(".py") and not name.startswith("test_")]
TESTS = [name for name in FILES if name.startswith("test_")]
COMMANDS = [text.strip() for kind, text in BLOCKS if kind == "console"]
NO_RUN = ("my_metric.py",)  # programs that train nothing
SMALL = {"rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 4}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A reader's folder with every file of the page in it; their modules are forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in PROGRAMS:
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    yield tmp_path
    for name in PROGRAMS:
        sys.modules.pop(Path(name).stem, None)


def test_every_block_is_a_file_or_a_command():
    assert all(kind == "console" or text.split()[1] in FILES for kind, text in BLOCKS)
    assert len(FILES) == sum(kind != "console" for kind, _ in BLOCKS), "two blocks have one name"
    assert len(PROGRAMS) >= 12 and len(TESTS) == 9 and len(COMMANDS) == 8
    assert all(text.count('__name__ == "__main__"') == 1 for name, text in FILES.items() if name in PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_runs(name, folder, capsys):
    runpy.run_path(str(folder / name), run_name="__main__")
    if name == "my_tracker.py":
        assert [line.partition(",")[0] for line in Path("scores.csv").read_text().splitlines()] == ["0", "1"]
    runs = list(Path("runs").glob("*/finished.json"))
    assert len(runs) == (name not in NO_RUN) and all(tether.load_run(run.parent).finished for run in runs)
    if name == "my_engine.py":
        assert "PlainEngine samples without a cache: it is slow." in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("lines", COMMANDS)
def test_the_commands_run(lines, folder, capsys):
    for line in lines.splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "tether" and cli.main(words) == 0
    runs = [file.parent for file in Path("runs").glob("*/finished.json")]
    assert len(runs) == lines.count("tether train")
    shown = capsys.readouterr()
    if "my_sapo.yaml" in lines:
        assert "sapo/slope" in tether.load_run(runs[0]).metrics_rows()[-1]
    if "my_engine.yaml" in lines:
        assert "PlainEngine samples without a cache: it is slow." in " ".join(shown.err.split())
    if "my_tracker.yaml" in lines:
        assert [line.partition(",")[0] for line in (runs[0] / "scores.csv").read_text().splitlines()] == ["0", "1"]
    if "my_rule.yaml" in lines:
        assert "The score is not above 0" in shown.err and "The score is not above 0 (low-score)" in shown.out
    if "my_metric.py" in lines:
        assert "vowels" in shown.out
    if "my_loader.yaml" in lines:
        assert tether.load_run(runs[0]).generate(["red:"], max_new_tokens=2)


def test_the_page_s_tests_pass(folder):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *TESTS],
        capture_output=True,
        text=True,
        check=False,
    )
    number = sum(text.count("\ndef test_") for name, text in FILES.items() if name in TESTS)
    assert done.returncode == 0 and f"{number} passed" in done.stdout, done.stdout + done.stderr


def test_dr_grpo_of_the_page_is_what_the_recipe_calls_so(folder):
    mine = runpy.run_path("my_dr_grpo.py")["dr_grpo"]
    settings = {
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 16},
        "grpo.scale_by_std": False,
        "grpo.aggregation": {"over": "fixed", "fixed_length": 16},
        "grpo.epochs": 1,
        "grpo.minibatch_size": 16,
        "grpo.clip_range": 0.2,
        "kl.apply_to": "none",
    }
    runs = [
        tether.grpo("tiny-bytes", ["red:", "blue:", "gold:", "grey:"], _short, steps=2, progress=False, **more)
        for more in ({"settings": settings}, {"settings": settings, "algorithm": mine})
    ]
    assert runs[0].settings["grpo"]["scale_by_std"] is False
    assert runs[1].settings["run"]["objects"] == ["reward _short", "algorithm dr_grpo"]
    rows = [run.metrics_rows() for run in runs]
    for name in ("score", "policy_loss", "advantage_std", "grad_norm/policy", "entropy"):
        assert rows[1][-1][name] == pytest.approx(rows[0][-1][name], rel=1e-5, abs=1e-7), name


def _short(completion):
    return -len(completion) / 100


def _refused(kind, pattern, **given):
    told = {"steps": 1, "progress": False, "settings": SMALL} | given
    prompts = {} if "task" in given else {"prompts": ["red:", "blue:"], "reward": _short}
    with pytest.raises(kind, match=pattern):
        tether.grpo("tiny-bytes", **(prompts | told))


class Colours:
    """A task that is as wrong as its changes."""

    def __init__(self, prompts=None, reward=_short):
        self.asked, self.scorer = prompts, reward

    def prompts(self):
        return [Prompt.from_text("red", "red:")] if self.asked is None else self.asked

    def held_out(self):
        return []

    def reward(self):
        return self.scorer


class NoPrompts:
    """Half a task."""

    def held_out(self):
        return []


@pytest.mark.parametrize(
    ("task", "kind", "pattern"),
    [
        (NoPrompts(), tether.DataError, r"NoPrompts raised AttributeError: .*prompts"),
        (
            Colours(["red:"]),
            tether.DataError,
            r"^task.name: prompts\(\) of .*Colours returned a str: it must return Prompts",
        ),
        (
            Colours(reward=lambda completion, colour: 1.0),
            tether.ConfigError,
            r"^task.name: reward\(\): task_reward takes 'colour', and no record has such a column",
        ),
        (Colours(reward=3), tether.DataError, r"reward\(\) of .*Colours returned a int: it must return a function"),
    ],
)
def test_a_wrong_task_is_refused(folder, task, kind, pattern):
    _refused(kind, pattern, task=task)


def test_a_wrong_option_and_a_task_without_held_out_prompts_are_refused(folder):
    _refused(tether.ConfigError, "holds out no prompts", task=Colours(), settings=SMALL | {"evaluation.every": 1})
    wrong = {"task.name": "my_task.py:Sums", "task.options": {"limits": 4}}
    with pytest.raises(tether.ConfigError, match=r"^task.options: my_task.py:Sums does not take them: .*limits"):
        tether.train_recipe("ppo", settings=wrong, progress=False)


class WrongEngine(ScriptedEngine):
    """An engine whose rollouts are changed by `change`."""

    def __init__(self, policy, change):
        super().__init__(policy.tokenizer, lambda prompt, sample: f"{prompt.id}{sample}")
        self.change = change

    def generate(self, *args, **words):
        return self.change(super().generate(*args, **words))


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda good: good[1:], r"WrongEngine gave 3 rollouts for 2 prompts with 2 samples each: it must give 4"),
        (lambda good: [good[0], good[2], good[1], good[3]], r"^engine: rollout 1 of WrongEngine answers prompt"),
        (lambda good: [replace(each, group_id=0) for each in good], r"rollout 2 of WrongEngine has group_id 0"),
        (
            lambda good: [replace(each, group_id=place) for place, each in enumerate(good)],
            r"rollout 1 of WrongEngine has group_id 1",
        ),
        (
            lambda good: [replace(each, behavior_logprobs=each.behavior_logprobs[1:]) for each in good],
            r"rollout 0 of WrongEngine has behavior_logprobs of shape \(\d+,\) on cpu",
        ),
        (
            lambda good: [replace(each, response_mask=torch.ones_like(each.response_mask)) for each in good],
            r"rollout 0 of WrongEngine has no prompt token",
        ),
    ],
    ids=["missing", "order", "one group", "many groups", "length", "prompt"],
)
def test_an_engine_that_breaks_its_protocol_is_refused(folder, change, pattern):
    _refused(tether.DataError, pattern, engine=lambda policy: WrongEngine(policy, change))


def test_an_engine_needs_generate_alone_and_inherits_the_rest(folder):
    class Duck:
        def generate(self):
            """Nothing else."""

    class Small(RolloutEngine):
        def generate(self, prompts, sampling, *, samples_per_prompt, seed):
            return []

    _refused(tether.ConfigError, r"^engine: Duck has no method release: inherit from tether", engine=Duck())
    engine = Small()
    assert (engine.policy_version, engine.notices, engine.cache_bytes) == (0, (), 0)
    engine.release()
    _refused(tether.DataError, r"^engine: Small gave 0 rollouts for 2 prompts", engine=engine)


def _algorithm(estimator, surrogate=None, **more):
    return Algorithm(
        name="mine",
        estimator=estimator,
        objective=lambda coefficients: PolicyObjective(surrogate or Clip(0.2, 0.2)),
        update=MinibatchEpochs(1, 4),
        minibatch_size=4,
        advantage_settings=AdvantageSettings(kl_apply_to="none"),
        **more,
    )


class MeanLoss(Clip):
    """A surrogate that takes the mean itself."""

    def __call__(self, logprobs, batch):
        return super().__call__(logprobs, batch).mean()


def _rewards(rewards, mask, **_):
    return rewards, None


@pytest.mark.parametrize(
    ("algorithm", "pattern"),
    [
        (
            _algorithm(lambda rewards, mask, **_: (rewards.sum(dim=1), None)),
            r"^algorithm mine: .* returned advantages of shape \(4,\): it must return one for each token, \(4, \d+\)",
        ),
        (_algorithm(lambda rewards, mask, **_: (rewards, rewards[:, 0])), r"returned returns of shape \(4,\)"),
        (_algorithm(lambda rewards, mask, **_: rewards), r"returned a Tensor: it must return \(advantages, returns\)"),
        (_algorithm(_rewards, needs_critic=True), r"returned no returns, and needs_critic is True"),
        (
            _algorithm(_rewards, MeanLoss(0.2, 0.2)),
            r"^surrogate MeanLoss returned a loss of shape \(\): it must return one",
        ),
    ],
    ids=["advantages", "returns", "tuple", "critic", "surrogate"],
)
def test_an_algorithm_with_a_wrong_part_is_refused(folder, algorithm, pattern):
    _refused(tether.ConfigError, pattern, algorithm=algorithm)


class Deaf:
    """A tracker without record."""

    def close(self):
        """Nothing to close."""


def test_what_is_no_tracker_is_refused(folder):
    CsvTracker = runpy.run_path("my_tracker.py")["CsvTracker"]
    _refused(tether.ConfigError, r"^trackers: expected a list of trackers, was given a Deaf", trackers=Deaf())
    _refused(tether.ConfigError, r"^trackers\[0\]: Deaf has no method record", trackers=[Deaf()])
    _refused(tether.ConfigError, r"^trackers\[0\]: CsvTracker is a class: pass an object of it", trackers=[CsvTracker])
    assert not list(Path("runs").glob("grpo*"))


def test_what_is_no_hook_is_refused(folder):
    StopAtScore = runpy.run_path("my_hook.py")["StopAtScore"]
    _refused(tether.ConfigError, r"^hooks: expected a list of hooks, was given a StopAtScore", hooks=StopAtScore(1.0))
    _refused(tether.ConfigError, r"^hooks\[0\]: Deaf has no method begin", hooks=[Deaf()])
    _refused(tether.ConfigError, r"^hooks\[0\]: StopAtScore is a class: pass an object of it", hooks=[StopAtScore])
    hook = StopAtScore(99.0)
    hook.state = lambda: {"mean": torch.zeros(1)}
    _refused(tether.ConfigError, r"^hooks: state\(\) of StopAtScore gave what JSON cannot hold", hooks=[hook])
