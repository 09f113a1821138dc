"""Imports that go on in the background: one at a time, with progress, and cancelled on request."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from tether.errors import TetherError
from tether.redact import redact
from tether.studio import label_staging
from tether.studio.label_staging import Cancelled, ItemWithVotes, StagedItems
from tether.studio.label_store import Labels
from tether.studio.people import Person
from tether.studio.replies import Refused

State = Literal["waiting", "running", "done", "cancelled", "failed"]
MAX_WAITING = 4  # imports that are under way or wait for their turn
MAX_KNOWN = 50  # whose outcome is remembered
PATIENCE = 2.0  # seconds that a request waits before it answers that its import goes on


@dataclass
class BackgroundImport:
    """One import, from the request to its end."""

    id: str
    queue: int
    records: int
    done: int = 0
    state: State = "waiting"
    taken: StagedItems | None = None
    error: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    future: Future[StagedItems] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.state not in ("waiting", "running")

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        shown = {"id": self.id, "queue_id": self.queue, "state": self.state, "records": self.records, "done": self.done}
        if self.taken is not None:
            shown |= {"items": self.taken.items, "votes": self.taken.votes}
        return shown | ({"error": self.error} if self.error else {})


class Imports:
    """The imports of a server."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._known: dict[str, BackgroundImport] = {}
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="imports")

    def take_in(
        self, by: Person, queue: int, given: Sequence[ItemWithVotes], *, action: str, origin: dict[str, Any] | None
    ) -> BackgroundImport:
        """Begin an import and wait a moment for it; one of a single transaction is done here and waits for no other."""
        if len(given) <= label_staging.TOGETHER:
            taken = self._labels.take_in(by, queue, given, action=action, origin=origin)
            return BackgroundImport("", queue, len(given), len(given), "done", taken)
        with self._lock:
            if sum(not one.is_over for one in self._known.values()) >= MAX_WAITING:
                raise Refused(409, f"{MAX_WAITING} imports are under way: wait for one, or cancel one")
            started = BackgroundImport(secrets.token_hex(6), queue, len(given))
            over = [key for key, one in self._known.items() if one.is_over]
            for key in over[: max(0, len(self._known) - MAX_KNOWN + 1)]:
                del self._known[key]
            self._known[started.id] = started
        started.future = self._worker.submit(self._run, started, by, given, action, origin)
        with suppress(TimeoutError, Cancelled):
            started.future.result(timeout=PATIENCE)
        return started

    def _run(
        self,
        one: BackgroundImport,
        by: Person,
        given: Sequence[ItemWithVotes],
        action: str,
        origin: dict[str, Any] | None,
    ) -> StagedItems:
        def tell(done: int) -> None:
            one.done = done

        try:
            if one.stop.is_set():
                raise Cancelled
            one.state = "running"
            options = {"action": action, "origin": origin, "tell": tell, "cancelled": one.stop.is_set}
            one.taken = self._labels.take_in(by, one.queue, given, **options)
        except Cancelled:
            one.state = "cancelled"
            raise
        except Exception as error:
            expected = isinstance(error, TetherError | Refused)
            said = getattr(error, "detail", None) or (str(error) if expected else type(error).__name__)
            one.error, one.state = redact(str(said)), "failed"
            raise
        one.done, one.state = one.records, "done"
        return one.taken

    def get(self, import_id: str) -> BackgroundImport:
        """One import, or a 404."""
        found = self._known.get(import_id)
        if found is None:
            raise Refused(404, "there is no such import; a server remembers those since it was started")
        return found

    def all(self) -> list[BackgroundImport]:
        """What was imported, the newest first."""
        return list(self._known.values())[::-1]

    def cancel(self, import_id: str) -> BackgroundImport:
        """Take an import back: none of its records stays. One that is over stays as it is."""
        found = self.get(import_id)
        found.stop.set()
        with suppress(Exception):
            if found.future is not None:
                found.future.result(timeout=PATIENCE)
        return found

    def close(self) -> None:
        """Take back what is under way, and end."""
        for one in self._known.values():
            one.stop.set()
        self._worker.shutdown()
