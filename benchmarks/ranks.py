"""Whether 1 to 4 ranks give the same bits, for every method: the long version of tests/distributed.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py [--steps 20] [--ranks 4] [--only ppo ...] [--shard full] [--json]

Each case trains the tiny model in one process, then with 2, 3, ... ranks on this machine (gloo), a row at a time, so
that a step has several micro-batches. Two runs are equal if their models, last checkpoints, metrics (but for seconds)
and every stored token are, to the bit. The last column has run on 2, 3 and 1 ranks in turn, stopped in between.
With `--shard full` several ranks share the weights, with `hybrid` in pairs; cases that need whole weights are left out.
Seconds are of whole runs. With fewer cores than ranks there is no speed-up to see: this measures exactness.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "soak"), str(TESTS / "distributed")]

from ranks_runner import trained  # noqa: E402  # pyright: ignore[reportMissingImports]
from same_runs import differences  # noqa: E402  # pyright: ignore[reportMissingImports]
from tiny_recipes import TOP, tiny  # noqa: E402  # pyright: ignore[reportMissingImports]

import tether.distributed.fsdp  # noqa: E402, F401  (once, before ranks are forked)

LORA = ("--roles.mode", "lora", "--roles.lora_rank", "2")
CHUNKS = ("--distributed.rollout_chunk", "1")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("ppo", ()),
    "ppo, chunks": ("ppo", CHUNKS),
    "ppo, value head": ("ppo", ("--roles.critic", "head")),
    "ppo, lora": ("ppo", LORA),
    "ppo, shared_backbone": ("ppo", TOP),
    "grpo": ("grpo", ()),
    "grpo, chunks": ("grpo", CHUNKS),
    "rloo": ("rloo", ()),
    "reinforce": ("reinforce", ()),
    "trpo": ("trpo", ()),
    "sft": ("sft", ("--sft.batch_size", "5")),
    "sft, lora": ("sft", ("--sft.batch_size", "5", *LORA)),
    "sft, shared_backbone": ("sft", ("--sft.batch_size", "5", *TOP)),
    "reward": ("reward", ("--reward.batch_size", "5")),
    "reward, shared_backbone": ("reward", ("--reward.batch_size", "5", *TOP)),
    "dpo": ("dpo", ("--dpo.batch_size", "5")),
    "dpo, shared_backbone": ("dpo", ("--dpo.batch_size", "5", *TOP)),
}


def measure(case: str, steps: int, most: int, folder: Path, shard: str) -> dict[str, object]:
    """One row of the table."""
    method, flags = CASES[case]
    flags = (*flags, "--optimizer.micro_batch_tokens", "16", "--run.steps", str(steps))
    shared = ("--distributed.shard", shard, *(("--distributed.shard_ranks", "2") if shard == "hybrid" else ()))
    began = time.perf_counter()
    one = trained(tiny(method, folder / "1", *flags), 1)
    row: dict[str, object] = {"case": case, "seconds 1": time.perf_counter() - began}
    for count in range(2, most + 1):
        began = time.perf_counter()
        several = trained(tiny(method, folder / f"{count}", *flags, *shared), count)
        row[f"seconds {count}"] = time.perf_counter() - began
        row[f"differs {count}"] = differences(one, several)
    moved = tiny(method, folder / "moved", *flags, *shared)
    for count in (2, 3):
        trained(moved, count, steps=max(1, steps // 3))
    row["differs moved"] = differences(one, trained(moved, 1))
    return row


def main() -> int:
    """Print the table; 1 where any bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--shard", choices=("none", "full", "hybrid"), default="none")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked, and a pool of threads does not survive that
    counts = range(2, options.ranks + 1)
    print(f"{'case':<24}{'1 rank':>9}", *(f"{count} ranks".rjust(16) for count in counts), "2, 3, 1 in turn".rjust(16))
    rows: list[dict[str, object]] = []
    needs_whole = ("shared_backbone", "trpo") if options.shard != "none" else ()
    for case in options.only:
        if any(word in case for word in needs_whole):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = measure(case, options.steps, options.ranks, Path(folder), options.shard)
        rows.append(row)
        words = ["equal" if not row[f"differs {count}"] else "DIFFERS" for count in (*counts, "moved")]
        seconds = [f"{row[f'seconds {count}']:.1f} s" for count in counts] + [""]
        cells = [f"{word} {taken}".rjust(16) for word, taken in zip(words, seconds, strict=True)]
        print(f"{case:<24}{row['seconds 1']:>7.1f} s", *cells, flush=True)
    if options.json:
        print(json.dumps(rows))
    return int(any(row[key] for row in rows for key in row if key.startswith("differs")))


if __name__ == "__main__":
    sys.exit(main())
