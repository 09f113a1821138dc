"""Latency of Studio: votes of twenty raters at once on each database, then its heaviest pages in Chromium.

    python benchmarks/studio.py [--raters 20] [--seconds 20] [--repeats 10] [--no-pages] [--url URL] [--json]

The server, the raters and the browser are separate processes on one machine and share its cores. PostgreSQL is a
temporary server, if it is installed, or the one that `--url` names. Both databases wait for the disk on every commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from studio_postgres import throwaway_postgres
from studio_server import TOKEN, serving

ITEMS = 2000


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a PostgreSQL database; by default one is made")
    parser.add_argument("--raters", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="of voting, on each database")
    parser.add_argument("--repeats", type=int, default=10, help="of opening each page")
    parser.add_argument("--no-pages", action="store_true", help="votes only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line) if options.json else as_text(line), flush=True)

    say(votes_under_load("sqlite", None, options.raters, options.seconds))
    with nullcontext(options.url) if options.url else throwaway_postgres() as url:
        if url is None:
            print("PostgreSQL is not measured: install it, or name one with --url", file=sys.stderr)
        else:
            say(votes_under_load("postgresql", url, options.raters, options.seconds))
    if not options.no_pages:
        from studio_pages import measure_pages

        for what, seconds, note in measure_pages(options.repeats):
            say(measured(what, seconds, note))
    return 0


def as_text(line: dict[str, Any]) -> str:
    """One measurement as text."""
    return f"{line['what']:<44} median {line['median_ms']:6.0f} ms   p95 {line['p95_ms']:6.0f} ms   {line['note']}"


def measured(what: str, seconds: list[float], note: str = "") -> dict[str, Any]:
    """The median and the 95th percentile of the times."""
    at = {f"{name}_ms": round(1000 * float(np.percentile(seconds, q)), 1) for name, q in (("median", 50), ("p95", 95))}
    return {"what": what, **at, "times": len(seconds), "note": note}


def votes_under_load(database: str, url: str | None, raters: int, seconds: float) -> dict[str, Any]:
    """Seconds from the vote to its acknowledgment."""
    with tempfile.TemporaryDirectory(prefix="tether-studio-") as folder, serving(Path(folder), url) as address:
        client = httpx.Client(base_url=address, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60.0)
        queue = client.post("/api/label/queues", json={"name": "benchmark"}).json()["id"]
        records = [{"prompt": f"q{n}", "chosen": "a" * 200, "rejected": "b" * 200} for n in range(ITEMS)]
        client.post(f"/api/label/queues/{queue}/fill", json={"from": "file", "records": records}).raise_for_status()
        tokens = [client.post("/api/raters", json={"name": f"r{n}"}).json()["token"] for n in range(raters)]
        command = [
            sys.executable,
            str(Path(__file__).with_name("studio_raters.py")),
            str(client.base_url),
            str(seconds),
        ]
        given = json.dumps({"queue": queue, "tokens": tokens})
        told = subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout
        kept = client.get(f"/api/label/queues/{queue}/agreement").json()
    taken = json.loads(told)
    assert sum(rater["votes"] for rater in kept["raters"]) == len(taken["vote"]), "every acknowledged vote is there"
    others = {name: measured(name, taken[name])["p95_ms"] for name in ("next", "me")}
    note = f"{len(taken['vote'])} votes; p95 of the next item {others['next']:.0f} ms, of /api/me {others['me']:.0f} ms"
    return measured(f"vote, {raters} raters at once, {database}", taken["vote"], note)


if __name__ == "__main__":
    sys.exit(main())
