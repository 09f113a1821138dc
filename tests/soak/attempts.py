"""Attempts at a run in processes of their own, which are killed.

On a CPU they are forks of this process, so that nothing is imported twice. CUDA does not work in a fork of a process
that looked for it, as an import of transformers does, so there an attempt is a new interpreter. A killed process leaves
no word, so it notes where it is in memory that it shares with its parent.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import alembic.command  # noqa: F401 (imported when a store is made: here it is, once)

import tether.store.checkpoints as checkpoint_writer
import tether.store.checkpoints as checkpoints
from tether.config.load import recipe_from_record
from tether.config.recipes import Recipe
from tether.store.database.journal import Journal
from tether.store.folder import is_run, recipe_record, run_path
from tether.train.attempt import Attempt as RunAttempt
from tether.train.run import train_recipe

PHASES = ("start", "rollout", "scores", "evaluation", "update", "step", "recording", "the end")
LOOK_EVERY = 0.005  # seconds
PLACES = 64  # bytes for the name of an aimed shot
LAYOUT = struct.Struct(f"=BBBid{PLACES}s")


class Notes:
    """What a child says of itself: where its main thread is, and whether its other threads are writing."""

    def __init__(self, file: Path | None = None) -> None:
        """In a file that an interpreter of its own can open, or in memory that forks inherit."""
        if file is None:
            self._shared = mmap.mmap(-1, LAYOUT.size)
        else:
            with file.open("r+b") as opened:
                opened.truncate(LAYOUT.size)
                self._shared = mmap.mmap(opened.fileno(), LAYOUT.size)
        self.phase, self.checkpoint, self.record, self.steps, self.ready, self.place = 0, False, False, 0, 0.0, ""

    def save(self) -> None:
        """From the child."""
        name = self.place.encode()[:PLACES]
        LAYOUT.pack_into(self._shared, 0, self.phase, self.checkpoint, self.record, self.steps, self.ready, name)

    def load(self) -> Notes:
        """To the parent."""
        *numbers, name = LAYOUT.unpack_from(self._shared, 0)
        self.phase, self.checkpoint, self.record, self.steps, self.ready = numbers
        self.place = name.rstrip(b"\0").decode()
        return self

    def note(self, **changes: object) -> None:
        """Change and save."""
        self.__dict__.update(changes)
        self.save()


@dataclass(frozen=True)
class Attempt:
    """How a attempt went. `startup` is 0 where it never came to a step."""

    killed: bool
    exit_code: int
    where: tuple[str, ...]
    seconds: float
    startup: float
    steps: int


def sit(
    recipe: Recipe,
    *,
    kill_after: float = math.inf,
    most_steps: int | None = None,
    into_checkpoint: float | None = None,
    prepare: Callable[[Notes], None] = lambda notes: None,
) -> Attempt:
    """Begin or resume the run in a child, and kill it: after some seconds, once it has taken `most_steps` more, or some
    seconds into the writing of its first checkpoint. `prepare` is called in a forked child before anything else.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if recipe.model.device != "cpu":
        with tempfile.TemporaryDirectory(prefix="attempt-") as folder:
            began, notes = time.monotonic(), Notes(_touched(Path(folder) / "notes"))
            return _watched(_interpreter(recipe, Path(folder)), notes, began, kill_after, most_steps, into_checkpoint)
    began, notes = time.monotonic(), Notes()
    child = os.fork()
    if child == 0:
        _live(recipe, notes, prepare)
    return _watched(child, notes, began, kill_after, most_steps, into_checkpoint)


def _touched(file: Path) -> Path:
    file.touch()
    return file


def _interpreter(recipe: Recipe, folder: Path) -> int:
    """Start a new interpreter that makes the attempt; its process id."""
    (folder / "recipe.json").write_text(json.dumps(recipe_record(recipe)))
    return os.posix_spawn(sys.executable, [sys.executable, __file__, str(folder)], os.environ)


def _watched(
    child: int, notes: Notes, began: float, kill_after: float, most_steps: int | None, into_checkpoint: float | None
) -> Attempt:
    """See `sit`."""
    watched = os.pidfd_open(child)
    try:
        while not select.select([watched], [], [], min(LOOK_EVERY, max(0.0, began + kill_after - time.monotonic())))[0]:
            far = most_steps is not None and notes.load().steps >= most_steps
            if into_checkpoint is not None and notes.load().checkpoint:
                kill_after, into_checkpoint = time.monotonic() - began + into_checkpoint, None
            if far or time.monotonic() >= began + kill_after:
                os.kill(child, signal.SIGKILL)
                break
    finally:
        os.close(watched)
    status = os.waitpid(child, 0)[1]
    notes.load()
    where = [PHASES[notes.phase], *(["checkpoint"] if notes.checkpoint else []), *(["record"] if notes.record else [])]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return Attempt(
        killed,
        -1 if killed else os.waitstatus_to_exitcode(status),
        (*where, notes.place) if notes.place else tuple(where),
        time.monotonic() - began,
        notes.ready - began if notes.ready else 0.0,
        notes.steps,
    )


def _live(recipe: Recipe, notes: Notes, prepare: Callable[[Notes], None]) -> None:
    """The child's whole life."""
    code = 1
    try:
        watch(notes)
        prepare(notes)
        train_recipe(
            recipe,
            stop=lambda: False,
            advance=lambda step, metrics: None,
            notify=lambda text: None,
            resume=is_run(run_path(recipe)),
        )
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def watch(notes: Notes) -> None:
    """Have the library's own steps noted."""
    heartbeat, after_step, finish = RunAttempt.heartbeat, RunAttempt.after_step, RunAttempt.finish
    write_record, write_checkpoint = Journal.write, checkpoint_writer.write

    def noted_heartbeat(self: RunAttempt, words: str) -> None:
        heartbeat(self, words)
        phase = next((place for place, name in enumerate(PHASES) if words.startswith(name)), 0)
        notes.note(phase=phase, ready=notes.ready or time.monotonic())

    def noted_after_step(self: RunAttempt, *outcome: object) -> None:
        notes.note(phase=PHASES.index("recording"))
        after_step(self, *outcome)  # pyright: ignore[reportArgumentType]
        notes.note(steps=notes.steps + 1)

    def noted_finish(self: RunAttempt) -> None:
        notes.note(phase=PHASES.index("the end"))
        finish(self)

    def noted_record(self: Journal, *record: object) -> None:
        notes.note(record=True)
        write_record(self, *record)  # pyright: ignore[reportArgumentType]
        notes.note(record=False)

    def noted_checkpoint(*content: object) -> Path:
        notes.note(checkpoint=True)
        path = write_checkpoint(*content)  # pyright: ignore[reportArgumentType]
        notes.note(checkpoint=False)
        return path

    RunAttempt.heartbeat, RunAttempt.after_step, RunAttempt.finish = noted_heartbeat, noted_after_step, noted_finish  # pyright: ignore
    Journal.write = noted_record  # pyright: ignore
    checkpoint_writer.write = noted_checkpoint  # pyright: ignore


def aimed_at(shot: int, seed: int) -> Callable[[Notes], None]:
    """Have a child kill itself at the `shot`-th of the moments that writing and pruning checkpoints is made of."""

    def prepare(notes: Notes) -> None:
        left, draw = [shot], random.Random(seed)

        def moment(place: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                notes.note(place=place)
                os.kill(os.getpid(), signal.SIGKILL)

        _mine_writing(moment, draw)
        _mine_naming(moment)

    return prepare


def _mine_writing(moment: Callable[[str], None], draw: random.Random) -> None:
    write_file, sync_folder = checkpoints._write_file, checkpoints.sync_folder

    def mined_file(path: Path, content: bytes) -> dict[str, object]:
        path.touch()
        moment(f"{path.name}: empty")
        path.write_bytes(content[: draw.randrange(len(content))])
        moment(f"{path.name}: a part")
        path.write_bytes(content)
        moment(f"{path.name}: before it is flushed")
        return write_file(path, content)

    def mined_sync(folder: Path) -> None:
        moment("before the names are flushed")
        sync_folder(folder)
        moment("after the names are flushed")

    checkpoints._write_file = mined_file  # pyright: ignore
    checkpoints.sync_folder = mined_sync  # pyright: ignore


def _mine_naming(moment: Callable[[str], None]) -> None:
    rename, rmtree, prune = Path.rename, shutil.rmtree, checkpoint_writer.prune

    def mined_rename(self: Path, target: Path) -> Path:
        if "step-" not in self.name:
            return rename(self, target)
        naming = "named" if self.name.startswith(checkpoints.UNFINISHED) else "put aside"
        moment(f"before one is {naming}")
        renamed = rename(self, target)
        moment(f"after one is {naming}")
        return renamed

    def mined_rmtree(path: Path, ignore_errors: bool = False) -> None:
        if "step-" in Path(path).name and Path(path).is_dir():
            for file in sorted(Path(path).iterdir()):
                file.unlink()
                moment("half of one removed")
        rmtree(path, ignore_errors=ignore_errors)

    def mined_prune(folder: Path, newest: int, every: int = 0) -> None:
        moment("before the old ones are removed")
        prune(folder, newest, every)
        moment("after the old ones are removed")

    Path.rename = mined_rename  # pyright: ignore
    shutil.rmtree = mined_rmtree  # pyright: ignore
    checkpoint_writer.prune = mined_prune  # pyright: ignore


if __name__ == "__main__":
    given = Path(sys.argv[1])
    _live(
        recipe_from_record(json.loads((given / "recipe.json").read_text())),
        Notes(given / "notes"),
        lambda notes: None,
    )
