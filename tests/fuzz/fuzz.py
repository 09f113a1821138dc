"""Random recipes, each run for two steps: every one ends in success or in one clear sentence.

    python tests/fuzz/fuzz.py [--count 300] [--seed 0] [--jobs 2] [--resume 0.2] [--only NUMBER ...]

A recipe is drawn from the schema by its number, so the same numbers are the same recipes. Findings are raw exceptions,
errors without an exit code of their own, sentences that are none, numbers that are not finite, runs that hang, many
warnings, and stopped runs whose weights after resuming are not those of the undisturbed run. Exit code 1: some finding.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from draw import HERE, Case, draw_case

from tether.config.load import load_recipe
from tether.errors import TetherError
from tether.train.run import Trained, train_recipe

MAX_SECONDS = 300  # seconds of one case, which may start workers three times
MAX_WARNINGS = 3
MAX_SENTENCE = 600
# Undefined on some batches: a correlation or deviation of one value.
MAY_BE_NAN = ("correlation", "explained_variance", "_std")


@dataclass(frozen=True)
class Outcome:
    """How a case ended; `finding` says what is wrong with that."""

    number: int
    method: str
    result: str  # success, refused
    detail: str = ""
    finding: str = ""
    seconds: float = 0.0


class HungError(BaseException):
    """A run took too long."""


def run_case(number: int, folder: Path, resume: bool) -> Outcome:
    """Draw, run, judge."""
    began = time.perf_counter()
    case = draw_case(number, places_for("preferences", folder))
    places = places_for("demonstrations" if case.method == "sft" else "preferences", folder)
    result, detail, finding = "success", "", ""
    try:
        with limited(), loud() as heard:
            numbers: dict[str, float] = {}
            trained = run_once(case, places, folder / "a", numbers)
            finding = not_finite(numbers)
            if resume and not finding:
                finding = resumed_differently(case, places, folder, trained)
        if len(heard) > MAX_WARNINGS:
            finding = finding or f"{len(heard)} warnings, such as: {heard[0]}"
    except TetherError as error:
        result, detail = "refused", str(error)
        if error.exit_code == 1:
            finding = "an error without an exit code of its own"
        elif not detail or len(detail) > MAX_SENTENCE or "Traceback" in detail:
            finding = f"this is not a sentence: {detail[:MAX_SENTENCE]}"
    except HungError:
        finding = f"did not end within {MAX_SECONDS} seconds"
    except Exception:
        finding = traceback.format_exc()
    finally:
        for name in ("a", "b", "states", "weights"):
            shutil.rmtree(folder / name, ignore_errors=True)
    detail = detail.replace(str(folder), "FOLDER")
    return Outcome(number, case.method, result, detail, finding, round(time.perf_counter() - began, 2))


def run_once(
    case: Case, places: dict[str, str], directory: Path, numbers: dict[str, float], stop_after: int | None = None
) -> Trained:
    """Train; with `stop_after` the run is asked to stop after so many steps."""
    taken = 0

    def advance(step: int, metrics: dict[str, float]) -> None:
        nonlocal taken
        taken += 1
        numbers.update({f"{name} at step {step}": value for name, value in metrics.items()})

    recipe = load_recipe(case.method, None, [*case.words(places), f"--run.directory={directory}", "--run.name=run"])
    return train_recipe(
        recipe,
        stop=lambda: stop_after is not None and taken >= stop_after,
        advance=advance,
        notify=lambda text: None,
        resume=(directory / "run").exists(),
    )


def resumed_differently(case: Case, places: dict[str, str], folder: Path, trained: Trained) -> str:
    """What is wrong with the weights of a run that was stopped after one step and gone on with; empty: nothing."""
    shutil.rmtree(folder / "states", ignore_errors=True)
    run_once(case, places, folder / "b", {}, stop_after=1)
    again = run_once(case, places, folder / "b", {})
    ours, theirs = (
        {file.name: file.read_bytes() for file in each.folder.model_path.glob("*.safetensors")}
        for each in (trained, again)
    )
    if not ours:
        return "no weights were saved"
    return "" if ours == theirs else "stopped after a step and resumed, it ends with other weights"


def not_finite(numbers: dict[str, float]) -> str:
    """The metrics that are NaN or infinite, where they must not be."""
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    wrong = [name for name in wrong if not any(word in name for word in MAY_BE_NAN)]
    return f"not finite: {', '.join(wrong[:6])}" if wrong else ""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise HungError in a run that takes too long."""

    def late(*_: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def loud() -> Iterator[list[str]]:
    """Each different warning, and each line on stderr."""
    heard: list[str] = []
    written = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(written):
        warnings.simplefilter("default")
        yield heard
    lines = [f"{type(each.message).__name__}: {each.message}" for each in caught]
    heard += dict.fromkeys([*lines, *(line for line in written.getvalue().splitlines() if line.strip())])


def places_for(data: str, folder: Path) -> dict[str, str]:
    """What stands in the braces of a case's flags."""
    return {
        "data": str(HERE / f"{data}.jsonl"),
        "demonstrations": str(HERE / "demonstrations.jsonl"),
        "folder": str(folder),
        "reward": str(folder / "made" / "reward" / "model"),
    }


def make_reward_model(folder: Path) -> None:
    """A reward model for the cases that name one."""
    words = ["--model.device=cpu", "--run.steps=1", f"--run.directory={folder / 'made'}", "--run.name=reward"]
    recipe = load_recipe("reward", None, [*words, f"--data.train={HERE / 'preferences.jsonl'}"])
    train_recipe(recipe, stop=lambda: False, advance=lambda *_: None, notify=lambda _: None)


_folder: Path | None = None


def _begin(folder: str) -> None:
    """A worker's own folder."""
    global _folder
    torch.set_num_threads(1)
    _folder = Path(tempfile.mkdtemp(dir=folder))
    make_reward_model(_folder)


def _run(given: tuple[int, bool]) -> Outcome:
    assert _folder is not None
    return run_case(given[0], _folder, given[1])


def fuzz(numbers: list[int], jobs: int, resume: float, tell: Any = lambda outcome: None) -> list[Outcome]:
    """Every case's outcome, each told when it is known; every 1 / `resume`-th is stopped and resumed as well."""
    every = round(1 / resume) if resume > 0 else 0
    work = [(number, bool(every) and place % every == 0) for place, number in enumerate(numbers)]
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        tell(outcome)

    with tempfile.TemporaryDirectory(prefix="tether-fuzz-") as folder:
        if jobs == 1:
            _begin(folder)
            for given in work:
                done(_run(given))
        else:
            with multiprocessing.get_context("spawn").Pool(jobs, _begin, (folder,)) as pool:
                for outcome in pool.imap_unordered(_run, work):
                    done(outcome)
    return outcomes


def command(number: int) -> str:
    """The case as a command line; FOLDER stands for any folder, and what is in it is made by the fuzz itself."""
    case = draw_case(number, places_for("preferences", Path("FOLDER")))
    data = "demonstrations" if case.method == "sft" else "preferences"
    return " ".join(map(quote, ["tether", "train", case.method, *case.words(places_for(data, Path("FOLDER")))]))


def main() -> int:
    """Run it all and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="how many recipes (300)")
    parser.add_argument("--seed", type=int, default=0, help="the first number is this times 100000 (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--resume", type=float, default=0.2, help="the share that is stopped and resumed too (0.2)")
    parser.add_argument("--only", type=int, nargs="+", help="these numbers alone")
    parser.add_argument("--json", metavar="FILE", help="where every outcome is written")
    options = parser.parse_args()
    first = options.seed * 100_000
    numbers = options.only or list(range(first, first + options.count))
    began = time.monotonic()
    seen = 0

    def tell(outcome: Outcome) -> None:
        nonlocal seen
        seen += 1
        state = "FINDING" if outcome.finding else outcome.result
        text = outcome.finding.strip().splitlines()[-1] if outcome.finding else outcome.detail
        print(f"{seen:4}/{len(numbers)} {outcome.number:6} {outcome.method:9} {state:8} {text[:200]}", flush=True)

    outcomes = fuzz(numbers, min(options.jobs, len(numbers)), options.resume if not options.only else 1.0, tell)
    if options.json:
        Path(options.json).write_text(json.dumps([vars(outcome) for outcome in outcomes], indent=1) + "\n")
    found = [outcome for outcome in outcomes if outcome.finding]
    for outcome in found:
        print(f"\n--- {outcome.number}: again with: python tests/fuzz/fuzz.py --only {outcome.number}")
        print(f"{command(outcome.number)}\n{outcome.finding.strip()}")
    counts = Counter(outcome.result for outcome in outcomes if not outcome.finding)
    print(
        f"\n{len(outcomes)} recipes in {time.monotonic() - began:.0f} s: {counts['success']} ended in success, "
        f"{counts['refused']} in a sentence, {len(found)} in a finding"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
