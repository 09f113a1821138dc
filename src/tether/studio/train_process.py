"""`python -m tether.studio.train_process PLAN.json`: run the commands of a plan, one after another.

It puts the server's job and its runs into one process group, which one signal stops. The current run handles the
signal: it writes a checkpoint and ends with its own exit code, which this process returns.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tether.processes import environment, python


def run_plan(path: Path, further: Sequence[str] = ()) -> int:
    """Run a plan; returns the exit code of the first command that fails, else 0. `further` is added to each command."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    for words in json.loads(path.read_text(encoding="utf-8"))["commands"]:
        print(f"$ tether {' '.join(words)}", flush=True)
        command = python("-m", "tether", *words, *further)
        code = subprocess.run(command, check=False, env=environment()).returncode  # noqa: S603 (our plan)
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(run_plan(Path(sys.argv[1]), sys.argv[2:]))
