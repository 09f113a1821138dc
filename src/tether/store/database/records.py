"""What is written to the store, as values: each is applied in one transaction, and can wait in a file until then."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tether.store.database.schema import without_infinities

MAGIC = b"TETHER1\n"
Kind = Literal["start", "step", "event", "rewind", "state"]


@dataclass(frozen=True)
class RecordSource:
    """Something a run was made from: a model, a reward model, a critic's start, data, the run it was forked from."""

    role: str
    source: str  # a path or a name, as the recipe has it
    run: str | None = None  # its name, where it is a run of the same workspace
    sha256: str | None = None  # of a file of data


@dataclass(frozen=True)
class StoreRecord:
    """One change to the store. `data` is JSON; `blobs` are the encoded rollouts of a step, in order."""

    kind: Kind
    data: Mapping[str, Any]
    blobs: Sequence[bytes] = field(default=())

    def to_bytes(self) -> bytes:
        """Self-contained, with a checksum at the end."""
        header = {"kind": self.kind, "data": self.data, "blobs": [len(blob) for blob in self.blobs]}
        head = json.dumps(without_infinities(header), allow_nan=False, default=str).encode("ascii")
        body = b"".join([MAGIC, struct.pack("<I", len(head)), head, *self.blobs])
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, content: bytes) -> StoreRecord:
        """Raises ValueError where anything is missing or altered."""
        body, digest = content[:-32], content[-32:]
        if not body.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
            raise ValueError("not a whole record")
        start = len(MAGIC) + 4
        try:
            (size,) = struct.unpack_from("<I", body, len(MAGIC))
            header = json.loads(body[start : start + size])
            place, blobs = start + size, []
            for length in header["blobs"]:
                blobs.append(body[place : place + length])
                place += length
            return cls(header["kind"], header["data"], tuple(blobs))
        except (
            KeyError,
            TypeError,
            struct.error,
            RecursionError,
        ) as error:  # its sum is right
            raise ValueError(f"not a whole record ({type(error).__name__})") from error


def plain(text: str) -> str:
    """Text that every database takes: without NUL, and without halves of characters."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
