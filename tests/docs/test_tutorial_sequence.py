"""The commands of docs/tutorial.md, block by block as they stand there, in one empty folder.

The files that a reader saves are written from the page. `smollm2-135m` is tiny-bytes, and what only takes long is made
short by flags that are appended (`SHORT`). Answers of that random model tie under the tutorial's rule, so a few pairs
stand in for those that were sampled. What `make setup` does, `make test` has done.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tether import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FEW = "--run.steps 2 --model.device cpu --optimizer.micro_batch_tokens 4096 --roles.trainable_layers 1"
PPO = "--rollout.prompts_per_step 4 --ppo.minibatch_size 4 --rollout.max_new_tokens 8 --rollout.samples_per_prompt 1"
SHORT = {
    "tether train sft": FEW,
    "tether train reward": f"{FEW} --reward.batch_size 4",
    "tether train ppo": f"{FEW} {PPO}",
    "tether plan": f"--model.device cpu --roles.trainable_layers 1 {PPO}",
    "tether sample": "--device cpu --limit 4 --max-new-tokens 8",
    "tether eval": "--device cpu --limit 4 --max-new-tokens 8",
    "tether chat": "--device cpu --max-new-tokens 8",
}
SETUP = ("make setup", "source .venv/bin/activate")
PAIRS = [{"prompt": f"say {n}:", "chosen": f"{n}", "rejected": "no"} for n in range(10)]


def blocks() -> list[tuple[str, str, str]]:
    """(language, name of the file to save it as, text) of each block of code."""
    found = re.finditer(r"(?:Save this as `([^`]+)`:\n\n)?```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL)
    return [(each[2], each[1] or "", each[3]) for each in found]


def test_the_tutorial_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "src").symlink_to(ROOT / "src")
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []
    for language, name, text in blocks():
        if name:
            Path(name).write_text(text, encoding="utf-8")
        for line in text.replace("\\\n", " ").splitlines() if language == "bash" else ():
            if line in SETUP or line.startswith("tether models pull"):
                continue
            run(line, monkeypatch)
            shown = capsys.readouterr()
            if line.startswith("tether sample"):
                assert Path("pairs.jsonl").is_file() and "prompts in pairs.jsonl" in shown.out + shown.err
                Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS), encoding="utf-8")
            if line.startswith("sed"):
                assert '"messages"' in Path("demonstrations.jsonl").read_text(encoding="utf-8")
                assert '"system"' not in Path("demonstrations.jsonl").read_text(encoding="utf-8")
            ran.append(line)
    assert len(ran) >= 16
    assert {path.name for path in (tmp_path / "tutorial" / "runs").iterdir()} >= {"sft", "reward", "ppo"}
    assert (tmp_path / "tutorial" / "my-model" / "config.json").is_file()


def run(line: str, monkeypatch) -> None:
    """One line, by hand where it is the shell's."""
    program, *words = shlex.split(line)
    if program == "cd":
        monkeypatch.chdir(words[0])
    elif program in ("mkdir", "cp", "sed"):
        subprocess.run(line, shell=True, check=True)
    else:
        assert program == "tether", line
        more = next((flags for start, flags in SHORT.items() if line.startswith(start)), "")
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        words = [word.replace("smollm2-135m", "tiny-bytes") for word in words]
        assert cli.main([*words, *shlex.split(more)]) == 0, line


def test_the_setup_that_is_left_out_exists():
    assert all(f"\n{line}\n" in PAGE for line in SETUP)
    assert re.search(r"^setup:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert "tether models pull smollm2-135m" in PAGE


def test_the_page_names_every_file_that_its_commands_read():
    saved = {name for _, name, _ in blocks() if name}
    assert saved == {"rule.py", "ppo.yaml"}
