"""The recorder: accepts the records of a run without blocking training, and writes them from a thread.

The training loop passes references and continues. The thread encodes, compresses and commits, one transaction per step,
so that a step's metrics and rollouts appear together or not at all. No error of the store is raised into training: see
`tether.store.database.journal`.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tether.errors import StorageError
from tether.redact import redact
from tether.store.database.apply import KeepRollouts
from tether.store.database.journal import Journal, Spool, recording_lock
from tether.store.database.open import Workspace
from tether.store.database.records import RecordSource, RunLog, StoreRecord, plain
from tether.store.recorded import StoredRollout, encode_rollout

Pieces = Callable[[Sequence[int]], list[str]]
"""Maps the token ids of a row to the text of each token; joined, they are the row's text."""


class Unstored(Protocol):
    """A step's rollouts in training's form, such as `tether.store.tokens.StepRollouts`."""

    def stored(self, step: int, pieces: Pieces | None) -> list[StoredRollout]:
        """Convert them to the stored form; called in the recorder's thread."""
        ...


Rollouts = Unstored | Sequence[StoredRollout]

MAX_WAITING = 16  # steps with rollouts that may be queued for the thread
PATIENCE = 10.0  # seconds that training waits for a full queue before it leaves out tokens
LOOK_EVERY = 0.5  # seconds between two checks that the thread is alive
REST = 0.05  # seconds to sleep after an error, so that a lasting one does not keep a core busy


@dataclass(frozen=True)
class RunStart:
    """Facts about a run that are known when it starts or resumes."""

    method: str
    steps: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sources: Sequence[RecordSource] = ()


@dataclass
class _Step:
    step: int
    metrics: Mapping[str, float]
    rollouts: Rollouts | None
    time: float


@dataclass
class _Flush:
    done: threading.Event
    durable: bool = False


class RunRecorder:
    """Records one run. Without `resumes`, an earlier run of the same folder name is replaced.

    `pieces` gives the text of each token. `notify` is called with a message when something could not be written. `uid`
    is the run's id. `moved` maps the ids of other runs of this workspace to their current names.
    """

    def __init__(
        self,
        workspace: Workspace,
        folder: Path,
        start: RunStart,
        *,
        resumes: bool = False,
        pieces: Pieces | None = None,
        keep: KeepRollouts = KeepRollouts(),  # noqa: B008 (frozen)
        notify: Callable[[str], None] = lambda text: None,  # noqa: ARG005
        wait: float = 5.0,
        uid: str | None = None,
        moved: Mapping[str, str] | None = None,
    ) -> None:
        workspace, folder = workspace.anchored(), folder.absolute()
        self.name = workspace.name_of(folder)
        self._pieces, self._keep, self._notify = pieces, keep, _careful(notify)
        self._lock = ExitStack()
        self._hold(folder)
        if not resumes:
            with suppress(OSError):
                Spool(folder).clear()
                RunLog(folder).clear()
        begun = _start_record(self.name, start, resumes, uid or secrets.token_hex(8), moved or {})
        self._log = RunLog(folder)
        self._journal = Journal(workspace, self.name, begun, self._notify, wait=wait)
        self._waiting: deque[StoreRecord | _Step | _Flush] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._behind = False
        self._told: set[str] = set()
        self._put(begun)
        self._thread = threading.Thread(target=self._work, name="run-recorder", daemon=True)
        self._thread.start()

    # -- called by training -------------------------------------------------------------------------------------

    def record(self, step: int, metrics: Mapping[str, float], rollouts: Rollouts | None = None) -> None:
        """Record a step's metrics, and its rollouts if `keep` selects them."""
        wanted = rollouts if rollouts is not None and self._keep.wants(step) else None
        if wanted is not None and not self._has_room():
            wanted = None
            self._tell_once("room", "The run store is too slow: tokens of some steps are left out. Metrics are not.")
        self._put(_Step(step, dict(metrics), wanted, time.time()))

    def event(self, kind: str, text: str, *, step: int | None = None, data: Mapping[str, Any] | None = None) -> None:
        """Record an event."""
        content = {"uid": secrets.token_hex(8), "time": time.time(), "kind": plain(kind), "step": step}
        content["text"] = redact(text)
        self._put(StoreRecord("event", content | {"data": dict(data or {})}))

    def rewind(self, step: int) -> None:
        """Remove this step and all later ones, with their events: the run resumes there and repeats them."""
        self._put(StoreRecord("rewind", {"step": step}))

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until all records are on disk, in the store or in the spool; returns whether they are."""
        mark = _Flush(threading.Event())
        self._put(mark)
        until = time.monotonic() + timeout
        while not mark.done.wait(max(0.0, min(LOOK_EVERY, until - time.monotonic()))):
            if not self._thread.is_alive() or time.monotonic() >= until:
                break
        return mark.done.is_set() and mark.durable

    def close(self, state: str, timeout: float = 60.0) -> bool:
        """Write the run's last state and close; returns whether everything is on disk. A second call does nothing."""
        if self._closing:
            return False
        self._put(StoreRecord("state", {"state": state, "time": time.time()}))
        durable = self.flush(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._lock.close()
        return durable

    @property
    def waits(self) -> bool:
        """Whether records wait for a store that cannot be written now."""
        return self._journal.seconds_to_retry() is not None

    @property
    def dropped(self) -> int:
        """Number of records that were lost."""
        return self._journal.dropped

    # -- the queue ----------------------------------------------------------------------------------------------

    def _put(self, item: StoreRecord | _Step | _Flush) -> None:
        with self._changed:
            self._waiting.append(item)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait once for a thread that is far behind, and then not again until it has caught up."""

        def room() -> bool:
            return sum(isinstance(item, _Step) and item.rollouts is not None for item in self._waiting) < MAX_WAITING

        with self._changed:
            found = room() or (not self._behind and self._changed.wait_for(room, PATIENCE))
            self._behind = not found
            return found

    def _take(self) -> StoreRecord | _Step | _Flush | None:
        """The next item; None to try the database again. Raises StopIteration at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing, self._journal.seconds_to_retry())
            if self._waiting:
                self._changed.notify_all()  # before anything can raise, so that the item is not lost
                return self._waiting.popleft()
            if self._closing:
                raise StopIteration
            return None

    # -- the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Handle one item; False after the last one. Raises nothing: out of memory, even a notice can fail."""
        item = None
        try:
            item = self._take()
            if item is None:
                self._journal.retry()
            elif isinstance(item, _Flush):
                self._logged(None)
                item.durable = self._journal.durable
            else:
                record = self._step_record(item) if isinstance(item, _Step) else item
                self._logged(record)
                self._journal.write(record)
        except StopIteration:
            self._end()
            return False
        except Exception as error:  # an error here must not end the run or the recording of later steps
            self._left_out(error)
        finally:
            if isinstance(item, _Flush):
                item.done.set()
        return True

    def _end(self) -> None:
        try:
            self._journal.close()
            self._log.close()
        except Exception as error:
            self._left_out(error)

    def _left_out(self, error: Exception) -> None:
        try:
            self._tell_once(repr(error), f"The run store left something out: {type(error).__name__}: {error}")
            time.sleep(REST)
        except MemoryError:
            return

    def _logged(self, record: StoreRecord | None) -> None:
        """Append a record to the run's log; None flushes it to disk. If that fails, only the store has the record."""
        try:
            if record is None:
                self._log.sync()
            else:
                self._log.append(record)
        except OSError as error:
            self._log.close()
            self._tell_once(
                "log",
                f"{self._log.path} cannot be written ({error.strerror}): until the run is resumed, new records are "
                "only in the run store.",
            )

    def _step_record(self, item: _Step) -> StoreRecord:
        rows, blobs = self._encoded(item)
        finite = {name: float(value) for name, value in item.metrics.items()}
        content = {
            "step": item.step,
            "time": item.time,
            "metrics": {name: value if math.isfinite(value) else None for name, value in finite.items()},
            "rollouts": rows,
            "most": self._keep.most,
        }
        return StoreRecord("step", content, blobs)

    def _encoded(self, item: _Step) -> tuple[list[dict[str, Any]], list[bytes]]:
        """The rollouts as database rows and their encoded contents; none if they cannot be encoded."""
        if item.rollouts is None:
            return [], []
        try:
            source = item.rollouts
            rollouts = source if isinstance(source, Sequence) else self._read(item.step, source)
            return [_row(rollout) for rollout in rollouts], [encode_rollout(rollout) for rollout in rollouts]
        except Exception as error:
            self._tell_once("tokens", f"The tokens of step {item.step} could not be kept ({error}); its metrics are.")
            return [], []

    def _read(self, step: int, source: Unstored) -> list[StoredRollout]:
        try:
            return source.stored(step, self._pieces)
        except Exception as error:
            rollouts = source.stored(step, None)
            self._tell_once("pieces", f"Tokens are kept without their texts: the tokenizer failed ({error}).")
            return rollouts

    # -- parts --------------------------------------------------------------------------------------------------

    def _hold(self, folder: Path) -> None:
        """Take the run's lock; waits a moment for a process that is just ending."""
        for attempt in range(20):
            if self._lock.enter_context(recording_lock(folder)):
                return
            self._lock.close()
            time.sleep(0.05 if attempt < 19 else 0.0)
        raise StorageError(f"run.name: {folder} is being trained by another process; wait for it, or stop it")

    def _tell_once(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._notify(text)


def _start_record(name: str, start: RunStart, resumes: bool, uid: str, moved: Mapping[str, str]) -> StoreRecord:
    content = {
        "name": name,
        "uid": uid,
        "moved": dict(moved),
        "time": time.time(),
        "method": start.method,
        "steps": start.steps,
        "config": dict(start.config),
        "environment": dict(start.environment),
        "sources": [asdict(source) for source in start.sources],
        "resumes": resumes,
    }
    return StoreRecord("start", content)


def _row(rollout: StoredRollout) -> dict[str, Any]:
    return {
        "place": rollout.row,
        "group_id": rollout.group_id,
        "sample_id": rollout.sample_id,
        "finish": rollout.finish,
        "score": rollout.score if math.isfinite(rollout.score) else None,
        "tokens": len(rollout.columns["token"]),
    }


def _careful(notify: Callable[[str], None]) -> Callable[[str], None]:
    """A `notify` that never raises."""

    def told(text: str) -> None:
        with suppress(Exception):
            notify(redact(text))

    return told
