"""One rollout as bytes, and back, bit for bit.

    version (1 byte) | zlib( header length (4 bytes) | header | column | column | ... | top_logprobs )

The header is JSON: the texts, the pieces, the numbers of the whole rollout, and which columns follow. Version 2 may
have top_logprobs after them: how many at each token, a byte each, then the ids and the log-probs of all. A column of
bools is packed to bits. A column of numbers is written plane by plane, the first bytes of all tokens before their
second bytes: neighbouring log-probs share their sign and exponent, so that the planes of high bytes nearly vanish.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np

from tether.errors import StorageError
from tether.store.recorded import TOKEN_COLUMNS, Column, StoredRollout, TopLogprobs

VERSION = 2
READABLE = (1, 2)
LEVEL = 1  # of zlib: the higher ones take several times as long for a few per cent
MAX_BYTES = 256 << 20  # of one rollout once it is inflated: a million tokens with all their columns have 100 MB
MAX_STEP_BYTES = 4 << 30  # of the rollouts of one step together
_DAMAGED = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, struct.error, zlib.error)


def encode_rollout(rollout: StoredRollout) -> bytes:
    """A rollout's texts and columns; its step, row, group, sample, finish and score are columns of the database."""
    names, others = [name for name in TOKEN_COLUMNS if name in rollout.columns], rollout.top_logprobs
    header = json.dumps(
        {
            "length": len(rollout.columns["token"]),
            "columns": names,
            "prompt_id": rollout.prompt_id,
            "prompt": rollout.prompt_text,
            "messages": [dict(message) for message in rollout.messages],
            **({"tools": [dict(tool) for tool in rollout.tools]} if rollout.tools else {}),
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
    """What `encode_rollout` was given. Raises StorageError where the bytes are damaged, or inflate to too much."""
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
        )
    except _DAMAGED as error:
        raise StorageError(f"the tokens of step {step}, sample {row} are damaged in the run store ({error})") from None


def inflated_size(rollout: StoredRollout) -> int:
    """About how much memory a rollout's columns and texts take."""
    columns = sum(column.nbytes for column in rollout.columns.values())
    return columns + len(rollout.prompt_text) + len(rollout.completion) + 16 * len(rollout.pieces)


def _inflate(content: bytes) -> bytes:
    """The bytes that zlib packed, as long as they are not too many: a few megabytes can stand for gigabytes."""
    reader = zlib.decompressobj()
    body = reader.decompress(content, MAX_BYTES)
    if reader.unconsumed_tail:
        raise ValueError(f"they inflate to more than {MAX_BYTES >> 20} MiB")
    if not reader.eof:
        raise ValueError("they end too early")
    return body


def rollout_head_of(content: bytes) -> dict[str, Any]:
    """The header alone: `prompt_id`, `prompt`, `completion`, `pieces`, ...; the columns are not unpacked."""
    try:
        reader = zlib.decompressobj()
        start = reader.decompress(content[1:], 4)
        (size,) = struct.unpack("<I", start)
        if not 0 < size <= MAX_BYTES:
            raise ValueError(f"the header would have {size} bytes")
        header = json.loads(reader.decompress(reader.unconsumed_tail, size))
        if not isinstance(header, dict):
            raise ValueError("the header is no mapping")
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
        raise ValueError(f"{header['length']!r} is no number of tokens")
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
    """A column and where the next one starts."""
    width = np.dtype(kind).itemsize
    size = (length + 7) // 8 if kind == "bool" else width * length
    part = np.frombuffer(body, dtype=np.uint8, count=size, offset=place)
    if kind == "bool":
        return np.unpackbits(part, count=length).astype(bool), place + size
    values = np.ascontiguousarray(part.reshape(width, length).T).view(np.dtype(kind).newbyteorder("<")).reshape(length)
    return values.astype(kind), place + size
