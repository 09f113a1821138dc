"""The process group: values between ranks as bytes, and one clear end when a rank is lost.

Values travel as JSON and safetensors, never as pickles. Every exchange begins with a status of each rank, so that an
error on one rank is raised on all of them, in the same exchange.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from tether.distributed.heartbeat import Heartbeat
from tether.distributed.launch import starts_again
from tether.distributed.rendezvous import attempt_store, shared_store
from tether.errors import RankLost, StorageError, TetherError, judge
from tether.learner.batching import is_out_of_memory
from tether.learner.ranks import Codec, Packed
from tether.user_code import end_process

T = TypeVar("T")

WELL, OUT_OF_MEMORY, FAILED = 0, 1, 2
# A rank that dies closes its connections, which ends every exchange at once. A rank that does not answer is missed by
# its neighbors' heartbeats, and one that hangs is ended by run.hang_timeout of rank 0. So waiting has no limit of its
# own that a slow reward could reach.
PATIENCE = timedelta(days=7)
LAST_WORDS = 2.0  # seconds in which a rank that failed says why


class PeerFailed(TetherError):  # noqa: N818 (another rank's state)
    """Another rank raised an error, which that rank reports."""


class RankOutOfMemory(torch.OutOfMemoryError):
    """Some rank ran out of memory, and every rank knows."""


def is_agreed(error: BaseException) -> bool:
    """Whether every rank raises because of this error, so that nobody has to be told of it."""
    known = isinstance(error, RankLost | PeerFailed | RankOutOfMemory)
    return known or getattr(error, "agreed_by_ranks", False)


class ProcessGroup:
    """All ranks of a run, connected."""

    def __init__(self) -> None:
        self.index, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", "0"))
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        if cuda:
            torch.cuda.set_device(local % torch.cuda.device_count())
        self.shared = shared_store(self.index, self.count)
        self.words = attempt_store(self.shared, self.index, self.count)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=self.words,
            rank=self.index,
            world_size=self.count,
            timeout=PATIENCE,
        )
        self.heartbeat = Heartbeat(self.index, self.count, self._end_for_silence)
        # Whether passes exchange something in their middle. Then a rank that fails there leaves the others waiting, and
        # has to end at once: the broken connection ends them.
        self.interleaved = False

    def close(self) -> None:
        """Leave the group; the other ranks have left it, or will, by themselves."""
        self.heartbeat.close()
        with suppress(Exception):
            dist.destroy_process_group()

    # -- one rank to all ----------------------------------------------------------------------------------------------

    def tell(self, value: Any, tensors: dict[str, Tensor] | None = None) -> None:
        """From rank 0, to whoever `hears`."""
        with self.connected():
            self._broadcast(_to_bytes((value, tensors or {})), 0)

    def hear(self) -> Packed:
        """What rank 0 tells."""
        with self.connected():
            return _from_bytes(self._broadcast(None, 0))

    def tell_tensors(self, tensors: Sequence[Tensor]) -> None:
        """From rank 0, tensors on the host whose types and shapes the others know, one by one."""
        with self.connected():
            for tensor in tensors:
                if tensor.numel():
                    dist.broadcast(_as_bytes(tensor), 0)

    def hear_tensors(self, empty: Sequence[Tensor]) -> None:
        """Fill these tensors with what rank 0 tells."""
        self.tell_tensors(empty)

    def _broadcast(self, content: Tensor | None, source: int) -> Tensor:
        length = torch.tensor([0 if content is None else len(content)])
        dist.broadcast(length, source)
        found = torch.empty(int(length), dtype=torch.uint8) if content is None else content
        if len(found):
            dist.broadcast(found, source)
        return found

    # -- all ranks to all ---------------------------------------------------------------------------------------------

    def merged(self, work: Callable[[], Sequence[tuple[int, T]]], codec: Codec[T]) -> list[T]:
        """See `Ranks.merged`."""
        error: BaseException | None = None
        content = torch.empty(0, dtype=torch.uint8)
        try:
            found = list(work())
            if found:
                content = _pack_all(found, codec)
        except Exception as raised:
            if is_agreed(raised):
                raise
            if self.interleaved:
                raise self._lost_in_pass(raised) from raised
            error = raised
        self.check(error, len(content))
        pieces: list[tuple[int, T]] = []
        with self.connected():
            for rank in range(self.count):
                if self.lengths[rank]:
                    mine = content if rank == self.index else torch.empty(self.lengths[rank], dtype=torch.uint8)
                    dist.broadcast(mine, rank)
                    pieces += _unpack_all(mine, codec)
        return [piece for _, piece in sorted(pieces, key=lambda piece: piece[0])]

    def _lost_in_pass(self, error: Exception) -> Exception:
        """What to raise for an error between two exchanges of a pass: a rank that is gone is one of them."""
        if "gloo" in str(error) or isinstance(error, dist.DistError):
            return self._lost()
        if is_out_of_memory(error):
            error = StorageError(
                f"rank {self.index} ran out of memory in a pass, which ranks that share weights cannot repeat: lower "
                "optimizer.micro_batch_tokens"
            )
        self.report(error)
        return error

    def check(self, error: BaseException | None, length: int = 0) -> None:
        """Exchange how each rank is, and raise on all where one of them failed; `lengths` are what each rank gave."""
        status = WELL if error is None else OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        statuses, self.lengths = self.all_numbers(status, length)
        if FAILED in statuses:
            if status == FAILED and error is not None:
                self.report(error)
                error.agreed_by_ranks = True  # pyright: ignore[reportAttributeAccessIssue]
                raise error
            raise PeerFailed(self.last_words(statuses.index(FAILED)))
        if OUT_OF_MEMORY in statuses:
            raise RankOutOfMemory(f"rank {statuses.index(OUT_OF_MEMORY)} ran out of memory")

    def all_numbers(self, *numbers: int) -> tuple[list[int], ...]:
        """For each number, what every rank gave."""
        with self.connected():
            mine = torch.tensor(numbers)
            everyone = [torch.empty_like(mine) for _ in range(self.count)]
            dist.all_gather(everyone, mine)
        return tuple([int(number) for number in column] for column in torch.stack(everyone).T)

    # -- when a rank is lost ------------------------------------------------------------------------------------------

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Turn the error of a broken connection into a sentence."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise self._lost() from error

    def _lost(self) -> RankLost:
        return RankLost(
            self._anyones_words()
            or f"another rank ended in the middle of a step (killed, or its machine went away){advice()}"
        )

    def _end_for_silence(self, rank: int, seconds: float) -> None:
        """End this process, whose main thread waits for a rank that is silent; all others then end as well."""
        lost = RankLost(f"rank {rank} has not answered for {seconds:g} s (distributed.timeout){advice()}")
        self.report(lost)
        if 0 in (rank, self.index):  # else rank 0 says it
            print(f"tether: {lost}", file=sys.stderr, flush=True)
        end_process(RankLost.exit_code)

    def report(self, error: BaseException) -> None:
        """Leave word of why this rank ends, for rank 0 to say."""
        with suppress(Exception):
            message, code = judge(error)
            self.words.set(_words(self.index), json.dumps({"message": message, "code": code}))

    def last_words(self, rank: int) -> str:
        """Why another rank ended, in a sentence."""
        with suppress(Exception):
            self.words.wait([_words(rank)], timedelta(seconds=LAST_WORDS))
            return f"rank {rank}: {json.loads(self.words.get(_words(rank)))['message']}"
        return f"rank {rank} ended without saying why"

    def _anyones_words(self) -> str:
        for rank in range(self.count):
            with suppress(Exception):
                if rank != self.index and self.words.check([_words(rank)]):
                    return self.last_words(rank)
        return ""


def _words(rank: int) -> str:
    """The key under which a rank says why it ends."""
    return f"words/{rank}"


def advice() -> str:
    """What the user does about a lost rank, unless the launcher does it."""
    return "" if starts_again() else ": resume the run, with as many ranks as you like"


# -- bytes ------------------------------------------------------------------------------------------------------------


def _to_bytes(packed: Packed) -> Tensor:
    value, tensors = packed
    separate = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    # safetensors writes no file without a tensor.
    content = save({"": torch.empty(0), **separate}, metadata={"json": json.dumps(value)})
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _from_bytes(content: Tensor) -> Packed:
    data = content.numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    value = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["json"])
    tensors = load(data)
    del tensors[""]
    return value, tensors


def _pack_all(found: Sequence[tuple[int, T]], codec: Codec[T]) -> Tensor:
    values: list[Any] = []
    columns: dict[str, Tensor] = {}
    for place, (number, each) in enumerate(found):
        value, tensors = codec.pack(each)
        values.append([number, value, list(tensors)])
        columns |= {f"{place}/{name}": tensor for name, tensor in tensors.items()}
    return _to_bytes((values, columns))


def _unpack_all(content: Tensor, codec: Codec[T]) -> list[tuple[int, T]]:
    values, columns = _from_bytes(content)
    return [
        (number, codec.unpack(value, {name: columns[f"{place}/{name}"] for name in names}))
        for place, (number, value, names) in enumerate(values)
    ]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
