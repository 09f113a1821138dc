"""Standard output that is full, and memory that is short: one sentence, and the exit code of storage."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

RUN = [
    *("train", "ppo", "--model.path=tiny-bytes", "--model.device=cpu", "--run.steps=2", "--run.name=x"),
    *("--rollout.prompts_per_step=2", "--rollout.max_new_tokens=2"),
]


def test_a_run_goes_on_where_its_lines_cannot_be_written(command, refusal, tmp_path: Path) -> None:
    said = refusal(command(*RUN, "--json", out="/dev/full"), 6)
    assert "standard output" in said
    assert (tmp_path / "runs" / "x" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "ppo", "--help"], ["plan", "ppo"], ["models"], ["models", "--json"]]
)
def test_a_command_whose_output_cannot_be_written(words: list[str], command, refusal) -> None:
    refusal(command(*words, out="/dev/full"), 6)


def test_short_memory(command, refusal) -> None:
    def limit() -> None:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + (24 << 20), resource.RLIM_INFINITY))

    refusal(command(*RUN, "--rollout.prompts_per_step=1024", "--rollout.max_new_tokens=128", before=limit), 6)
