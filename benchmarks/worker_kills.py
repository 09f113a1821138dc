"""Kill rollout workers at random while a run samples on them, and compare the run with an undisturbed one.

    OMP_NUM_THREADS=1 python benchmarks/worker_kills.py --kills 100 --workers 3

Workers are forked processes that listen on loopback. A killed one is started again after a moment, with no weights.
Prints one line of JSON; exit code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "soak"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rollout"))

import torch
from in_process import attempt, whole  # pyright: ignore[reportMissingImports]
from same_runs import differences  # pyright: ignore[reportMissingImports]
from tiny_recipes import tiny  # pyright: ignore[reportMissingImports]
from worker_processes import TOKEN, workers  # pyright: ignore[reportMissingImports]

from tether.store.folder import run_path


def main() -> int:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=40, help="of each run; runs follow each other until all were killed"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TETHER_WORKER_TOKEN"] = TOKEN
    chance, folder = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="worker-kills-"))
    flags = ("--distributed.rollout_chunk", "1", "--run.steps", str(options.steps))
    started = time.perf_counter()
    undisturbed = whole(tiny("ppo", folder / "undisturbed", *flags))
    alone = time.perf_counter() - started
    killed, runs, wrong, seconds = 0, 0, [], 0.0
    with workers(options.workers) as found:
        servers = ("--rollout.servers", f"[{', '.join(each.url for each in found)}]")
        while killed < options.kills:
            recipe, over, count = tiny("ppo", folder / f"{runs}", *flags, *servers), threading.Event(), [0]

            def kill(
                over: threading.Event = over, count: list[int] = count, left: int = options.kills - killed
            ) -> None:
                while not over.wait(chance.uniform(0.05, 0.6)) and count[0] < left:
                    one = chance.choice(found)
                    one.kill()
                    count[0] += 1
                    over.wait(chance.uniform(0.0, 0.3))
                    one.start()

            thread = threading.Thread(target=kill)
            thread.start()
            began = time.perf_counter()
            try:
                attempt(recipe)
            finally:
                over.set()
                thread.join()
            seconds += time.perf_counter() - began
            killed, runs = killed + count[0], runs + 1
            wrong += differences(undisturbed, run_path(recipe))
    record = {"kills": killed, "workers": options.workers, "runs": runs, "steps": options.steps, "differences": wrong}
    print(json.dumps(record | {"seconds": round(seconds, 1), "undisturbed_seconds": round(alone, 1)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
