"""How often someone may ask: a bucket for each, which empties by a request and fills with time."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from tether.studio.settings import Rate

MOST_BUCKETS = 10_000


class Buckets:
    """One bucket for each key. A key that was not seen for long is forgotten: its bucket is full again anyway."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # what is left, and as of when

    def take(self, key: Hashable) -> int:
        """Take one request; 0 where it is granted, else the whole seconds after which to try again."""
        now = self._clock()
        level, then = self._levels.pop(key, (float(self._rate.burst), now))
        level = min(float(self._rate.burst), level + (now - then) * self._rate.per_second)
        granted = level >= 1.0
        self._levels[key] = (level - 1.0 if granted else level, now)
        if len(self._levels) > MOST_BUCKETS:
            self._levels.popitem(last=False)
        return 0 if granted else max(1, math.ceil((1.0 - level) / self._rate.per_second))
