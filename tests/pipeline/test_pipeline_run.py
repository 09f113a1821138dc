"""A whole pipeline on the tiny model: its stages, its report, and resuming it after a kill at any moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from small_pipelines import ON_CPU, QUICK, collect_stage, ppo_stage, reward_stage, small

import tether.pipeline.collect as collecting
import tether.pipeline.run_pipeline as running
from tether.cli import main
from tether.errors import ConfigError, DataError, Stopped
from tether.pipeline.run_pipeline import check_pipeline, resume_pipeline, run_pipeline
from tether.store.read import open_workspace, read_run
from tether.train.attempt import Attempt

STAGES = [f"round-{k}-{name}" for k in (1, 2) for name in ("answers", "proxy", "ppo")]


def everything(root: Path) -> tuple[object, ...]:
    """What a pipeline leaves, without how long it took and where it lies."""
    summary = json.loads((root / "summary.json").read_text())
    kept = {name: value for name, value in summary.items() if name not in ("seconds", "policy")}
    weights = {str(file.relative_to(root)): file.read_bytes() for file in root.glob("*/model/*.safetensors")}
    records = {
        str(file.relative_to(root)): file.read_bytes()
        for file in root.glob("*/*.jsonl")
        if file.name != "records.jsonl"
    }
    metrics: dict[str, list[object]] = {}
    with open_workspace(root.parent) as opened:
        for name in (stage for stage in STAGES if (root / stage / "model").is_dir()):
            rows = read_run(opened, f"{root.name}/{name}").metrics
            metrics[name] = [
                sorted((key, repr(value)) for key, value in row.items() if not key.startswith("seconds/"))
                for row in rows
            ]
    return kept, weights, records, metrics


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    assert run_pipeline(small(folder), json_output=False) == 0
    return folder / "p"


def test_every_round_is_measured_and_shown(calm: Path):
    summary = json.loads((calm / "summary.json").read_text())
    assert [each["round"] for each in summary["rounds"]] == [0, 1, 2]
    first, *rounds = summary["rounds"]
    assert first["kl"] == 0.0 and "proxy" not in first
    for each in rounds:
        low, high = each["true_score_interval"]
        assert low <= each["true_score"] <= high and each["kl"] > 0
        assert set(each["proxy"]) == {"before", "after"}
    assert set(rounds[0]["agreement"]) == {"after"} and set(rounds[1]["agreement"]) == {"before", "after"}
    page = (calm / "report.html").read_text()
    HTMLParser().feed(page)
    assert "True score against proxy" in page and "Round by round" in page and "tether chat" in page
    assert (calm / "report.md").read_text().count("| 2 |") == 1
    with open_workspace(calm.parent) as opened:
        steps = read_run(opened, "p/round-2-ppo").metrics
    assert all("reward/true" in step and "reward/proxy" in step for step in steps)
    assert steps[0]["score"] == pytest.approx(steps[0]["reward/proxy"], abs=1e-5), "the true score has no weight"
    assert steps[0]["kl_ref_k3"] > 1e-4, "the reference is the policy before the rounds, not that of this round"


def test_prompts_differ_between_rounds_and_old_ratings_are_kept(calm: Path):
    prompts = [
        {json.loads(line)["id"] for line in (calm / f"round-{k}-answers" / "answers.jsonl").read_text().splitlines()}
        for k in (1, 2)
    ]
    assert len(prompts[0]) == len(prompts[1]) == 8 and not prompts[0] & prompts[1]
    recipe = json.loads((calm / "round-2-proxy" / "recipe.json").read_text())
    assert [Path(path).parent.name for path in recipe["data"]["train"]] == ["round-1-answers", "round-2-answers"]


class Broken(Exception):  # noqa: N818 (stands for a kill)
    """The process dies here."""


def break_in(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die at this place."""

    def break_off(*_, **__):
        raise Broken(place)

    if place == "sampled":
        monkeypatch.setattr(collecting, "rated", break_off)
    elif place == "measure":
        monkeypatch.setattr(running, "measure_round", break_off)
    elif place == "report":
        monkeypatch.setattr(running, "write_pipeline_report", break_off)
    else:
        after_step = Attempt.after_step

        def breaking(self, outcome):
            if self.run.path.name == place and outcome.step == 1:
                raise Broken(place)
            after_step(self, outcome)

        monkeypatch.setattr(Attempt, "after_step", breaking)


def test_a_pipeline_that_dies_everywhere_ends_as_one_that_does_not(calm: Path, tmp_path: Path, monkeypatch):
    places = ["sampled", "round-1-proxy", "round-1-ppo", "measure", "round-2-proxy", "round-2-ppo", "report"]
    for number, place in enumerate(places):
        with monkeypatch.context() as patched, pytest.raises(Broken, match=place):
            break_in(place, patched)
            if number == 0:
                run_pipeline(small(tmp_path), json_output=False)
            else:
                resume_pipeline(tmp_path / "p", json_output=False)
    assert resume_pipeline(tmp_path / "p", json_output=False) == 0
    assert everything(tmp_path / "p") == everything(calm)


def test_a_killed_process_is_resumed_to_the_same_bits(calm: Path, tmp_path: Path):
    """SIGKILL as soon as a checkpoint of the second round is there."""
    small(tmp_path)
    words = [sys.executable, "-m", "tether", "pipeline", str(tmp_path / "p.yaml")]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    checkpoints = tmp_path / "p" / "round-2-proxy" / "checkpoints"
    while process.poll() is None and not (checkpoints.is_dir() and any(checkpoints.iterdir())):
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert main(["resume", str(tmp_path / "p")]) == 0
    assert everything(tmp_path / "p") == everything(calm)


def test_rounds_can_be_added_and_the_old_ones_stay(calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_pipeline(small(tmp_path, rounds=1), json_output=False) == 0
    kept = (tmp_path / "p" / "round-1-ppo" / "finished.json").stat().st_mtime_ns
    assert main(["pipeline", str(tmp_path / "p.yaml"), "--rounds", "2", "--json"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["stage"] for line in printed[:-1]] == STAGES[3:] and printed[-1]["rounds"][2]["round"] == 2
    assert (tmp_path / "p" / "round-1-ppo" / "finished.json").stat().st_mtime_ns == kept
    assert everything(tmp_path / "p") == everything(calm)
    with pytest.raises(ConfigError, match="has 2 rounds already"):
        resume_pipeline(tmp_path / "p", json_output=False, rounds=1)


def test_stopping_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    after_step = Attempt.after_step

    def ask(self, outcome):
        after_step(self, outcome)
        if self.run.path.name == "round-1-proxy":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Attempt, "after_step", ask)
    with pytest.raises(
        Stopped, match=r"stopped after 1 of 2 steps in stage round-1-proxy; resume with: tether resume .*p"
    ):
        run_pipeline(small(tmp_path, rounds=1), json_output=False)
    assert not (tmp_path / "p" / "round-1-ppo").exists()


# -- other stages and modes ---------------------------------------------------------------------------------------


MODES = [("separate", "head"), ("lora", "separate"), ("lora", "head"), ("shared_backbone", "separate")]


@pytest.mark.parametrize(("mode", "critic"), MODES)
def test_every_role_mode_and_critic(tmp_path: Path, mode: str, critic: str):
    roles = {"mode": mode, "lora_rank": 2, "trainable_layers": 1}
    part = {"kind": "model", "name": "proxy", "path": "stage:proxy", "shared": mode != "separate"}
    stages = {
        "answers": collect_stage(),
        "proxy": reward_stage(roles=roles),
        "ppo": ppo_stage(roles=roles | {"critic": critic}, reward={"parts": [part]}),
    }
    assert run_pipeline(small(tmp_path, each_round=stages), json_output=False) == 0
    rounds = json.loads((tmp_path / "p" / "summary.json").read_text())["rounds"]
    assert rounds[2]["kl"] > 0 and 0 <= rounds[2]["agreement"]["after"] <= 1


def test_other_methods_are_stages_too(tmp_path: Path):
    reward = {"parts": [{"kind": "model", "name": "proxy", "path": "stage:proxy"}]}
    rollout = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4}
    dpo = {"method": "dpo", "model": ON_CPU, "run": {"steps": 1}, "data": {"train": "stage:answers"}} | QUICK
    grpo = {"method": "grpo", "model": ON_CPU, "run": {"steps": 1}, "rollout": rollout, "reward": reward} | QUICK
    stages = {"answers": collect_stage(), "proxy": reward_stage(), "preferred": dpo, "grouped": grpo}
    assert run_pipeline(small(tmp_path, rounds=1, each_round=stages), json_output=False) == 0
    recipe = json.loads((tmp_path / "p" / "round-1-grouped" / "recipe.json").read_text())
    assert recipe["model"]["path"] == str(tmp_path / "p" / "round-1-preferred" / "model")


def test_best_of_n_and_rejection_sampling(tmp_path: Path):
    best = {"parts": [{"kind": "model", "name": "proxy", "path": "stage:proxy"}]}
    answers = {"prompts": 8, "samples_per_prompt": 4, "max_new_tokens": 4}
    stages = {
        "answers": collect_stage(),
        "proxy": reward_stage(),
        "best": {"method": "best_of_n", "model": ON_CPU, "answers": answers, "split": "prompts", "reward": best},
        "tuned": {
            "method": "rejection_sampling",
            "model": ON_CPU,
            "answers": answers,
            "reward": best,
            "run": {"steps": 2},
        }
        | QUICK,
    }
    # Few answers of a random model end by themselves within 4 tokens; the toy's answers are cut at that length.
    for name in ("best", "tuned"):
        stages[name] = stages[name] | {"answers": answers | {"max_new_tokens": 60}}
    assert run_pipeline(small(tmp_path, rounds=1, each_round=stages), json_output=False) == 0
    root = tmp_path / "p"
    figures = json.loads((root / "summary.json").read_text())["stages"]
    found = figures["round-1-best"]
    assert found["scores_best"] > found["scores_mean"] and "true_mean" in found
    assert found["kl_bound"] == pytest.approx(1.3862943611 - 0.75)  # log 4 - 3/4
    sampled = [json.loads(line) for line in (root / "round-1-tuned" / "answers.jsonl").read_text().splitlines()]
    chosen = [json.loads(line) for line in (root / "round-1-tuned" / "best.jsonl").read_text().splitlines()]
    by_prompt = {json.dumps(each["prompt"]): each for each in sampled}
    for each in chosen:
        asked = by_prompt[json.dumps(each["prompt"])]
        ended = [score for score, end in zip(asked["scores"], asked["ended"], strict=True) if end]
        assert asked["scores"][asked["answers"].index(each["completion"])] == max(ended)
    recipe = json.loads((root / "round-1-tuned" / "recipe.json").read_text())
    assert recipe["method"] == "sft" and recipe["data"]["train"] == str(root / "round-1-tuned" / "best.jsonl")


# -- wrong input --------------------------------------------------------------------------------------------------


NO_FILE = {"sft": {"method": "sft", "data": {"train": "no.jsonl"}}}
NO_REFERENCE = {"ppo": ppo_stage(kl={"reference": "./gone"}, reward={})}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"truth": {"prompts": 4}}, r"truth\.prompts is 4, but the task holds out 3 prompts"),
        ({"policy": None}, "no stage before it makes a policy"),
        ({"policy": "./nowhere"}, r"there is no run and no model at \./nowhere"),
        ({"task": {"name": "no-such-task"}}, "no-such-task"),
        ({"each_round": NO_FILE}, r"stage sft, data\.train: there is no file no\.jsonl"),
        ({"each_round": NO_REFERENCE}, r"stage ppo, kl\.reference: there is no run and no model"),
    ],
)
def test_what_would_fail_later_is_said_before_anything_is_trained(tmp_path: Path, keys, message: str):
    with pytest.raises(ValueError, match=message):
        check_pipeline(small(tmp_path, **keys))
    assert not (tmp_path / "p").exists()


def test_a_rater_that_fails_is_one_sentence_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After the repair the same command goes on."""
    monkeypatch.chdir(tmp_path)
    rule = tmp_path / "rule.py"
    rule.write_text("def score(prompt, completion):\n    raise RuntimeError('the rule is out')\n")
    stage = collect_stage(reward={"parts": [{"kind": "function", "function": "rule.py:score"}]})
    stages = {"answers": stage, "proxy": reward_stage()}
    with pytest.raises(DataError, match=r"stage round-1-answers: .*the rule is out.*go on with: tether resume"):
        run_pipeline(small(tmp_path, rounds=1, truth=None, each_round=stages), json_output=False)
    rule.write_text("def score(prompt, completion):\n    return len(set(completion))\n")
    for name in [name for name in sys.modules if "rule" in name and "tether_user" in name]:
        del sys.modules[name]
    assert resume_pipeline(tmp_path / "p", json_output=False) == 0


def test_a_folder_of_something_else_and_another_pipeline_are_left_alone(calm: Path, tmp_path: Path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a pipeline's folder"):
        run_pipeline(small(tmp_path), json_output=False)
    shutil.copytree(calm.parent, tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"holds a pipeline with other settings \(each_round\.ppo\.run\.steps\)"):
        run_pipeline(small(tmp_path / "copy", "--ppo.run.steps", "5"), json_output=False)


def test_a_second_process_is_kept_out(tmp_path: Path):
    words = "another process is running the pipeline"
    with running.alone(tmp_path), pytest.raises(ConfigError, match=words), running.alone(tmp_path):
        pass


def test_the_command_checks_lists_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small(tmp_path)
    assert main(["pipeline", str(tmp_path / "p.yaml"), "--check"]) == 0
    out = capsys.readouterr().out
    assert "each round  proxy" in out and "kl.reference: stage:policy@first" in out and "2 rounds, 6 stages" in out
    assert main(["pipeline", "--keys", "collect"]) == 0
    assert "judge.max_failure_rate" in capsys.readouterr().out
    assert main(["pipeline", "--keys", "colect"]) == 2
    assert "did you mean collect?" in capsys.readouterr().err
    assert main(["pipeline", "--help"]) == 0 and main(["pipeline"]) == 2
    assert main(["resume", str(tmp_path), "--rounds", "3"]) == 2
    assert "--rounds is for a pipeline" in capsys.readouterr().err
