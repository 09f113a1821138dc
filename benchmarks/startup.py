"""Start-up time of the command line: the best of five runs of each command, in seconds.

`python benchmarks/startup.py [--json]`; with `--json` the last line is a JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

COMMANDS = {
    "python alone": ["-c", "pass"],
    "tether --version": ["-m", "tether", "--version"],
    "tether --help": ["-m", "tether", "--help"],
    "tether train --help": ["-m", "tether", "train", "--help"],
    "tether train ppo --help": ["-m", "tether", "train", "ppo", "--help"],
}
RUNS = 5


def best_seconds(words: list[str]) -> float:
    """The fastest of RUNS runs, which is least affected by other load."""
    times: list[float] = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Measure every command."""
    results = {name: round(best_seconds(words), 4) for name, words in COMMANDS.items()}
    for name, seconds in results.items():
        print(f"{name:<24} {seconds:6.3f} s")
    if "--json" in sys.argv[1:]:
        print(json.dumps({"benchmark": "startup", "best_of": RUNS, "seconds": results}))


if __name__ == "__main__":
    main()
