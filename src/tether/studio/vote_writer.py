"""Where votes are handed in: those that arrive while one is being written are written together, by one commit.

A commit waits for the disk, and twenty raters who press a key at once would wait for each other's. Here the first is
written at once, and all that come meanwhile are the next transaction. Each is answered only when its own commit is on
disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

from tether.errors import StorageError
from tether.studio.label_store import CastVote, Labels
from tether.studio.people import Person

MAX_TOGETHER = 64
MAX_WAITING = 1000  # votes, and questions what to judge next
ANSWER_SECONDS = 25.0
BUSY = "the server is busy: try again in a moment"
READERS = 2  # more of them only get into each other's way: what they do is mostly Python


Found = TypeVar("Found")


async def _in_time(work: Future[Found]) -> Found:
    """What a thread comes to. A vote that is late may still be kept: sent again, with its uid, it is the same vote."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(work)), ANSWER_SECONDS)
    except TimeoutError:
        raise StorageError("the store does not answer: try again in a moment") from None


@dataclass(frozen=True)
class _Sent:
    person: Person
    vote: CastVote
    kept: Future[int] = field(default_factory=Future)


class VoteWriter:
    """One writer for all votes of a server, and a few readers for what comes next."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._waiting: deque[_Sent] = deque()
        self._asking, self._lock = 0, Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="votes")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="next-items")

    async def ask(self, person: Person, queue_id: int) -> dict[str, Any]:
        """What to judge next, as `Labels.next_item` has it."""
        if self._asking >= MAX_WAITING:
            raise StorageError(BUSY)
        with self._lock:
            self._asking += 1
        asked = self._readers.submit(self._labels.next_item, person, queue_id)
        asked.add_done_callback(self._was_asked)
        return await _in_time(asked)

    def _was_asked(self, _: Future[dict[str, Any]]) -> None:
        with self._lock:
            self._asking -= 1

    async def hand_in(self, person: Person, vote: CastVote) -> int:
        """The vote's id, once it is on disk; or why it was refused."""
        return await _in_time(self.put(person, vote))

    def put(self, person: Person, vote: CastVote) -> Future[int]:
        """Hand a vote in without waiting for it."""
        if len(self._waiting) >= MAX_WAITING:
            raise StorageError(BUSY)
        sent = _Sent(person, vote)
        self._waiting.append(sent)
        self._writer.submit(self._write_waiting)
        return sent.kept

    def close(self) -> None:
        """Write what was handed in, and end."""
        self._writer.shutdown()
        self._readers.shutdown()

    def _write_waiting(self) -> None:
        """Write all that wait; a later call, for a vote that this one took along, finds nothing to do."""
        together = [self._waiting.popleft() for _ in range(min(MAX_TOGETHER, len(self._waiting)))]
        if not together:
            return
        try:
            results = self._labels.vote_together([(sent.person, sent.vote) for sent in together])
        except Exception as error:  # whatever it is, it is the answer that those who wait get
            results = [error] * len(together)
        for sent, result in zip(together, results, strict=True):
            if isinstance(result, Exception):
                sent.kept.set_exception(result)
            else:
                sent.kept.set_result(result)
