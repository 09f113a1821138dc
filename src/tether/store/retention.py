"""Which steps' rollouts are kept: they are most of what a run writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KeepRollouts:
    """`every`: the rollouts of every so many steps, 1 for all and 0 for none. `most`: of at most so many steps."""

    every: int = 1
    most: int | None = 200  # None: however many there are

    def wants(self, step: int) -> bool:
        """Whether a step's rollouts are written at all."""
        return self.every > 0 and step % self.every == 0

    def to_drop(self, steps: Sequence[int]) -> list[int]:
        """Which of the kept steps, in order, must go; the first and the last stay, and the rest stay spread out.

        Again and again the one goes whose neighbours are closest together, the older one of equals: what remains
        covers the whole run, as evenly as it can.
        """
        kept, dropped = list(steps), []
        while self.most is not None and len(kept) > max(self.most, 2):
            places = range(1, len(kept) - 1)
            dropped.append(kept.pop(min(places, key=lambda place: kept[place + 1] - kept[place - 1])))
        return dropped
