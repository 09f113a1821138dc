"""Where votes are handed in: those that arrive while one is being written are written together, by one commit.

A commit waits for the disk, and twenty raters who press a key at once would wait for each other's. Here the first is
written at once, and all that come meanwhile are the next transaction. Each is answered only when its own commit is on
disk.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tether.studio.label_store import Ballot, Labels
from tether.studio.people import Person

MOST_TOGETHER = 64
READERS = 2  # more of them only get into each other's way: what they do is mostly Python


@dataclass(frozen=True)
class _Sent:
    person: Person
    ballot: Ballot
    kept: Future[int] = field(default_factory=Future)


class VoteDesk:
    """One writer for all votes of a server, and a few readers for what comes next."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._waiting: deque[_Sent] = deque()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="votes")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="next-items")

    def ask(self, person: Person, queue_id: int) -> Future[dict[str, Any]]:
        """What to judge next, as `Labels.next_item` has it."""
        return self._readers.submit(self._labels.next_item, person, queue_id)

    def hand_in(self, person: Person, ballot: Ballot) -> Future[int]:
        """The vote's id, once it is on disk; or why it was refused."""
        sent = _Sent(person, ballot)
        self._waiting.append(sent)
        self._writer.submit(self._write_waiting)
        return sent.kept

    def close(self) -> None:
        """Write what was handed in, and end."""
        self._writer.shutdown()
        self._readers.shutdown()

    def _write_waiting(self) -> None:
        """Write all that wait; a later call, for a vote that this one took along, finds nothing to do."""
        together = [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]
        if not together:
            return
        try:
            results = self._labels.vote_together([(sent.person, sent.ballot) for sent in together])
        except Exception as error:  # whatever it is, it is the answer that those who wait get
            results = [error] * len(together)
        for sent, result in zip(together, results, strict=True):
            if isinstance(result, Exception):
                sent.kept.set_exception(result)
            else:
                sent.kept.set_result(result)
