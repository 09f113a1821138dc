"""Random streams by name. Each use has a seed of its own, derived and never advanced, so there is no state to lose."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream called by `names` in the run seeded `seed`; the same on every machine."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
