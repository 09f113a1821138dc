"""The demo, broken off once in each of its stages: it goes on in the right one, and ends with the same numbers."""

from __future__ import annotations

import json
import shutil

import pytest
from test_demo_pipeline import small  # noqa: F401 (a fixture)

import tether.demo.demo_report as report
import tether.demo.pipeline as pipeline
from tether.errors import Stopped
from tether.store.read import open_workspace, read_run
from tether.train.attempt import Attempt

STAGES = ("sft", "preferences", "reward", "ppo", "judging", "report")


class Broken(Exception):  # noqa: N818 (stands for a kill)
    """The process dies here."""


def break_in(stage: str, monkeypatch) -> None:
    """Die in the middle of this stage."""

    def break_off(*_, **__):
        raise Broken(stage)

    if stage == "preferences":
        monkeypatch.setattr(pipeline, "collect_preferences", break_off)
    elif stage == "judging":
        monkeypatch.setattr(pipeline, "judge", break_off)
    elif stage == "report":
        monkeypatch.setattr(report, "write_demo_report", break_off)
    else:
        after_step = Attempt.after_step

        def breaking(self, outcome):
            if self.run.path.name == stage and outcome.step == 1:
                raise Broken(stage)
            after_step(self, outcome)

        monkeypatch.setattr(Attempt, "after_step", breaking)


def everything(root):
    """What a demo leaves, without how long it took."""
    summary = json.loads((root / "summary.json").read_text())
    models = {stage: (root / stage / "model" / "model.safetensors").read_bytes() for stage in ("sft", "reward", "ppo")}
    steps = {}
    with open_workspace(root.parent) as opened:
        for stage in ("sft", "reward", "ppo"):
            rows = read_run(opened, f"{root.name}/{stage}").metrics
            steps[stage] = [
                sorted((name, repr(value)) for name, value in row.items() if not name.startswith("seconds/"))
                for row in rows
            ]
    return {name: value for name, value in summary.items() if name != "seconds"}, models, steps


def with_roles(demo, mode: str):
    """The demo with its roles in this mode, one layer at the top."""
    stages = {stage: getattr(demo, stage) for stage in ("sft", "reward", "ppo")}
    roles = {
        name: stage.roles.model_copy(update={"mode": mode, "trainable_layers": 1}) for name, stage in stages.items()
    }
    return demo.model_copy(update={name: stages[name].model_copy(update={"roles": roles[name]}) for name in stages})


@pytest.mark.parametrize("mode", ["separate", "shared_backbone"])
def test_a_demo_that_is_broken_off_in_every_stage_ends_as_one_that_is_not(small, tmp_path, monkeypatch, capsys, mode):  # noqa: F811
    small = with_roles(small, mode)
    small = small.model_copy(update={"directory": str(tmp_path / "calm")})
    assert pipeline.run_demo(small, human=False, json_output=True) == 0
    calm = everything(tmp_path / "calm" / "demo")
    shutil.rmtree(tmp_path / "calm")

    small = small.model_copy(update={"directory": str(tmp_path / "broken")})
    root = tmp_path / "broken" / "demo"
    for place, stage in enumerate(STAGES):
        with monkeypatch.context() as patched, pytest.raises(Broken, match=stage):
            break_in(stage, patched)
            if place == 0:
                pipeline.run_demo(small, human=False, json_output=True)
            else:
                pipeline.resume_demo(root, json_output=True)
    assert pipeline.resume_demo(root, json_output=True) == 0
    assert everything(root) == calm
    assert not (root / "states").exists(), "what the backbone gave is read by no later stage"
    assert {"sft", "preferences", "reward", "ppo", "judging"} <= json.loads((root / "summary.json").read_text())[
        "seconds"
    ].keys()


def test_a_demo_that_is_asked_to_stop_says_in_which_stage_and_how_to_go_on(small, tmp_path, monkeypatch):  # noqa: F811
    asked: list[bool] = []
    after_step = Attempt.after_step

    def ask_in_the_reward_stage(self, outcome):
        after_step(self, outcome)
        if self.run.path.name == "reward":
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)
            asked.append(True)

    monkeypatch.setattr(Attempt, "after_step", ask_in_the_reward_stage)
    with pytest.raises(Stopped, match=r"stopped in stage reward; resume with: tether resume .*demo"):
        pipeline.run_demo(small, human=False, json_output=True)
    assert len(asked) == 1
    assert not (tmp_path / "demo" / "ppo").exists()
