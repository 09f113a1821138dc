"""The records of a run as values, which reports, audits and exports read, and the encoding of one rollout.

A rollout is encoded without loss:

    version (1 byte) | zlib( header length (4 bytes) | header | column | column | ... | top_logprobs )

The header is JSON: the texts, the text of each token, the numbers of the whole rollout, and the names of the columns.
Version 2 may have top_logprobs at the end: one byte per token with their count, then all ids, then all log-probs. A
column of bools is packed to bits. A column of numbers is written in byte planes: the first bytes of all tokens, then
their second bytes, and so on. Neighbouring log-probs share their sign and exponent, so the high planes compress well.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.errors import StorageError

Column = NDArray[Any]

TOKEN_COLUMNS: dict[str, str] = {
    "token": "int32",
    "response": "bool",  # the policy sampled this token
    "behavior_logprob": "float32",
    "untruncated_logprob": "float32",
    "old_logprob": "float32",
    "ref_logprob": "float32",
    "value": "float32",
    "reward": "float32",
    "advantage": "float32",
    "return": "float32",
    "ratio": "float32",  # new / old, in the last pass of the update over this token
    "clipped": "bool",  # whether the clip removed this token's gradient in that pass
    "entropy": "float32",  # of the policy that sampled, in nats
}
"""The columns that a rollout may have, with their stored types. `ref_logprob`, `value`, `return`, `ratio` and `clipped`
are absent without a reference, a critic or a clip. `entropy` is absent in rollouts of older versions."""


@dataclass(frozen=True)
class TopLogprobs:
    """The most likely tokens at each of T positions, grouped by position, the likeliest first."""

    counts: Column  # (T,) uint8, how many there are at each position; 0 off the answer
    tokens: Column  # (N,) int32, of all positions
    logprobs: Column  # (N,) float16, for display
    texts: Mapping[int, str]  # the text of each token id

    def at_each(self) -> list[list[tuple[str, float]]]:
        """(T,) lists of (text, log-prob)."""
        told = [
            (self.texts.get(token, ""), round(float(logprob), 3))
            for token, logprob in zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        ]
        ends = np.cumsum(self.counts, dtype=np.int64).tolist()
        return [told[end - count : end] for end, count in zip(ends, self.counts.tolist(), strict=True)]


@dataclass(frozen=True)
class StoredRollout:
    """One rollout of one step with its token columns, each of length T = prompt + answer tokens."""

    step: int
    row: int  # index in the step's batch
    prompt_id: str
    group_id: int
    sample_id: int
    prompt_text: str
    completion: str
    finish: str
    score: float
    temperature: float
    columns: Mapping[str, Column]
    pieces: Sequence[str]  # (T,) the text of each token
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    final_value: float | None = None
    top_logprobs: TopLogprobs | None = None
    messages: Sequence[Mapping[str, Any]] = ()  # the messages of the prompt; empty in rollouts of older versions
    tools: Sequence[Mapping[str, Any]] = ()  # the tools of the prompt
    policy_version: int | None = None  # of the policy that sampled it; None: the policy of its step

    @property
    def staleness(self) -> int:
        """The number of steps by which the policy that sampled it is older than that of its step."""
        return 0 if self.policy_version is None else self.step - self.policy_version

    @property
    def kl(self) -> Column | None:
        """(T,) old - ref log-prob, the k1 estimate of the KL to the reference; 0 off the answer."""
        if "ref_logprob" not in self.columns:
            return None
        difference = self.columns["old_logprob"] - self.columns["ref_logprob"]
        return np.where(self.columns["response"], difference, np.float32(0.0))

    def answer(self, name: str) -> Column:
        """One column, restricted to the answer's tokens."""
        return self.columns[name][self.columns["response"]]


@dataclass(frozen=True)
class Event:
    """An event of a run: started, resumed, checkpoint, skipped, finding, ..."""

    time: float  # seconds since 1970
    kind: str
    text: str
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])


NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.float64))
"""The steps and values of a metric that was never recorded."""


@dataclass(frozen=True)
class RecordedRun:
    """A whole run. `metrics` has one mapping per step, in order, with its "step"; non-finite values are NaN."""

    name: str
    method: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float]]
    events: Sequence[Event] = ()
    rollout_steps: Sequence[int] = ()  # the steps whose rollouts were kept
    rollouts: Callable[[int], Sequence[StoredRollout]] = lambda step: ()  # noqa: ARG005 (none were kept)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of one metric, for the steps that have it."""
        steps, values = self.series.get(name, NOTHING)
        return steps.tolist(), values.tolist()

    @cached_property
    def series(self) -> Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """(steps, values) of every metric, in order of first appearance; computed once."""
        found: dict[str, tuple[list[float], list[float]]] = {}
        for row in self.metrics:
            step = row["step"]
            for name, value in row.items():
                if name not in found:
                    found[name] = ([], [])
                steps, values = found[name]
                steps.append(step)
                values.append(value)
        return {
            name: (np.array(steps, np.int64), np.array(values, np.float64)) for name, (steps, values) in found.items()
        }


# -- encoding of a rollout ----------------------------------------------------------------------------------------

VERSION = 2
READABLE = (1, 2)
LEVEL = 1  # of zlib: higher levels take several times as long and save a few per cent
MAX_BYTES = 256 << 20  # of one decompressed rollout: a million tokens with all columns have 100 MB
MAX_STEP_BYTES = 4 << 30  # of all decompressed rollouts of one step
_DAMAGED = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, struct.error, zlib.error)


def encode_rollout(rollout: StoredRollout) -> bytes:
    """Encode a rollout's texts and columns; step, row, group, sample, finish and score are database columns."""
    names, others = [name for name in TOKEN_COLUMNS if name in rollout.columns], rollout.top_logprobs
    header = json.dumps(
        {
            "length": len(rollout.columns["token"]),
            "columns": names,
            "prompt_id": rollout.prompt_id,
            "prompt": rollout.prompt_text,
            "messages": [dict(message) for message in rollout.messages],
            **({"tools": [dict(tool) for tool in rollout.tools]} if rollout.tools else {}),
            **({"policy_version": rollout.policy_version} if rollout.staleness else {}),
            "completion": rollout.completion,
            "pieces": list(rollout.pieces),
            "temperature": rollout.temperature,
            "final_value": rollout.final_value,
            "parts": dict(rollout.parts),
            "top_logprobs": None if others is None else {str(token): text for token, text in others.texts.items()},
        },
        separators=(",", ":"),
    ).encode("ascii")
    body = [struct.pack("<I", len(header)), header]
    body += [_packed(rollout.columns[name], TOKEN_COLUMNS[name]) for name in names]
    if others is not None:
        body += [others.counts.tobytes(), _packed(others.tokens, "int32"), _packed(others.logprobs, "float16")]
    return bytes([VERSION]) + zlib.compress(b"".join(body), LEVEL)


def decode_rollout(
    content: bytes, *, step: int, row: int, group_id: int, sample_id: int, finish: str, score: float
) -> StoredRollout:
    """Decode the result of `encode_rollout`. Raises StorageError if it is damaged or decompresses to too much."""
    try:
        header, columns, top_logprobs = _opened(content)
        return StoredRollout(
            step=step,
            row=row,
            prompt_id=header["prompt_id"],
            group_id=group_id,
            sample_id=sample_id,
            prompt_text=header["prompt"],
            completion=header["completion"],
            finish=finish,
            score=score,
            temperature=header["temperature"],
            columns=columns,
            pieces=header["pieces"],
            parts=header["parts"],
            final_value=header["final_value"],
            top_logprobs=top_logprobs,
            messages=tuple(header.get("messages", ())),
            tools=tuple(header.get("tools", ())),
            policy_version=header.get("policy_version"),
        )
    except _DAMAGED as error:
        raise StorageError(f"the tokens of step {step}, sample {row} are damaged in the run store ({error})") from None


def inflated_size(rollout: StoredRollout) -> int:
    """Approximate memory of a rollout's columns and texts, in bytes."""
    columns = sum(column.nbytes for column in rollout.columns.values())
    return columns + len(rollout.prompt_text) + len(rollout.completion) + 16 * len(rollout.pieces)


def _inflate(content: bytes) -> bytes:
    """Decompress with a size limit: a few megabytes of zlib data can expand to gigabytes."""
    reader = zlib.decompressobj()
    body = reader.decompress(content, MAX_BYTES)
    if reader.unconsumed_tail:
        raise ValueError(f"they decompress to more than {MAX_BYTES >> 20} MiB")
    if not reader.eof:
        raise ValueError("they end too early")
    return body


def rollout_head_of(content: bytes) -> dict[str, Any]:
    """Only the header: `prompt_id`, `prompt`, `completion`, `pieces`, ...; the columns are not decoded."""
    try:
        reader = zlib.decompressobj()
        start = reader.decompress(content[1:], 4)
        (size,) = struct.unpack("<I", start)
        if not 0 < size <= MAX_BYTES:
            raise ValueError(f"the header would have {size} bytes")
        header = json.loads(reader.decompress(reader.unconsumed_tail, size))
        if not isinstance(header, dict):
            raise ValueError("the header is not a mapping")
        return header
    except _DAMAGED as error:
        raise StorageError(f"the tokens of a rollout are damaged in the run store ({error})") from None


def _opened(content: bytes) -> tuple[dict[str, Any], dict[str, Column], TopLogprobs | None]:
    if content[0] not in READABLE:
        raise ValueError(f"written as version {content[0]}, which this Tether does not know")
    body = _inflate(content[1:])
    (size,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + size])
    if type(header["length"]) is not int or not 0 <= header["length"] <= MAX_BYTES:
        raise ValueError(f"{header['length']!r} is not a number of tokens")
    place, columns = 4 + size, {}
    for name in header["columns"]:
        columns[name], place = _unpacked(body, place, header["length"], TOKEN_COLUMNS[name])
    return header, columns, _top_logprobs(body, place, header)


def _top_logprobs(body: bytes, place: int, header: dict[str, Any]) -> TopLogprobs | None:
    texts = header.get("top_logprobs")
    if texts is None:
        return None
    counts = np.frombuffer(body, dtype=np.uint8, count=header["length"], offset=place)
    total = int(counts.sum(dtype=np.int64))
    tokens, place = _unpacked(body, place + len(counts), total, "int32")
    logprobs, _ = _unpacked(body, place, total, "float16")
    return TopLogprobs(counts, tokens, logprobs, {int(token): text for token, text in texts.items()})


def _packed(column: Column, kind: str) -> bytes:
    if kind == "bool":
        return np.packbits(column.astype(bool)).tobytes()
    values = np.ascontiguousarray(column, dtype=np.dtype(kind).newbyteorder("<"))
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).tobytes()


def _unpacked(body: bytes, place: int, length: int, kind: str) -> tuple[Column, int]:
    """A column and the offset of the next one."""
    width = np.dtype(kind).itemsize
    size = (length + 7) // 8 if kind == "bool" else width * length
    part = np.frombuffer(body, dtype=np.uint8, count=size, offset=place)
    if kind == "bool":
        return np.unpackbits(part, count=length).astype(bool), place + size
    values = np.ascontiguousarray(part.reshape(width, length).T).view(np.dtype(kind).newbyteorder("<")).reshape(length)
    return values.astype(kind), place + size
