"""Commands whose standard streams were closed before they started, as by `tether show RUN >&-`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tether import cli


@pytest.mark.parametrize("closed", ["1", "2", "012"])
@pytest.mark.parametrize("words", [["models"], ["train", "ppo", "--help"], ["--version"]], ids=lambda words: words[0])
def test_a_closed_stream_is_no_error(closed: str, words: list[str]):
    shell = 'exec "$@" ' + " ".join(f"{number}>&-" for number in closed)
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = ["sh", "-c", shell, "sh", sys.executable, "-m", "tether", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
