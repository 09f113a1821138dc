"""`tether doctor`: what it prints, as text and as JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from stored_runs import read_recorded
from synthetic import answered, synthetic

from tether.cli import main
from tether.commands.doctor import examination_as_json, print_examination
from tether.doctor.doctor import AUDITS, Doctor
from tether.store.database.open import workspace_at
from tether.store.recorder import RunRecorder, RunStart


def written(workspace: Path, name: str) -> str:
    """A recorded run as training leaves it in a workspace."""
    run = read_recorded(name)
    (workspace / name).mkdir()
    start = RunStart(run.method, len(run.metrics), run.config)
    recorder = RunRecorder(workspace_at(workspace), workspace / name, start)
    for row in run.metrics:
        recorder.record(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
    assert recorder.close("done")
    return name


def printed(run, width: int = 200) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        print_examination(console, run, Doctor().examination(run))
    return captured.get()


def test_findings_are_printed_the_gravest_first_with_cause_and_cure():
    text = printed(read_recorded("sick-longer-is-better"))
    assert "Warnings" in text
    assert "Longer answers score higher" in text
    assert "rollout.max_new_tokens" in text
    assert "docs/doctor.md#length" in text
    both = printed(read_recorded("sick-score-spikes"))
    assert both.index("Warnings") < both.index("Notes")


def test_a_run_without_findings_says_so_and_what_was_looked_at():
    text = printed(read_recorded("healthy-ppo-kl-0"))
    assert "No findings." in text
    assert "Do scores differ?" in text
    assert "Not enough data to judge" in text


def test_control_characters_in_what_a_model_wrote_are_made_visible():
    rollouts = [
        replace(answered([1] * 20, step=step, row=row, text="\x1b[2J[bold]boo"), prompt_text="a\x07b")
        for step in (0, 23)
        for row in range(10)
    ]
    run = synthetic(rollouts=rollouts, answers__top_share=[0.1] * 12 + [1.0] * 12, prompts__distinct=10)
    text = printed(replace(run, name="\x1b[31mred"))
    assert "\x1b[2J" not in text
    assert "\x1b[31m" not in text
    assert "\x07" not in text
    assert "[bold]boo" in text


def test_a_run_is_examined_and_the_exit_code_is_0_whatever_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    name = written(tmp_path, "sick-constant-reward")
    assert main(["doctor", name, "--workspace", str(tmp_path)]) == 0
    assert "Scores hardly differ" in capsys.readouterr().out
    assert main(["doctor", name, "--workspace", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 24
    assert found["findings"][0]["audit"] == "flat-scores"
    assert set(found["findings"][0]) >= {"severity", "saw", "why", "change", "metric", "link", "first_step"}


def test_every_audit_is_accounted_for_in_json():
    run = read_recorded("healthy-grpo-0")
    said = examination_as_json(run, Doctor().examination(run))
    names = [*said["healthy"], *said["too_little_data"], *(finding["audit"] for finding in said["findings"])]
    assert sorted(names) == sorted(audit.name for audit in AUDITS)


def test_a_run_that_is_not_there_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "nowhere", "--workspace", str(tmp_path)]) == 2
    assert "tether:" in capsys.readouterr().err
