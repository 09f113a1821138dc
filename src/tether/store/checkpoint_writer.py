"""Writing checkpoints while training goes on: a step waits for the copy, not for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tether.store.checkpoints import Checkpoint, clear_leftovers, prune, write


class CheckpointWriter:
    """Writes checkpoints one after the other from a thread of its own, and keeps the newest few.

    A checkpoint that cannot be written is told to `notify`; those that are there stay, and training goes on.
    """

    def __init__(self, folder: Path, *, keep: int, keep_every: int, notify: Callable[[str], None]) -> None:
        self.folder = folder.absolute()  # a reward may change the working folder while the thread writes
        self.keep = keep
        self.keep_every = keep_every
        self.notify = notify
        self._known_whole: set[Path] = set()
        self._thread: threading.Thread | None = None
        clear_leftovers(folder)

    def save(self, checkpoint: Checkpoint, before_naming: Callable[[], object] = lambda: None) -> None:
        """Begin to write a checkpoint, once the one before it is done; its tensors must not change any more.

        `before_naming` is called in the thread when all its bytes are on disk and it has no name yet.
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(checkpoint, before_naming), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, checkpoint: Checkpoint, before_naming: Callable[[], object]) -> None:
        try:
            self._known_whole.add(write(self.folder, checkpoint, before_naming))
            prune(self.folder, self.keep, self.keep_every, self._known_whole)
        except Exception as error:  # whatever it is, training can go on without this checkpoint
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self.notify(f"The checkpoint of step {checkpoint.step} was not written ({reason}): {self.folder}")
