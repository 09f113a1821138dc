"""Rate limits: one token bucket for each client. A request takes a token; time refills the bucket."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock

MAX_BUCKETS = 10_000
IPV6_PREFIX = 64  # one customer's network: its owner can use every address in it


@dataclass(frozen=True)
class Rate:
    """A bucket of `burst` requests that refills at `per_second`."""

    per_second: float
    burst: int


class RateLimit:
    """One bucket for each key; thread-safe. The least recently used key is dropped first."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # tokens left, and at what time
        self._lock = Lock()

    def take(self, key: Hashable) -> int:
        """Take one request; returns 0 if it is granted, else the whole seconds to wait before the next try."""
        with self._lock:
            level, now = self._level(key)
            granted = level >= 1.0
            self._keep(key, level - 1.0 if granted else level, now)
            return 0 if granted else max(1, math.ceil((1.0 - level) / self._rate.per_second))

    def give_back(self, key: Hashable) -> None:
        """Undo one `take`."""
        with self._lock:
            level, now = self._level(key)
            self._keep(key, min(float(self._rate.burst), level + 1.0), now)

    def _level(self, key: Hashable) -> tuple[float, float]:
        now = self._clock()
        level, then = self._levels.pop(key, (float(self._rate.burst), now))
        return min(float(self._rate.burst), level + (now - then) * self._rate.per_second), now

    def _keep(self, key: Hashable, level: float, now: float) -> None:
        self._levels[key] = (level, now)
        if len(self._levels) > MAX_BUCKETS:
            self._levels.popitem(last=False)


def network_of(address: str) -> str:
    """The key for an unknown client: an IPv4 address itself, or the /64 network of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), IPV6_PREFIX), strict=False))
