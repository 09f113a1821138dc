"""A pool of rollout workers behind the engine protocol: chunks of prompts are dealt to whoever is free.

A chunk is always decoded together (see `chunks.py`), and its samples depend on the seed, the prompts' ids and the
samples' indices alone. So the rollouts have the same bits for any number of workers, and a chunk whose worker died is
sampled again elsewhere: same seeds, same tokens. A chunk that takes long is given to a second worker; the first answer
is taken.

Each worker has a thread here. `sample` of `messages.Sampler` makes sure that the worker holds the weights asked for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tether.errors import TetherError, WorkersLost
from tether.protocols import AsyncRolloutEngine, PendingRollouts, Sampling
from tether.rollout.chunks import chunks_of, numbered
from tether.rollout.messages import ChunkRequest, Sampler, WorkerGone, check_prompts, prompt_ids_of
from tether.rollout.native import check_request, check_rollouts
from tether.rollout.weights import Snapshot, Snapshots
from tether.types import Prompt, Rollout

FIRST_WAIT, MAX_WAIT = 0.2, 5.0  # seconds before a worker that is down is tried again
POLL = 0.25  # seconds between two looks at whether a chunk is late
MAX_LOSSES = 20  # workers that one chunk may lose: prompts that make every worker run out of memory end the run


@dataclass(eq=False)
class _Chunk:
    """Prompts of one call that are sampled together."""

    call: _Call
    number: int
    places: list[int]
    request: ChunkRequest
    prompt_ids: list[list[int]]
    runners: dict[str, float] = field(default_factory=dict[str, float])  # since when, by name of worker
    losses: int = 0
    rollouts: list[Rollout] | None = None


class _Call:
    """One call of `generate` or `submit`."""

    def __init__(self, snapshot: Snapshot, samples_per_prompt: int) -> None:
        self.snapshot, self.samples_per_prompt = snapshot, samples_per_prompt
        self.chunks: list[_Chunk] = []
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.error is not None or all(chunk.rollouts is not None for chunk in self.chunks)


class RolloutPool(AsyncRolloutEngine):
    """Samples on workers. They can be added and removed while a run goes on.

    `hedge_seconds` is after how long a chunk is given to a second worker too (0: never), and `patience` how long the
    pool waits for a worker where none is left. `counts` says how often what happened.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        tokenizer: Any,
        *,
        chunk: int,
        hedge_seconds: float = 0.0,
        patience: float = 60.0,
    ) -> None:
        self.snapshots, self.tokenizer, self.chunk = snapshots, tokenizer, chunk
        self.hedge_seconds, self.patience = hedge_seconds, patience
        self.counts: Counter[str] = Counter()  # lost, hedged, connected
        self._changed = threading.Condition()
        self._queue: deque[_Chunk] = deque()
        self._running: list[_Chunk] = []
        self._lanes: dict[str, _Lane] = {}
        self._closed = False

    # -- workers ------------------------------------------------------------------------------------------------------

    def add(self, sampler: Sampler) -> None:
        """Use this worker from now on."""
        with self._changed:
            if sampler.name in self._lanes:
                raise ValueError(f"{sampler.name} is in the pool already: remove it first")
            lane = self._lanes[sampler.name] = _Lane(self, sampler)
        lane.start()

    def remove(self, name: str) -> None:
        """Use this worker no longer. The chunk that it has is sampled elsewhere."""
        with self._changed:
            lane = self._lanes.pop(name, None)
            if lane is None:
                raise ValueError(
                    f"no worker of the pool is called {name}: there are {', '.join(self._lanes) or 'none'}"
                )
            lane.is_removed = True
            for chunk in list(self._running):
                if chunk.runners.pop(name, None) is not None:
                    self._put_back(chunk)
            self._changed.notify_all()
        lane.sampler.close()

    @property
    def names(self) -> list[str]:
        """The workers, also those that are down."""
        with self._changed:
            return list(self._lanes)

    def close(self) -> None:
        """End the workers that the run started, and forget the others."""
        with self._changed:
            self._closed = True
            lanes, self._lanes = list(self._lanes.values()), {}
            self._changed.notify_all()
        for lane in lanes:
            lane.is_removed = True
            lane.sampler.close()

    # -- the engine ---------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> list[Rollout]:
        """The rollouts, by the weights that the policy has now."""
        return self.submit(prompts, sampling, samples_per_prompt=samples_per_prompt, seed=seed)()

    def submit(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, samples_per_prompt: int, seed: int
    ) -> PendingRollouts:
        """Start to sample; the weights are copied before this returns."""
        check_request(prompts, samples_per_prompt)
        ids = prompt_ids_of(prompts, self.tokenizer)
        call = _Call(self.snapshots.take(self.policy_version), samples_per_prompt)
        for number, places in enumerate(chunks_of(prompts, self.chunk)):
            chosen = tuple(prompts[place] for place in places)
            request = ChunkRequest(chosen, sampling, samples_per_prompt, seed)
            call.chunks.append(_Chunk(call, number, places, request, [ids[place] for place in places]))
        with self._changed:
            self._queue.extend(call.chunks)
            self._changed.notify_all()
        return lambda: self._wait(call)

    def _wait(self, call: _Call) -> list[Rollout]:
        """The rollouts of all chunks, in the order of the prompts."""
        with self._changed:
            idle_since = time.monotonic()
            while not call.is_over:
                if self._closed:
                    call.error = WorkersLost("the rollout workers were ended before they had sampled everything")
                    break
                if any(not lane.down for lane in self._lanes.values()):
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > self.patience:
                    call.error = self._all_gone()
                    break
                self._changed.wait(POLL)
            self._queue = deque(chunk for chunk in self._queue if chunk.call is not call)
            self._running = [chunk for chunk in self._running if chunk.call is not call]
        self.snapshots.drop(call.snapshot)
        if call.error is not None:
            raise call.error
        found = [rollout for chunk in call.chunks for rollout in chunk.rollouts or ()]
        return sorted(found, key=lambda rollout: rollout.group_id)  # stable: samples of a prompt stay in order

    def _all_gone(self) -> WorkersLost:
        reasons = "; ".join(f"{lane.down}" for lane in self._lanes.values()) or "the pool is empty"
        return WorkersLost(
            f"no rollout worker is left, and none came back within rollout.worker_patience {self.patience:g} s "
            f"({reasons}): start one and resume the run"
        )

    # -- what the lanes do, in their threads --------------------------------------------------------------------------

    def take(self, lane: _Lane) -> _Chunk | None:
        """The next chunk for a free worker: one that waits, or one that is late elsewhere. None once it must go."""
        name = lane.sampler.name
        with self._changed:
            while not (self._closed or lane.is_removed):
                chunk = self._queue.popleft() if self._queue else self._late(name)
                if chunk is not None:
                    if chunk.runners:
                        self.counts["hedged"] += 1
                    else:
                        self._running.append(chunk)
                    chunk.runners[name] = time.monotonic()
                    return chunk
                self._changed.wait(POLL)
        return None

    def _late(self, name: str) -> _Chunk | None:
        """The chunk that another worker has had for longest, if that is too long."""
        if not self.hedge_seconds:
            return None
        alone = [chunk for chunk in self._running if len(chunk.runners) == 1 and name not in chunk.runners]
        oldest = min(alone, key=lambda chunk: min(chunk.runners.values()), default=None)
        if oldest is None or time.monotonic() - min(oldest.runners.values()) < self.hedge_seconds:
            return None
        return oldest

    def give(self, lane: _Lane, chunk: _Chunk, rollouts: list[Rollout]) -> None:
        """A worker has sampled a chunk; where another one was first, this answer is not needed."""
        call, name = chunk.call, lane.sampler.name
        check_rollouts(lane.sampler, rollouts, chunk.request.prompts, call.samples_per_prompt)
        check_prompts(rollouts, chunk.prompt_ids, name)
        with self._changed:
            chunk.runners.pop(name, None)
            if chunk.rollouts is None:
                chunk.rollouts = numbered(rollouts, chunk.places, call.samples_per_prompt)
                self._running = [each for each in self._running if each is not chunk]
            self._changed.notify_all()

    def lose(self, lane: _Lane, chunk: _Chunk, error: WorkerGone) -> None:
        """A worker is gone with a chunk."""
        with self._changed:
            self.counts["lost"] += 1
            chunk.losses += 1
            if chunk.losses >= MAX_LOSSES:
                chunk.call.error = WorkersLost(
                    f"the chunk with prompt {chunk.request.prompts[0].id!r} lost {chunk.losses} workers, the last one "
                    f"because {error}: raise rollout.worker_timeout, or lower "
                    "distributed.rollout_chunk or rollout.max_num_seqs, and resume the run"
                )
            if chunk.runners.pop(lane.sampler.name, None) is not None:
                self._put_back(chunk)
            self._changed.notify_all()

    def fail(self, chunk: _Chunk, error: BaseException) -> None:
        """An error that every worker would meet, or one of Tether's own: the call ends with it."""
        with self._changed:
            chunk.call.error = error
            self._changed.notify_all()

    def note(self, lane: _Lane, down: str) -> None:
        """A worker is up (empty), or why it is not."""
        with self._changed:
            self.counts["connected"] += not down
            lane.down = down
            self._changed.notify_all()

    def _put_back(self, chunk: _Chunk) -> None:
        if chunk.rollouts is None and chunk.call.error is None and not chunk.runners:
            self._running = [each for each in self._running if each is not chunk]
            self._queue.appendleft(chunk)


class _Lane(threading.Thread):
    """The thread of one worker: connect, take a chunk, have it sampled; repeat."""

    def __init__(self, pool: RolloutPool, sampler: Sampler) -> None:
        super().__init__(daemon=True, name="tether-rollout-worker")
        self.pool, self.sampler = pool, sampler
        self.down = ""  # why it cannot be used; empty where it can, or is starting
        self.is_removed = False

    def run(self) -> None:
        """Until it is removed."""
        while not self.is_removed:
            if not self._connect():
                return
            while (chunk := self.pool.take(self)) is not None:
                try:
                    self.pool.give(self, chunk, self.sampler.sample(chunk.request, chunk.call.snapshot))
                except WorkerGone as error:
                    self.pool.lose(self, chunk, error)
                    break
                except TetherError as error:
                    self.pool.fail(chunk, error)
                except ValueError as error:
                    self.pool.lose(self, chunk, WorkerGone(f"{self.sampler.name} sent what cannot be read ({error})"))
                    break
                except BaseException as error:
                    self.pool.fail(chunk, error)

    def _connect(self) -> bool:
        """Whether it is up, waiting for it as long as it is in the pool."""
        wait = FIRST_WAIT
        while not self.is_removed:
            try:
                self.sampler.connect()
            except WorkerGone as error:
                self.pool.note(self, str(error))
            except BaseException as error:  # a bug, or an operating system that starts no process
                self.pool.note(self, f"{self.sampler.name}: {type(error).__name__}: {error}")
            else:
                self.pool.note(self, "")
                if self.is_removed:
                    self.sampler.close()  # it was removed while it started
                return not self.is_removed
            time.sleep(wait)
            wait = min(wait * 2, MAX_WAIT)
        return False
