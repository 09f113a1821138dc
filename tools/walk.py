"""The files that one PPO step passes through, in order: `python tools/walk.py [--json]`.

A tiny model is trained for two steps; the second is traced, from the loop's first line to its last. What runs in other
threads (the recorder) and what is decided once before the first step (the recipe, loading) does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "tether"


def walk() -> list[str]:
    """Paths below src/tether, in the order in which their functions are first called."""
    from tether.config.load import load_recipe
    from tether.train import rl
    from tether.train.run import run_recipe

    seen: dict[str, None] = {}
    taken = 0
    iteration: Any = rl.rl_step

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            seen.setdefault(str(Path(frame.f_code.co_filename).relative_to(SOURCE)))

    def traced(*args: Any, **settings: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken != 2:
            return iteration(*args, **settings)
        sys.setprofile(look)
        try:
            return iteration(*args, **settings)
        finally:
            sys.setprofile(None)

    rl.rl_step = traced
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--run.directory", folder, "--run.steps", "2", "--model.device", "cpu"]
        recipe = load_recipe("ppo", str(SOURCE.parents[1] / "recipes" / "tiny-ppo.yaml"), flags)
        run_recipe(recipe, json_output=True)
    return list(seen)


def main() -> int:
    """Print the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr  # the run prints its own lines
    try:
        files = walk()
    finally:
        sys.stdout = out
    if options.json:
        print(json.dumps(files))
        return 0
    for number, file in enumerate(files, 1):
        print(f"{number:3d}  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
