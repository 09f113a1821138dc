"""Peak memory of each rank by `distributed.shard`, against what the plan says, and what exchanging costs.

    OMP_NUM_THREADS=1 python benchmarks/ranks_memory.py [--ranks 1 2 4] [--shard full none hybrid] [--reduction exact]
        [--mode separate] [--json]

PPO with four roles in float32 on CPUs over gloo; a model of random weights (30M). A rank's peak is the largest resident
memory in a phase less what the process had before it loaded the model. `build` is before the first step.
With `hybrid`, two ranks share a copy. Seconds are those of the fastest update after the first step, and `exchanging` is
the part of it in which rank 0 sent, received or waited for another rank: more where ranks have to share a core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "soak"), str(TESTS / "distributed")]

import ranks_runner  # noqa: E402  # pyright: ignore[reportMissingImports]
from tiny_recipes import tiny  # noqa: E402  # pyright: ignore[reportMissingImports]

import tether.distributed.fsdp  # noqa: E402, F401
from tether.config.recipes import Recipe  # noqa: E402
from tether.distributed import follow  # noqa: E402
from tether.hub.tiny_model import tiny_tokenizer  # noqa: E402
from tether.plan.memory import memory_of  # noqa: E402
from tether.plan.table import _process_peak, _reset_process_peak  # noqa: E402  # pyright: ignore[reportPrivateUsage]
from tether.plan.workload import Lengths, Shape, work_of  # noqa: E402
from tether.train import rl, run  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
PROMPT = 16
RUN = (
    *("--rollout.prompts_per_step", "4", "--rollout.samples_per_prompt", "1", "--rollout.max_new_tokens", "8"),
    *("--ppo.minibatch_size", "4", "--ppo.epochs", "1", "--optimizer.micro_batch_tokens", "64"),
    *("--model.dtype", "float32", "--evaluation.every", "0", "--checkpoint.every", "0", "--run.save", "false"),
)
MIB = 2**20
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}  # freed memory goes back at once


def save_model(folder: Path, layers: int) -> Path:
    """A model of random weights with the tiny model's tokenizer."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape: dict[str, Any] = SHAPE | {"num_hidden_layers": layers}
    LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **ends, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Watch:
    """Notes the process's peak in each phase, and how long it waits for or sends to other ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.base, self.exchanging = folder, 0, 0.0
        self.rows: list[dict[str, float]] = []
        self.row: dict[str, float] = {}

    def begin(self) -> None:
        """Before a model is loaded."""
        self.base = _reset_process_peak()

    def phase_ends(self, name: str | None) -> None:
        """Note the phase that ends; the first is what was done before the first step."""
        self.row[f"peak/{name or 'build'}"] = _process_peak() - self.base
        self.row[f"exchanging/{name or 'build'}"] = self.exchanging
        _reset_process_peak()
        self.exchanging = 0.0

    def step_ends(self, metrics: dict[str, float]) -> None:
        """Write what was noted."""
        self.rows.append(self.row | {name: value for name, value in metrics.items() if name.startswith("seconds/")})
        self.row = {}
        (self.folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(self.rows))


def watch(folder: Path) -> None:
    """From now on, in this process."""
    seen = Watch(folder)
    begin, metrics = rl.Timers.begin, rl.Timers.metrics

    def begun(self: rl.Timers, name: str) -> None:
        seen.phase_ends(self._name)  # pyright: ignore[reportPrivateUsage]
        begin(self, name)

    def measured(self: rl.Timers) -> dict[str, float]:
        seen.phase_ends(self._name)  # pyright: ignore[reportPrivateUsage]
        found = metrics(self)
        seen.step_ends(found)
        return found

    def loading(load: Any) -> Any:
        return lambda *given, **named: (seen.begin(), load(*given, **named))[1]

    def timed(exchange: Any) -> Any:
        def exchanged(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return exchange(*given, **named)
            finally:
                seen.exchanging += time.perf_counter() - began

        return exchanged

    rl.Timers.begin, rl.Timers.metrics = begun, measured
    modules: list[Any] = [run, follow]
    for module in modules:
        module.load_policy = loading(module.load_policy)
    for name in ("all_gather_single", "all_gather", "all_to_all_single", "all_reduce", "broadcast"):
        setattr(dist, name, timed(getattr(dist, name)))


def measure(recipe: Recipe, count: int, folder: Path) -> list[list[dict[str, float]]]:
    """For each rank and step, peaks and seconds."""
    folder.mkdir()

    def train() -> int:
        ranks_runner.attempt(recipe)
        return 0

    process = os.fork()
    if not process:  # so that nothing of a run is left in this process
        ranks_runner.attempt(tiny("ppo", folder / "first", "--run.steps", "1"))  # a process's own, such as modules
        watch(folder)
        ranks_runner.LIMIT = 3600.0
        try:
            codes = ranks_runner.on_ranks(count, train) if count > 1 else [train()]
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(max(map(abs, codes)))
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def planned(recipe: Recipe, model: Path, count: int) -> dict[str, int]:
    """The plan's peak of each phase."""
    shape = Shape.of(LlamaForCausalLM.from_pretrained(model))
    work = work_of(recipe, Lengths(PROMPT, PROMPT, "the benchmark"))
    several = count > 1 and recipe.distributed.shard != "none"
    shards = recipe.distributed.sharing(count, count) if several else None
    return memory_of(recipe, shape, work, "cpu", shards=shards, copies=count // (shards or 1)).phases


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    kinds = ("none", "full", "hybrid")
    parser.add_argument("--shard", choices=kinds, nargs="+", default=["full"], help="for several ranks")
    parser.add_argument("--reduction", choices=("exact", "fast"), default="exact")
    parser.add_argument("--mode", choices=("separate", "lora"), default="separate")
    parser.add_argument("--layers", type=int, default=8, help="of the model; 8 are 30M parameters")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the last line")
    options = parser.parse_args()
    if any(name not in os.environ for name in MALLOC):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder / "model", options.layers)
        cases = [("none" if count == 1 else shard, count) for shard in options.shard for count in options.ranks]
        for shard, count in dict.fromkeys(cases):
            flags = ("--distributed.shard", shard, "--roles.mode", options.mode, "--run.steps", str(options.steps))
            flags += ("--distributed.reduction", options.reduction)
            flags += ("--distributed.shard_ranks", "2") if shard == "hybrid" else ()
            own = tiny("ppo", folder / f"runs-{shard}-{count}", "--model.path", str(model), *RUN, *flags)
            found = measure(own, count, folder / f"{shard}-{count}")
            rows.append({"reduction": options.reduction} | row_of(found, planned(own, model, count), shard, count))
            print_row(rows[-1])
    if options.json:
        print(json.dumps(rows))
    return 0


def row_of(found: list[list[dict[str, float]]], plan: dict[str, int], shard: str, count: int) -> dict[str, Any]:
    """Peaks of every rank, and the shortest update with what it spent on exchanging."""
    phases = ("build", *plan)
    peaks = {phase: [max(row.get(f"peak/{phase}", 0.0) for row in rank) for rank in found] for phase in phases}
    update = min(found[0][1:], key=lambda row: row["seconds/update"])
    return {
        "shard": shard,
        "ranks": count,
        "peaks": peaks,
        "plan": plan,
        "update": update["seconds/update"],
        "exchanging": update["exchanging/update"] / update["seconds/update"],
    }


def print_row(row: dict[str, Any]) -> None:
    """Peaks in MiB: of each rank, and the plan's."""
    kind = f"shard {row['shard']}, {row['reduction']}, {row['ranks']} ranks"
    print(f"{kind}: update {row['update']:.1f} s, exchanging {row['exchanging']:.0%}")
    for phase, peaks in row["peaks"].items():
        plan = row["plan"].get(phase)
        said = "" if plan is None else f"   plan {plan / MIB:,.0f}, apart {max(peaks) / plan - 1:+.1%}"
        print(f"  {phase:<12}", *(f"{peak / MIB:>8,.0f}" for peak in peaks), said, flush=True)


if __name__ == "__main__":
    sys.exit(main())
