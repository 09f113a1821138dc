"""Flip single bits of a stopped run, over every file, and resume or read it: no flip may change a result in silence.

    .venv/bin/python tests/soak/flips.py --flips 2000 --seed 0 --json

Each flip leaves the result equal to the bit, or is told in a sentence. The last line is the verdict.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from in_process import attempt, whole
from same_runs import differences
from tiny_recipes import tiny

from tether.errors import TetherError
from tether.files import files_damage
from tether.plan.machine import machine_for
from tether.store import checkpoints
from tether.store.database.open import workspace_at
from tether.store.header import origin_trouble, read_header
from tether.store.history import settle_history, take_over
from tether.store.read import open_workspace, read_run
from tether.train import run_plan
from tether.train.resume import fork_run, stored_recipe
from tether.train.run import Forked, train_recipe

PPO = ("--run.steps", "5", "--checkpoint.every", "2", "--evaluation.every", "1", "--run.doctor_every", "0")
SFT = ("--run.steps", "6", "--checkpoint.every", "2", "--evaluation.every", "2", "--run.doctor_every", "0")
RESUMED, READ = 0.1, 0.3  # shares of flips that are resumed whatever is seen before; of the store's, that are only read
SITTINGS = ("failed", "stopped", "resumed", "forked", "warning")


@dataclass
class Case:
    """A stopped run, kept aside, and the same run as it ends when nobody touches it."""

    name: str
    kept: Path  # its workspace, as it was stopped
    place: Path  # where the workspace is put for each flip
    calm: Path  # the run that ended
    since: int
    quiet: set[str] = field(default_factory=set)  # what is said without a flip
    read: Any = None  # what reading it gives

    @property
    def run(self) -> Path:
        return self.place / self.calm.name

    def put_back(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.kept, self.place)

    def files(self) -> list[Path]:
        found = (path.relative_to(self.kept) for path in self.kept.rglob("*") if path.is_file() and path.stat().st_size)
        return sorted(path for path in found if path.parts[0] in (self.calm.name, "tether.db"))


@dataclass
class Verdict:
    """What came of all flips."""

    flips: int = 0
    by_file: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def make_cases(root: Path) -> list[Case]:
    """A PPO run with a best model and rollouts, and a fork of an SFT run."""
    return [_ppo(root / "ppo"), _fork(root / "fork")]


def _ppo(root: Path) -> Case:
    calm = whole(tiny("ppo", root / "calm", *PPO))
    attempt(tiny("ppo", root / "place", *PPO), stop_after=4)
    return _case("ppo", root, calm, 0)


def _fork(root: Path) -> Case:
    for place in ("calm", "place"):
        attempt(tiny("sft", root / place, *SFT, name="parent"), stop_after=3)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            if place == "calm":
                fork_run("parent", str(root / place), 3, ["--run.name", "run"], json_output=True)
            else:
                _stopped_fork(root / place)
    return _case("fork", root, root / "calm" / "run", 3)


def _stopped_fork(workspace: Path) -> None:
    """A fork that is stopped after two steps of its own."""
    parent = stored_recipe(workspace / "parent")
    child = parent.model_copy(update={"run": parent.run.model_copy(update={"name": "run"})})
    checkpoint = checkpoints.read(workspace / "parent" / "checkpoints" / "step-00000003")
    taken: list[int] = []
    train_recipe(
        child,
        stop=lambda: len(taken) >= 2,
        advance=lambda step, metrics: taken.append(step),
        notify=lambda text: None,
        forked=Forked(checkpoint, "parent", str(workspace / "parent")),
    )


def _case(name: str, root: Path, calm: Path, since: int) -> Case:
    (root / "place").rename(root / "kept")
    case = Case(name, root / "kept", root / "place", calm, since)
    case.put_back()
    case.read = read_all(case)
    case.quiet = set(resume(case))
    assert compare(case) == [], compare(case)
    return case


# -- what is done to a flipped run --------------------------------------------------------------------------------


def resume(case: Case) -> list[str]:
    """Resume it to its end; what it said."""
    said: list[str] = []
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        train_recipe(
            stored_recipe(case.run),
            stop=lambda: False,
            advance=lambda step, metrics: None,
            notify=said.append,
            resume=True,
        )
    return said + [line for line in shown.getvalue().splitlines() if line.strip()]


def read_all(case: Case) -> Any:
    """Everything that a reader is given: metrics, events, every rollout."""
    with open_workspace(case.place) as opened:
        run = read_run(opened, case.calm.name)
        rollouts = [repr(rollout) for step in run.rollout_steps for rollout in run.rollouts(step)]
        return repr((list(run.metrics), run.method)), rollouts


def compare(case: Case) -> list[str]:
    """What differs between the run that was flipped and resumed, and the calm one."""
    found = differences(case.calm, case.run, since=case.since)
    return found + [f"{table} differs" for table in ("events", "lineage") if _told(case, table)]


def _told(case: Case, table: str) -> bool:
    return _rows(case.calm, table) != _rows(case.run, table)


def _rows(run: Path, table: str) -> list[tuple[Any, ...]]:
    columns = "kind, text, step" if table == "events" else "position, role, sha256"
    database = sqlite3.connect(run.parent / "tether.db")
    try:
        rows = database.execute(
            f"SELECT {columns} FROM {table} WHERE run_id = (SELECT id FROM runs WHERE name = ?)", (run.name,)
        ).fetchall()
    finally:
        database.close()
    return sorted(row for row in rows if table != "events" or row[0] not in SITTINGS)


# -- flips --------------------------------------------------------------------------------------------------------


def places(case: Case, count: int, draw: random.Random) -> Iterator[tuple[Path, int]]:
    """(file, bit): every file gets its share, the larger ones what the smaller have no bits for."""
    files = sorted(case.files(), key=lambda file: (case.kept / file).stat().st_size)
    left = count
    for index, file in enumerate(files):
        bits = 8 * (case.kept / file).stat().st_size
        share = min(bits, left // (len(files) - index))
        left -= share
        yield from ((file, bit) for bit in sorted(draw.sample(range(bits), share)))


def flip(path: Path, bit: int) -> None:
    """Turn one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def look(case: Case, file: Path) -> list[str]:
    """What those parts of a resume say that read the flipped file; they are what tells in a whole resume as well.

    A checkpoint that is not the newest is read as a fork or an export from it reads it.
    """
    said: list[str] = []
    recipe = stored_recipe(case.run)
    header = read_header(case.run, said.append)
    assert header is not None
    said += [text for text in (origin_trouble(case.run, header), files_damage(case.run / "best")) if text is not None]
    if file.parts[1:2] == ("checkpoints",):
        checkpoints.read(case.run / Path(*file.parts[1:3]))
    if file.name in ("tether.db", "records.jsonl"):
        workspace = workspace_at(recipe.run.directory, recipe.store.url)
        said += take_over(workspace, case.run, header, is_new=False).told
        done = max(step for step, _ in checkpoints.listed(case.run / "checkpoints"))
        said += settle_history(workspace, case.run, case.since, done).told
    return said


def try_flip(case: Case, file: Path, bit: int, *, how: str) -> tuple[str, str]:
    """(outcome, words): told, refused, equal; or silent and crashed, which are wrong.

    `how`: resume it; look at it first, and resume only what nothing was said of; or read it as `tether show` does.
    """
    case.put_back()
    flip(case.place / file, bit)
    shown = io.StringIO()
    try:
        if how == "read":
            return ("equal", "") if read_all(case) == case.read else ("silent", "reading gives something else")
        with contextlib.redirect_stderr(shown):
            said = look(case, file) if how == "look" else []
        if not said:
            if how == "look":
                case.put_back()
                flip(case.place / file, bit)
            said = [text for text in resume(case) if text not in case.quiet]
    except TetherError as error:
        return ("refused", str(error)) if len(str(error)) > 20 else ("crashed", f"no sentence: {error!r}")
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    if said:
        return "told", said[0]
    try:
        wrong = compare(case)
    except sqlite3.Error as error:
        wrong = [f"the store cannot be read afterwards ({error})"]
    return ("equal", "") if not wrong else ("silent", "; ".join(wrong))


def run_flips(flips: int, seed: int, tell: Callable[[str], None]) -> Verdict:
    """All flips over all cases."""
    began, verdict, draw = time.monotonic(), Verdict(), random.Random(seed)
    run_plan.machine_for = functools.cache(machine_for)  # how fast the machine is: measured once, and no result
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a flip is not about waiting for a disk
    root = Path(tempfile.mkdtemp(prefix="flips-", dir=fast))
    try:
        cases = make_cases(root)
        for index, case in enumerate(cases):
            share = flips // len(cases) + (flips % len(cases) if index == 0 else 0)
            for file, bit in places(case, share, draw):
                how = "resume" if draw.random() < RESUMED else "look"
                how = "read" if file.name == "tether.db" and draw.random() < READ else how
                outcome, words = try_flip(case, file, bit, how=how)
                verdict.flips += 1
                verdict.by_file[f"{case.name}: {file}"] += 1
                verdict.outcomes[f"{how}: {outcome}"] += 1
                if outcome in ("silent", "crashed"):
                    verdict.wrong.append(f"{case.name} {file} bit {bit} ({how}): {outcome}: {words}")
                    tell(f"  {verdict.wrong[-1]}")
                if verdict.flips % 100 == 0:
                    seconds = time.monotonic() - began
                    tell(f"  {verdict.flips} of {flips} flips, {seconds:.0f} s: {dict(verdict.outcomes)}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    verdict.seconds = time.monotonic() - began
    return verdict


def main() -> int:
    """Flip; 0 if nothing changed in silence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000, help="in all (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the places (0)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON line")
    options = parser.parse_args()
    verdict = run_flips(options.flips, options.seed, lambda text: print(text, file=sys.stderr, flush=True))
    passed = not verdict.wrong
    if options.json:
        counts = {"passed": passed, "flips": verdict.flips, "outcomes": verdict.outcomes, "files": verdict.by_file}
        print(json.dumps(counts | {"wrong": verdict.wrong, "seconds": round(verdict.seconds)}))
    else:
        files = len(verdict.by_file)
        print(
            f"{'PASS' if passed else 'FAIL'}: {verdict.flips} flips over {files} files in {verdict.seconds:.0f} s; "
            f"{dict(verdict.outcomes)}; {len(verdict.wrong)} changed something in silence or crashed"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
