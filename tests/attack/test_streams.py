"""Standard output that is full, and memory that is short: one sentence, and the exit code of storage."""

from __future__ import annotations

import mmap
import resource
from contextlib import suppress
from pathlib import Path

import pytest

RUN = [
    *("train", "ppo", "--model.path=tiny-bytes", "--model.device=cpu", "--run.steps=2", "--run.name=x"),
    *("--rollout.prompts_per_step=2", "--rollout.max_new_tokens=2"),
]
TAKEN: list[bytearray] = []


def test_a_run_goes_on_where_its_lines_cannot_be_written(command, refusal, tmp_path: Path) -> None:
    said = refusal(command(*RUN, "--json", out="/dev/full"), 6)
    assert "standard output" in said
    assert (tmp_path / "runs" / "x" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "ppo", "--help"], ["plan", "ppo"], ["models"], ["models", "--json"]]
)
def test_a_command_whose_output_cannot_be_written(words: list[str], command, refusal) -> None:
    refusal(command(*words, out="/dev/full"), 6)


@pytest.mark.parametrize("megabytes", [24, 40])
def test_short_memory(megabytes: int, command, refusal) -> None:
    """It runs out while the model is loaded, or at the rollout's first large block.

    With 60 MB the rollout gets some way first, which takes its time and says nothing more.
    """
    words = (*RUN, "--rollout.prompts_per_step=1024", "--rollout.max_new_tokens=128")
    refusal(command(*words, before=lambda: leave_memory(megabytes << 20)), 6)


def leave_memory(size: int) -> None:
    """Limit this process to `size` more bytes. What earlier cases freed counts as well, so it is taken first."""
    reserve = mmap.mmap(-1, size)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now, resource.RLIM_INFINITY))
    for block in (1 << 20, 1 << 16, 1 << 12):
        with suppress(MemoryError):
            while True:
                TAKEN.append(bytearray(block))
    reserve.close()
