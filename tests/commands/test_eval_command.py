"""`tether eval` from the command line, on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tether import cli

QUICK = ["--max-new-tokens", "6"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with prompts and a rule in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    records = [{"prompt": f"question {n}", "reference": "the answer", "id": f"q{n}"} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "eval_rule.py").write_text("def length(prompt, completion, answer):\n    return len(completion)\n")
    return tmp_path


def evaluate(capsys, *words: str) -> dict:
    assert cli.main(["eval", *words, *QUICK, "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    return json.loads(line)


def train(method: str, name: str, *flags: str) -> str:
    assert cli.main(["train", method, "--run.name", name, "--run.steps", "1", "--json", *flags]) == 0
    return f"runs/{name}"


RL = ["--rollout.prompts_per_step", "4", "--rollout.max_new_tokens", "5", "--rollout.temperature", "0.5"]


def test_one_model_on_a_file(capsys):
    found = evaluate(
        capsys, "tiny-bytes", "--prompts", "prompts.jsonl", "--limit", "4", "--samples", "2", "--seed", "5"
    )
    assert {key: found[key] for key in ("prompts", "samples", "temperature", "max_new_tokens", "seed", "level")} == {
        "prompts": 4, "samples": 2, "temperature": 1.0, "max_new_tokens": 6, "seed": 5, "level": 0.95,
    }  # fmt: skip
    assert found["dtype"] == "float32"
    [model] = found["models"]
    assert set(model["metrics"]) == {
        *("rouge1", "rouge2", "rougeL", "ended", "length", "repetition", "distinct_1", "distinct_2"),
    }
    assert all(set(metric) == {"value", "low", "high", "count", "method"} for metric in model["metrics"].values())
    assert found["win_rates"] == {} and found["differences"] == {}


def test_two_models_by_a_rule_repeat_themselves(capsys):
    words = ["tiny-bytes", "--against", "tiny-bytes", "--prompts", "prompts.jsonl", "--judge", "eval_rule:length"]
    found = evaluate(capsys, *words)
    assert found == evaluate(capsys, *words)
    win = found["win_rates"]["eval_rule:length"]
    assert (win["ties"], win["rate"]["value"], win["order_disagreement"]) == (6, 0.5, 0)
    assert found["models"][0]["metrics"]["kl_k3"]["value"] == 0.0
    assert found["differences"]["eval_rule:length"]["value"] == 0.0


def test_a_run_is_asked_what_it_was_trained_on(capsys):
    run = train("ppo", "first", *RL)
    capsys.readouterr()
    assert cli.main(["eval", run, "--against", "tiny-bytes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["temperature"], found["max_new_tokens"]) == (3, 0.5, 5)
    assert "score" in found["models"][0]["metrics"] and "task" in found["win_rates"]
    assert found["models"][0]["metrics"]["kl_k3"]["value"] > 0.0  # one step away from where it started


def test_a_reward_model_judges(capsys):
    pairs = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no"} for n in range(4)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    folder = train("reward", "rm", "--data.train", "pairs.jsonl", "--reward.batch_size", "4")
    capsys.readouterr()
    words = ["tiny-bytes", "--against", "tiny-bytes", "--prompts", "prompts.jsonl", "--judge", folder]
    found = evaluate(capsys, *words)
    assert found["win_rates"][folder]["ties"] == 6 and folder in found["models"][0]["metrics"]


def test_a_table_for_people(capsys):
    words = ["tiny-bytes", "--against", "tiny-bytes", "--task", "match-case", "--temperature", "0", *QUICK]
    assert cli.main(["eval", *words, "--answers", "answers.jsonl"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "task score",
        "greedy",
        "difference",
        "Win rate of tiny-bytes by task: 0.50",
        "No KL was computed",
        "3 tied",
    ):
        assert part in shown
    assert not any(ord(character) < 32 and character not in "\n\t" for character in shown), "no model moves the cursor"
    lines = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and set(lines[0]) == {"model", "id", "prompt", "completion", "finish", "metrics"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "MODEL"),
        (["tiny-bytes"], 2, "--prompts FILE or --task NAME"),
        (["tiny-bytes", "--prompts", "none.jsonl"], 5, "none.jsonl: there is no such file"),
        (["tiny-bytes", "--prompts", "prompts.txt"], 5, "unknown file ending"),
        (["tiny-bytes", "--task", "nope"], 2, "task.name"),
        (["tiny-bytes", "--prompts", "prompts.jsonl", "--judge", "task"], 2, "--judge task needs a task"),
        (["tiny-bytes", "--prompts", "prompts.jsonl", "--judge", "nothing"], 2, "--judge nothing: neither"),
        (["tiny-bytes", "--prompts", "prompts.jsonl", "--judge", "http://"], 2, "--judge http://"),
        (["tiny-bytes", "--prompts", "prompts.jsonl", "--judge", "eval_rule:none"], 2, "has no 'none'"),
        (["tiny-bytes", "--task-options", "{length: 4}", "--prompts", "prompts.jsonl"], 2, "needs --task"),
        (["tiny-bytes", "--task", "match-case", "--task-options", "[4"], 2, "must be a mapping"),
        (["tiny-bytes", "--task", "match-case", "--task-options", "4"], 2, "must be a mapping"),
        (["./none", "--task", "match-case"], 2, "there is no run and no model at ./none"),
        (["tiny-bytes", "--task", "match-case", "--samples", "0"], 2, "at least 1"),
        (["tiny-bytes", "--task", "match-case", "--temperature", "-1"], 2, "temperature"),
        (["tiny-bytes", "--task", "match-case", "--answers", "/nowhere/a.jsonl"], 6, "cannot write"),
    ],
)
def test_wrong_usage(capsys, words: list[str], code: int, said: str):
    assert cli.main(["eval", *words]) == code
    assert said in capsys.readouterr().err


def test_a_run_without_a_model_is_told(capsys):
    run = train("ppo", "unsaved", *RL, "--run.save", "false")
    capsys.readouterr()
    assert cli.main(["eval", run]) == 2
    assert "a run without a saved model" in capsys.readouterr().err


@pytest.mark.parametrize("subcommand", ["eval", "chat"])
def test_help_imports_nothing_heavy(subcommand: str):
    script = (
        f"import sys; from tether.cli import main; assert main([{subcommand!r}, '--help']) == 0; "
        "assert not {'torch', 'transformers', 'numpy', 'pydantic', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
