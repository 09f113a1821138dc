"""The commands of README.md's "Use it", line by line as they stand there, in one empty folder.

What a reader brings is put beside them: `MODEL` is tiny-bytes, the four files hold a few records, `recipes/` is the
repository's. What only takes long is made short by flags that are appended (`SHORT`). The lines about smollm2-135m are
left out where it is not in the cache; the page and the chat end by themselves.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tether import cli
from tether.hub.catalog import cached_model

ROOT = Path(__file__).parents[2]
REAL = "smollm2-135m"
FEW = "--run.steps 2 --model.device cpu --optimizer.micro_batch_tokens 4096"
SHORT = {
    "tether train sft": f"{FEW} --sft.batch_size 4",
    "tether train reward": f"{FEW} --reward.batch_size 4",
    "tether train ppo recipes/": (
        f"{FEW} --rollout.prompts_per_step 4 --ppo.minibatch_size 4 --rollout.max_new_tokens 8 --ppo.critic_warmup 0"
    ),
    "tether eval": "--device cpu --limit 4",
    "tether chat": "--device cpu --max-new-tokens 8",
    "tether conformance": "--family gae",
    "tether studio": "--port 0 --json",
}
FILES = {
    "demonstrations": [{"prompt": f"say {n}:", "completion": f"{n}"} for n in range(8)],
    "preferences": [{"prompt": f"say {n}:", "chosen": f"{n}", "rejected": "no"} for n in range(8)],
    "prompts": [{"prompt": f"say {n}:"} for n in range(8)],
    "held_out": [{"prompt": f"tell {n}:"} for n in range(8)],
}


def commands() -> list[str]:
    """The lines of the block, without their remarks."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Use it")[2].partition("```bash\n")[2]
    return [line.partition("#")[0].strip() for line in block.partition("```")[0].splitlines()]


def test_the_sequence_of_the_readme_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, records in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    assert len(commands()) >= 12
    for line in commands():
        if cached_model(REAL) is None and (REAL in line or "ppo-verifiable" in line):
            continue
        more = next((flags for start, flags in SHORT.items() if line.startswith(start)), "")
        words = shlex.split(f"{line.replace('MODEL', 'tiny-bytes')} {more}")
        assert words.pop(0) == "tether"
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        code = _serves(words) if words[0] == "studio" else cli.main(words)
        captured = capsys.readouterr()
        assert code == 0, f"{line}\n{captured.err[-2000:]}"
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"sft", "reward", "ppo", "tether.db"}


def _serves(words: list[str]) -> int:
    """0 once the page says where it is; it is ended then."""
    command = [sys.executable, "-m", "tether", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as page:
        assert page.stdout is not None
        told = page.stdout.readline()
        page.terminate()
        page.wait(timeout=30)
    return 0 if "http://127.0.0.1" in told else 1


@pytest.mark.parametrize("file", ["ppo.yaml", "tiny-ppo.yaml", "ppo-verifiable.yaml"])
def test_every_recipe_that_the_readme_names_is_there(file):
    assert (ROOT / "recipes" / file).is_file()
    assert f"recipes/{file}" in (ROOT / "README.md").read_text(encoding="utf-8")
