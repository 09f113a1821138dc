"""Which model families work: every family x method x roles.mode, two steps each, run like a user would.

    python benchmarks/families.py [--device cuda --dtype bfloat16] [--only llama gemma2] [--jobs 2] [--json FILE]

Tiny random models of many families are built by transformers without a download and saved with a tokenizer. Each cell
loads one by its path, trains it for two steps, and loads the saved model again. A cell ends as `fast`, `slow` (with the
notice that says why), `refused` (with the message that says why) or `error`: a raw exception, a number that is not
finite, a sampler and a trainer that disagree, or a saved model with other logits. The extras are further PPO runs: a
value head, critic warm-up, ptx, gradient checkpointing, 8-bit optimizer state, and 8-bit and 4-bit bases (CUDA only).

The JSON file is written after each cell. The last lines are the tables of docs/models.md. Exit code 1: some cell ended
in an error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import peft
import torch
import transformers
from family_models import FAMILIES, save_family

from tether.config.load import load_recipe
from tether.errors import TetherError
from tether.models.load import load_causal_lm
from tether.models.scalar_models import ScalarModel
from tether.train import run as run_module
from tether.train.build import sharing_of
from tether.types import Sequences

METHODS = ("sft", "reward", "dpo", "ppo", "grpo")
MODES = ("separate", "lora", "shared_backbone")
RL = {"rollout.prompts_per_step": 4, "rollout.max_new_tokens": 6, "rollout.samples_per_prompt": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "sft": {"sft.batch_size": 4, "data.train": "{folder}/demonstrations.jsonl"},
    "reward": {"reward.batch_size": 4, "data.train": "{folder}/preferences.jsonl"},
    "dpo": {"dpo.batch_size": 4, "data.train": "{folder}/preferences.jsonl"},
    "ppo": RL | {"ppo.epochs": 2, "ppo.minibatch_size": 4},
    "grpo": RL | {"grpo.epochs": 1, "grpo.minibatch_size": 8},
}
# name -> (method, roles.mode, options)
EXTRAS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "value head": ("ppo", "separate", {"roles.critic": "head"}),
    "critic warm-up": ("ppo", "separate", {"ppo.critic_warmup": 1}),
    "ptx": ("ppo", "separate", {"ptx.data": "{folder}/demonstrations.jsonl", "ptx.batch_size": 2}),
    "checkpointing": ("ppo", "lora", {"model.gradient_checkpointing": True}),
    "8-bit state": ("ppo", "separate", {"optimizer.name": "adamw_8bit"}),
    "8-bit base": ("ppo", "lora", {"model.quantize": "8bit"}),
    "4-bit base": ("ppo", "lora", {"model.quantize": "4bit"}),
}
FAMILY_CLASS = re.compile(r"\b\w+(Model|ForCausalLM)\b")
NEEDS_CUDA = ("8-bit base", "4-bit base")
SLOW = ("not the fast decoder", "Training runs the model's own modules")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.08}  # relative to the logits' norm: merging adapters rounds the weights
GAP = {"float32": 1e-4, "bfloat16": 0.1}  # mean difference in nats between the log-probs of sampler and trainer


@dataclass(frozen=True)
class Cell:
    """The result of one run."""

    family: str
    name: str
    result: str  # fast, slow, refused, error
    detail: str = ""
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()


def cells_of(options: argparse.Namespace) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """The runs of each family: name -> (method, roles.mode, options)."""
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    for method in options.methods:
        found |= {f"{method}/{mode}": (method, mode, {}) for mode in options.modes}
    if not options.no_extras:
        on_gpu = options.device.startswith("cuda")
        found |= {name: given for name, given in EXTRAS.items() if on_gpu or name not in NEEDS_CUDA}
    return found


def write_data(folder: Path) -> None:
    """A few demonstrations and preferences."""
    pairs = (
        ("Say hi.", "hi there", "no"),
        ("Count.", "1 2 3", "3"),
        ("A colour?", "blue", "blue blue"),
        ("Ok?", "ok", ""),
    )
    rows = [{"prompt": p, "completion": good} for p, good, _ in pairs]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    rows = [{"prompt": p, "chosen": good, "rejected": bad or "never"} for p, good, bad in pairs]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))


def run_cell(family: str, name: str, given: tuple[str, str, dict[str, Any]], place: Path, options: Any) -> Cell:
    """Train, save, and load again."""
    method, mode, more = given
    flags = OPTIONS[method] | more
    flags |= {
        "model.path": str(place / "model"),
        "model.device": options.device,
        "model.dtype": options.dtype,
        "roles.mode": mode,
        "roles.trainable_layers": 1,
        "roles.lora_rank": 4,
        "run.steps": 2,
        "run.directory": str(place / "runs"),
        "run.name": name.replace("/", "-").replace(" ", "-"),
    }
    words = [f"--{key}={str(value).format(folder=place)}" for key, value in flags.items()]
    notices: list[str] = []
    numbers: dict[str, float] = {}
    began = time.perf_counter()

    def done(result: str, detail: str = "") -> Cell:
        text = " ".join(detail.replace(str(place), "FOLDER").split())
        return Cell(family, name, result, text, round(time.perf_counter() - began, 2), tuple(dict.fromkeys(loud)))

    with quiet() as loud:
        try:
            training = train(method, words, notices, numbers)
            gap = max((value for key, value in numbers.items() if key.startswith("logprob_diff at")), default=0.0)
            wrong = sorted(key for key, value in numbers.items() if not math.isfinite(value))
            if wrong:
                return done("error", f"not finite: {', '.join(wrong)}")
            apart = reload_gap(*training, options)
        except TetherError as error:
            return done("refused", str(error))
        except Exception:
            return done("error", traceback.format_exc())
        if not apart <= TOLERANCE[options.dtype]:
            return done("error", f"the saved model gives other numbers when it is loaded: off by {apart:.2g}")
        if not gap <= GAP[options.dtype]:
            return done("error", f"sampler and trainer differ by {gap:.2g} nats on average")
        why = [notice for notice in notices if notice.startswith(SLOW)]
        return done("slow" if why else "fast", " ".join(why))


def train(method: str, words: list[str], notices: list[str], numbers: dict[str, float]) -> tuple[Any, Any, Any, Path]:
    """Run a recipe; returns `(recipe, policy, training, the saved model's folder)`."""
    recipe = load_recipe(method, None, words)
    made: list[Any] = []
    build = run_module.build_training

    def kept(recipe: Any, policy: Any, *more: Any, **named: Any) -> Any:
        made.extend((policy, build(recipe, policy, *more, **named)))
        return made[1]

    run_module.build_training = kept
    try:
        trained = run_module.train_recipe(
            recipe,
            stop=lambda: False,
            advance=lambda step, metrics: numbers.update({f"{k} at step {step}": v for k, v in metrics.items()}),
            notify=notices.append,
        )
    finally:
        run_module.build_training = build
    return recipe, made[0], made[1], trained.folder.model_path


@torch.no_grad()
def reload_gap(recipe: Any, policy: Any, training: Any, folder: Path, options: Any) -> float:
    """The difference between the saved and the trained model, relative to the norm of the output.

    Both compute in float32, so that the saved weights are compared and not the rounding of half precision.
    """
    ids = torch.arange(10, 34, device=policy.model.device)[None]
    if recipe.model.quantize != "none":
        return 0.0 if (folder / "adapter_config.json").is_file() else math.inf
    if isinstance(training.model, ScalarModel):
        whole = torch.ones_like(ids, dtype=torch.bool)
        probe = Sequences(tokens=ids, attention_mask=whole, response_mask=whole)
        if recipe.roles.mode == "lora":
            fresh = load_causal_lm(recipe.model.path, dtype=options.dtype, device=options.device, seed=0)
            again = sharing_of(recipe, fresh).load_scalar(folder, "reward")
        else:
            again = ScalarModel.load(folder, options.dtype, options.device)
        ours, theirs = (model.float()(probe).scores for model in (training.model, again))
    else:
        again = load_causal_lm(str(folder), dtype=options.dtype, device=options.device, seed=0).model
        ours, theirs = (
            torch.log_softmax(model.float()(input_ids=ids, use_cache=False).logits, dim=-1)
            for model in (training.model, again)
        )
    return float((ours - theirs).norm() / ours.norm().clamp_min(1e-6))


class _Loud(logging.Handler):
    """Collects what libraries log as warnings."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Collect what libraries would print on a user's terminal: warnings, log lines, anything on stderr."""
    loud: list[str] = []
    caught: list[warnings.WarningMessage] = []
    handler, logger = _Loud(loud), transformers.utils.logging.get_logger("transformers")
    before = list(logger.handlers)
    logger.handlers = [handler]
    written = io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as seen, contextlib.redirect_stderr(written):
            caught = seen
            warnings.simplefilter("default")
            yield loud
    finally:
        logger.handlers = before
        loud += [f"{type(each.message).__name__}: {each.message}" for each in caught]
        loud += [line for line in written.getvalue().splitlines() if line.strip()]


def run_family(family: str, options: argparse.Namespace, tell: Any) -> None:
    """Every cell of one family."""
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix=f"tether-{family}-"))
    try:
        write_data(place)
        with quiet():
            try:
                missing = save_family(family, place / "model")
            except Exception:
                missing = None
                tell(Cell(family, "made", "error", traceback.format_exc()))
                return
        if missing:
            tell(Cell(family, "made", "absent", missing))
            return
        for name, given in cells_of(options).items():
            tell(run_cell(family, name, given, place, options))
            shutil.rmtree(place / "runs", ignore_errors=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _worker(waiting: Any, results: Any, options: argparse.Namespace) -> None:
    while (family := waiting.get()) is not None:
        run_family(family, options, results.put)
    results.put(None)


def run_all(families: list[str], options: argparse.Namespace, tell: Any) -> None:
    """Run the families in `--jobs` processes."""
    if options.jobs == 1:
        for family in families:
            run_family(family, options, tell)
        return
    context = multiprocessing.get_context("spawn")
    waiting, results = context.Queue(), context.Queue()
    for family in [*families, *[None] * options.jobs]:
        waiting.put(family)
    workers = [context.Process(target=_worker, args=(waiting, results, options)) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    running = len(workers)
    while running:
        try:
            cell = results.get(timeout=5)
        except Exception:  # queue.Empty: check whether a worker was killed
            if not any(worker.is_alive() for worker in workers):
                raise SystemExit("a worker process ended before its families were done") from None
            continue
        if cell is None:
            running -= 1
        else:
            tell(cell)
    for worker in workers:
        worker.join()


def tables(cells: list[Cell]) -> str:
    """The cells as the tables of docs/models.md, with each reason for a refusal once."""
    reasons: dict[str, str] = {}

    def shown(cell: Cell | None) -> str:
        if cell is None or cell.result in ("error", "absent"):
            return "" if cell is None else cell.result
        if cell.result != "refused":
            return "yes"
        names = str(FAMILY_CLASS.sub("the model", cell.detail))
        return f"no [{reasons.setdefault(names, str(len(reasons) + 1))}]"

    by = {(cell.family, cell.name): cell for cell in cells}
    families = [name for name in FAMILIES if any(cell.family == name and cell.result != "absent" for cell in cells)]
    methods = [method for method in METHODS if any(cell.name.startswith(f"{method}/") for cell in cells)]
    lines = [f"| family | sampling | training | {' | '.join(methods)} |", "|---" * (len(methods) + 3) + "|"]
    for family in families:
        own = [cell for cell in cells if cell.family == family]
        row = [pace(own, slow) for slow in SLOW]
        for method in methods:
            said = [shown(by.get((family, f"{method}/{mode}"))) for mode in MODES]
            row.append(said[0] if len(set(said)) == 1 else " / ".join(said))
        lines.append(f"| {family} | {' | '.join(row)} |")
    extras = [name for name in EXTRAS if any(cell.name == name for cell in cells)]
    if extras:
        lines += ["", f"| family | {' | '.join(extras)} |", "|---" * (len(extras) + 1) + "|"]
        lines += [f"| {f} | {' | '.join(shown(by.get((f, name))) for name in extras)} |" for f in families]
    lines += ["", *(f"{mark}. {reason}" for reason, mark in reasons.items())]
    lines += [f"- {cell.family}: {cell.detail}" for cell in cells if cell.result == "absent"]
    return "\n".join(lines)


def pace(cells: list[Cell], slow: str) -> str:
    """Whether a family's sampling, or its training, is fast."""
    ran = [cell for cell in cells if cell.result in ("fast", "slow")]
    if slow == SLOW[0]:
        ran = [cell for cell in ran if cell.name.startswith(("ppo", "grpo"))]
    if not ran:
        return "no"
    paces = {"slow" if slow in cell.detail else "fast" for cell in ran}
    return " and ".join(sorted(paces))


def write_json(path: str | None, cells: list[Cell], options: argparse.Namespace) -> None:
    """Write all cells so far."""
    if path is None:
        return
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    record = versions | {"device": options.device, "dtype": options.dtype, "cells": [asdict(cell) for cell in cells]}
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=list(TOLERANCE))
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--no-extras", action="store_true", help="skip the further PPO runs")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", metavar="FILE", help="where every cell is written")
    parser.add_argument("--show", metavar="FILE", help="print the tables of a JSON file that an earlier run wrote")
    options = parser.parse_args()
    if options.show:
        print(tables([Cell(**cell) for cell in json.loads(Path(options.show).read_text())["cells"]]))
        return 0
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this machine offers no CUDA device")
    cells: list[Cell] = []
    total, began = len(options.only) * len(cells_of(options)), time.perf_counter()

    def tell(cell: Cell) -> None:
        cells.append(cell)
        write_json(options.json, cells, options)
        head = f"{len(cells):4}/{total} {time.perf_counter() - began:6.1f} s  {cell.family:12} {cell.name:16}"
        detail = cell.detail if cell.result != "slow" else ""
        shown = detail[-1500:] if cell.result == "error" else detail[:200]
        print(f"{head} {cell.result:8} {cell.seconds:5.1f} s  {shown}", flush=True)

    run_all(list(options.only), options, tell)
    print("\n" + tables(cells) + "\n")
    results = ("fast", "slow", "refused", "absent", "error")
    counts = {result: sum(cell.result == result for cell in cells) for result in results}
    print(", ".join(f"{count} {result}" for result, count in counts.items()), f"in {time.perf_counter() - began:.0f} s")
    return 1 if counts["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
