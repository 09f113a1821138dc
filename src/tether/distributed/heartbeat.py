"""Ranks tell each other that they live, so that one that stopped, or a network that went away, ends nobody's patience.

A rank that dies closes its connections, which ends every exchange at once. One that is stopped, or whose machine lost
power, keeps them open: nothing would ever come. So each rank sends the next one a beat from a thread of its own, in a
process group of its own, and the neighbors of a rank that misses its beat end the run. The thread runs during a slow
reward as well; `run.hang_timeout` is for a main thread that hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BEATS = 4  # in the time after which a rank counts as lost
MAX_PAUSE = 5.0  # seconds between two beats
LAST_BEAT = 5.0  # seconds that the others may take to leave


class Heartbeat:
    """The beat of one rank. `on_loss` is called with the rank that is silent and the seconds, in the thread."""

    def __init__(self, index: int, count: int, on_loss: Callable[[int, float], None]) -> None:
        self.index, self.count, self.on_loss = index, count, on_loss
        self.group: Any = dist.new_group(backend="gloo") if count > 1 else None  # a collective call
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, seconds: float) -> None:
        """Beat until `close`; with 0 seconds nobody is missed."""
        if seconds > 0 and self.group is not None:
            self._thread = threading.Thread(target=self._beat, args=(seconds,), name="tether-heartbeat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Exchange a last beat, so that no thread is in the middle of one when the process ends."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(LAST_BEAT)

    def _beat(self, seconds: float) -> None:
        before, after = (self.index - 1) % self.count, (self.index + 1) % self.count
        limit, pause = timedelta(seconds=seconds), min(seconds / BEATS, MAX_PAUSE)
        mine, theirs = torch.ones(1), torch.ones(1)
        last = False
        while not last:
            last = self._over.wait(pause)
            waited_for, since = before, time.monotonic()
            try:
                sending = dist.isend(mine, after, group=self.group)
                receiving = dist.irecv(theirs, before, group=self.group)
                assert sending is not None and receiving is not None
                receiving.wait(limit)
                waited_for, since = after, time.monotonic()
                sending.wait(limit)
            except RuntimeError:
                if time.monotonic() - since >= seconds and not self._over.is_set():
                    self.on_loss(waited_for, seconds)
                return  # a connection that closed: the main thread sees that as well
