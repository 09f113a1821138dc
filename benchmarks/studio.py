"""How quick Studio's server is: votes under load, a long run's curves, a long answer, and step to stream.

    python benchmarks/studio.py [--url postgresql://...] [--raters 20] [--seconds 10] [--json]

A server is started in a process of its own over a workspace made for this. Times are what a client on the same machine
waits, from the request to the whole answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sqlalchemy import insert

from tether.runs.recorded import TOKEN_COLUMNS, StoredRollout
from tether.runs.store.open import Workspace, open_engine, workspace_at
from tether.runs.store.schema import metrics, runs, steps
from tether.runs.writer import RunRecorder, RunStart

TOKEN = "benchmark-token-of-studio"
LONG_STEPS, LONG_NAMES = 20_000, 50  # a million points
LONG_ANSWER = 4096


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of the database; by default SQLite in a temporary folder")
    parser.add_argument("--raters", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tether-studio-") as folder:
        workspace = workspace_at(Path(folder) / "runs", options.url)
        record_long_answer(workspace)
        record_million(workspace)
        with serving(workspace, options.url) as client:
            found = {
                "database": "sqlite" if options.url is None else "postgresql",
                **votes_under_load(client, options.raters, options.seconds),
                **long_run(client),
                **long_answer(client),
                **step_to_stream(client, workspace),
            }
    print(json.dumps(found) if options.json else "\n".join(f"{name:36} {value}" for name, value in found.items()))
    return 0


class serving:  # noqa: N801 (reads as a verb)
    """A server over a workspace, and a client of its owner."""

    def __init__(self, workspace: Workspace, url: str | None) -> None:
        environment = {**os.environ, **({"TETHER_STORE": url} if url else {})}
        words = ["studio", "--workspace", str(workspace.directory), "--port", "0", "--token", TOKEN, "--json"]
        command = [sys.executable, "-m", "tether", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def __enter__(self) -> httpx.Client:
        assert self.process.stdout is not None
        address = json.loads(self.process.stdout.readline())["address"]
        return httpx.Client(base_url=address, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60.0)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


# -- votes --------------------------------------------------------------------------------------------------------


def votes_under_load(client: httpx.Client, raters: int, seconds: float) -> dict[str, Any]:
    """Raters who each vote, look at the next item, and pause for a second: quicker than people."""
    queue = client.post("/api/label/queues", json={"name": "benchmark"}).json()["id"]
    records = [{"prompt": f"q{n}", "chosen": "a" * 200, "rejected": "b" * 200} for n in range(2000)]
    client.post(f"/api/label/queues/{queue}/fill", json={"from": "file", "records": records}).raise_for_status()
    tokens = [client.post("/api/raters", json={"name": f"r{n}"}).json()["token"] for n in range(raters)]
    taken: list[float] = []
    ends = time.monotonic() + seconds

    def rate(token: str) -> None:
        mine = httpx.Client(base_url=client.base_url, headers={"authorization": f"Bearer {token}"}, timeout=60.0)
        while time.monotonic() < ends:
            item = mine.get(f"/api/label/queues/{queue}/next").json()["item"]
            body = {"client_uid": uuid.uuid4().hex, "item_id": item["id"], "order": item["order"], "choice": "left"}
            begun = time.perf_counter()
            mine.post("/api/label/votes", json=body).raise_for_status()
            taken.append(time.perf_counter() - begun)
            time.sleep(1.0)

    threads = [threading.Thread(target=rate, args=(token,)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"raters": raters, "votes": len(taken)} | percentiles("vote_ms", taken)


def percentiles(name: str, taken: list[float]) -> dict[str, float]:
    """The median and the 95th percentile, in milliseconds."""
    return {f"{name}_p{at}": round(1000 * float(np.percentile(taken, at)), 1) for at in (50, 95)}


# -- reading ------------------------------------------------------------------------------------------------------


def long_run(client: httpx.Client) -> dict[str, Any]:
    """The page of a run with a million points: its head, then twelve curves; the first time, and again."""
    run = run_called(client, "long")
    names = ",".join(f"metric{n:02}" for n in range(12))

    def page() -> float:
        begun = time.perf_counter()
        client.get(f"/api/runs/{run}").raise_for_status()
        client.get(f"/api/runs/{run}/metrics?names={names}&points=2000").raise_for_status()
        return time.perf_counter() - begun

    return {
        "points": LONG_STEPS * LONG_NAMES,
        "million_first_ms": round(1000 * page()),
        "million_again_ms": round(1000 * page()),
    }


def long_answer(client: httpx.Client) -> dict[str, Any]:
    """An answer of 4,096 tokens with every column."""
    run = run_called(client, "answer")
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        client.get(f"/api/runs/{run}/rollouts/0/0").raise_for_status()
        taken.append(time.perf_counter() - begun)
    return {"answer_tokens": LONG_ANSWER} | percentiles("answer_ms", taken)


def step_to_stream(client: httpx.Client, workspace: Workspace, count: int = 20) -> dict[str, Any]:
    """From the moment at which training hands a step over to its event in a client."""
    recorder = RunRecorder(workspace, workspace.folder("live"), RunStart("ppo", count, {"method": "ppo"}))
    recorder.flush()
    given: dict[int, float] = {}
    taken: list[float] = []

    def record() -> None:
        for step in range(count):
            time.sleep(0.3)
            given[step] = time.perf_counter()
            recorder.record(step, {"score": 0.1})

    writer = threading.Thread(target=record)
    with client.stream("GET", f"/api/stream?run={run_called(client, 'live')}") as reply:
        writer.start()
        kind = ""
        for line in reply.iter_lines():
            kind = line.partition(": ")[2] if line.startswith("event: ") else kind
            if line.startswith("data: ") and kind == "step":
                taken.append(time.perf_counter() - given[json.loads(line[6:])["step"]])
                if len(taken) == count:
                    break
    writer.join()
    recorder.close("done")
    return percentiles("step_to_stream_ms", taken)


def run_called(client: httpx.Client, name: str) -> int:
    """The id of a run."""
    return next(run["id"] for run in client.get("/api/runs").json()["runs"] if run["name"] == name)


# -- what is read -------------------------------------------------------------------------------------------------


def record_long_answer(workspace: Workspace) -> None:
    """A run with one answer of 4,096 tokens."""
    numbers = np.random.default_rng(0)
    columns = {
        name: numbers.normal(size=LONG_ANSWER).astype(kind) if kind == "float32" else np.ones(LONG_ANSWER, dtype=kind)
        for name, kind in TOKEN_COLUMNS.items()
    }
    pieces = [f" word{n % 977}" for n in range(LONG_ANSWER)]
    texts = {"prompt_id": "p", "prompt_text": "question", "completion": "".join(pieces), "finish": "length"}
    places = {"step": 0, "row": 0, "group_id": 0, "sample_id": 0, "score": 1.0, "temperature": 1.0}
    rollout = StoredRollout(**places, **texts, columns=columns, pieces=pieces)  # pyright: ignore[reportArgumentType]
    recorder = RunRecorder(workspace, workspace.folder("answer"), RunStart("ppo", 1, {"method": "ppo"}))
    recorder.record(0, {"score": 1.0}, [rollout])
    recorder.close("done")


def record_million(workspace: Workspace) -> None:
    """A run with a million metric points, written straight into the tables."""
    engine = open_engine(workspace)
    with engine.begin() as connection:
        row = {"workspace": workspace.key, "name": "long", "uid": "long", "method": "ppo", "state": "done"}
        row |= {"created": 0.0, "updated": 0.0, "steps_target": LONG_STEPS, "steps_done": LONG_STEPS}
        made = connection.execute(insert(runs).values(**row, config={}, environment={})).inserted_primary_key
        assert made is not None
        run = made[0]
        for start in range(0, LONG_STEPS, 500):
            at = range(start, start + 500)
            connection.execute(insert(steps), [{"run_id": run, "step": step, "recorded": float(step)} for step in at])
            rows = [
                {"run_id": run, "step": step, "name": f"metric{n:02}", "value": float(step % 97) + n}
                for step in at
                for n in range(LONG_NAMES)
            ]
            connection.execute(insert(metrics), rows)
    engine.dispose()


if __name__ == "__main__":
    sys.exit(main())
