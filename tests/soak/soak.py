"""Kill runs wherever it hurts, resume them, and compare the end with that of a run that nobody disturbed.

    make soak
    .venv/bin/python tests/soak/soak.py --kills 200 --record-kills 30 --aimed 100 --seed 0 --json

The last line is the verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a pool of threads does not outlive a fork
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from attempts import Attempt, aimed_at, sit
from same_runs import differences
from tiny_recipes import TOP, tiny

from tether.config.recipes import Recipe
from tether.store import checkpoints
from tether.store.folder import RunFolder, run_path

Tell = Callable[[str], None]
WRITING = 0.06  # seconds that writing a checkpoint takes, about
SHOTS = 44  # more moments than one checkpoint is made of, fewer than two


@dataclass
class Verdict:
    """What one run went through, and what is wrong with it in the end."""

    name: str
    steps: int
    kills: int = 0
    resumes: int = 0
    before_first_checkpoint: int = 0
    while_writing_checkpoint: int = 0
    while_writing_record: int = 0
    where: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, attempt: Attempt, newest: int) -> None:
        """Note a kill."""
        self.kills += 1
        self.resumes += 1
        self.before_first_checkpoint += newest == 0
        self.while_writing_checkpoint += "checkpoint" in attempt.where
        self.while_writing_record += "record" in attempt.where
        self.at(attempt.where[0])

    def at(self, place: str) -> None:
        """Count a place."""
        self.where[place] = self.where.get(place, 0) + 1

    def line(self) -> str:
        """In words."""
        phases = ", ".join(f"{name} {count}" for name, count in sorted(self.where.items(), key=lambda item: -item[1]))
        verdict = "same bits" if not self.wrong else "; ".join(self.wrong)
        return (
            f"{self.name}: {self.kills} kills over {self.steps} steps ({self.before_first_checkpoint} before the first "
            f"checkpoint, {self.while_writing_checkpoint} while one was written, {self.while_writing_record} while a "
            f"record was; {phases}), {self.resumes} resumes, {self.seconds:.0f} s: {verdict}"
        )


class Pace:
    """When to kill next: at random, such that the kills spread over the run's life and it still comes to its end."""

    def __init__(self, recipe: Recipe, kills: int, draw: random.Random, calm: Attempt) -> None:
        self.recipe, self.kills, self.draw = recipe, kills, draw
        self.steps, self.every = recipe.run.steps, recipe.checkpoint.every
        self.startup, self.step = calm.startup, (calm.seconds - calm.startup) / calm.steps  # in seconds

    def next(self, done: int, kills: int) -> Attempt:
        """Sit until the next kill, where `done` steps are in a checkpoint and `kills` have landed.

        However quick the machine becomes, a attempt takes but a few steps and none ends the run.
        """
        most = max(1, min(2 * self.every, self.steps - done - 1))
        behind = (self.steps - 2 * self.every) * kills / self.kills - done
        if behind <= 0 or self.draw.random() >= behind / self.every:
            after = self.draw.uniform(0.0, self.startup + self.step * self.every)
            attempt = sit(self.recipe, kill_after=after, most_steps=most)
        elif self.draw.random() < 0.5:
            attempt = sit(self.recipe, into_checkpoint=self.draw.uniform(0.0, WRITING), most_steps=most)
        else:
            after = self.startup + self.step * self.draw.uniform(self.every, 2 * self.every)
            attempt = sit(self.recipe, kill_after=after, most_steps=most)
        self.learn(attempt)
        return attempt

    def learn(self, attempt: Attempt) -> None:
        """From how long it took."""
        if attempt.startup:
            self.startup += 0.2 * (attempt.startup - self.startup)
            if attempt.steps:
                self.step += 0.2 * ((attempt.seconds - attempt.startup) / (attempt.steps + 0.5) - self.step)
        elif attempt.seconds > self.startup:  # it takes longer than was thought, by how much was not seen
            self.startup = 1.2 * attempt.seconds


def newest_step(recipe: Recipe, wrong: list[str]) -> int:
    """The steps in the newest checkpoint, 0 where there is none; a damaged one is wrong."""
    found = checkpoints.read_newest(RunFolder(run_path(recipe)).checkpoints, wrong.append)
    return 0 if found is None else found.step


def undisturbed(recipe: Recipe) -> Attempt:
    """Run it in one attempt."""
    attempt = sit(recipe)
    if attempt.exit_code != 0:
        raise SystemExit(f"the undisturbed run ended with {attempt.exit_code}")
    return attempt


def killed_at_random(name: str, make: Callable[[Path], Recipe], kills: int, seed: int, tell: Tell) -> Verdict:
    """Kill and resume, `kills` times; then let it end, and compare."""
    began, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="soak-"))
    calm, recipe = make(root / "calm"), make(root / "killed")
    pace = Pace(recipe, kills, random.Random(seed), undisturbed(calm))
    verdict = Verdict(name, recipe.run.steps)
    while verdict.kills < kills:
        before = newest_step(recipe, verdict.wrong)
        attempt = pace.next(before, verdict.kills)
        if not attempt.killed:
            verdict.wrong += [] if attempt.exit_code == 0 else [f"a attempt ended with {attempt.exit_code}"]
            break
        verdict.count(attempt, newest_step(recipe, verdict.wrong))
        if newest_step(recipe, verdict.wrong) < before:
            verdict.wrong.append(f"a kill lost the checkpoint of step {before}")
        if verdict.kills % 10 == 0:
            tell(f"  {name}: {verdict.kills} of {kills} kills, {newest_step(recipe, verdict.wrong)} steps")
    return _ended(verdict, calm, recipe, kills, began, root)


def killed_while_writing(name: str, make: Callable[[Path], Recipe], kills: int, seed: int, tell: Tell) -> Verdict:
    """Kills from inside the writing of checkpoints: after each, the newest must be whole and none may be lost."""
    began, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="soak-"))
    calm, recipe = make(root / "calm"), make(root / "killed")
    undisturbed(calm)
    verdict, draw = Verdict(name, recipe.run.steps), random.Random(seed)
    newest = 0
    while verdict.kills < kills:
        attempt = sit(recipe, prepare=aimed_at(draw.randrange(SHOTS), draw.randrange(2**31)))
        if not attempt.killed:
            break
        before, newest = newest, newest_step(recipe, verdict.wrong)
        verdict.count(attempt, newest)
        verdict.at(attempt.where[-1].split(":")[-1].strip())
        if newest < before:
            verdict.wrong.append(f"{attempt.where[-1]}: the checkpoint of step {before} was lost")
        if verdict.kills % 10 == 0:
            tell(f"  {name}: {verdict.kills} of {kills} kills, {newest} steps")
    return _ended(verdict, calm, recipe, kills, began, root)


def _ended(verdict: Verdict, calm: Recipe, recipe: Recipe, kills: int, began: float, root: Path) -> Verdict:
    """Let the run end, compare it, and tidy up where all is well."""
    if verdict.kills < kills:
        verdict.wrong.append(f"it came to its end after {verdict.kills} of {kills} kills")
    if (code := sit(recipe).exit_code) != 0:
        verdict.wrong.append(f"the last attempt ended with {code}")
    else:
        verdict.wrong += differences(run_path(calm), run_path(recipe))
    verdict.seconds = time.monotonic() - began
    if verdict.wrong:
        verdict.wrong.append(f"both runs are in {root}")
    else:
        shutil.rmtree(root)
    return verdict


def every_run(kills: int, record_kills: int, aimed: int, seed: int, tell: Tell) -> list[Verdict]:
    """All that `make soak` does, quickest first."""

    def maker(method: str, steps: int, every: int, *flags: str) -> Callable[[Path], Recipe]:
        rules = ("--run.steps", str(steps), "--checkpoint.every", str(every))
        return lambda workspace: tiny(method, workspace, *rules, *flags)

    verdicts: list[Verdict] = []

    def add(verdict: Verdict) -> None:
        verdicts.append(verdict)
        tell(verdict.line())

    for method in ("sft", "reward"):
        for roles, flags in (("separate", ()), ("shared_backbone", TOP)):
            name = f"{method}, roles {roles}"
            add(killed_at_random(name, maker(method, 45, 3, *flags), record_kills, seed, tell))
    name = "sft, kills aimed inside checkpoint writing"
    add(killed_while_writing(name, maker("sft", max(2, aimed), 1), aimed, seed, tell))
    add(killed_at_random("ppo", maker("ppo", 60, 3), kills, seed, tell))
    return verdicts


def main() -> int:
    """Run it all; 0 if every run is what it would have been without a single kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of the PPO run (200)")
    parser.add_argument("--record-kills", type=int, default=30, help="of each run on records (30)")
    parser.add_argument("--aimed", type=int, default=100, help="kills inside checkpoint writing (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON line")
    options = parser.parse_args()
    began = time.monotonic()
    tell: Tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    verdicts = every_run(options.kills, options.record_kills, options.aimed, options.seed, tell)
    passed = not any(verdict.wrong for verdict in verdicts)
    total = sum(verdict.kills for verdict in verdicts)
    if options.json:
        print(json.dumps({"passed": passed, "kills": total, "runs": [asdict(verdict) for verdict in verdicts]}))
    else:
        words = "every run ended with the bits of one that nobody disturbed" if passed else "see above"
        print(f"{'PASS' if passed else 'FAIL'}: {total} kills in {time.monotonic() - began:.0f} s; {words}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
