"""What a case is, and the small language in which the families are written."""

import random
from dataclasses import dataclass
from typing import Any

FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-10

# What stands where no correct implementation reads: large enough that the smallest leak is seen.
GARBAGE = (1000.0, -1000.0, 777.0, -1313.0)
# The same for log-probabilities and features, whose exponential must stay finite: a mask applied by multiplication is
# correct, and infinity times zero would fail it unjustly.
MILD_GARBAGE = (-7.0, 5.0, -9.0, 6.0)


@dataclass(frozen=True)
class Case:
    """One question to an implementation. `expected` None means: ask the oracle."""

    name: str
    why: str
    method: str
    inputs: dict[str, Any]
    expected: dict[str, Any] | None = None
    float32: float = FLOAT32_TOLERANCE
    exact: bool = False  # the inputs are exactly representable and equal on purpose: do not shake them

    @property
    def source(self) -> str:
        """Who says so: the oracle, or a number worked out by hand."""
        return "oracle" if self.expected is None else "hand"


@dataclass(frozen=True)
class Family:
    """The cases that guard against one kind of mistake."""

    name: str
    about: str
    cases: list[Case]


def mask(*rows: str) -> list[list[bool]]:
    """`mask(".xx.")` is one row in which the two middle tokens are sampled."""
    return [[place == "x" for place in row] for row in rows]


class Draw:
    """Random numbers of one family: seeded by its name, so that a new family changes no other."""

    def __init__(self, family: str) -> None:
        self._random = random.Random(f"tether conformance {family}")  # noqa: S311 - reproducible, not secret

    def number(self, low: float, high: float) -> float:
        """A number with four decimals."""
        return round(self._random.uniform(low, high), 4)

    def row(self, length: int, low: float, high: float) -> list[float]:
        """A list of numbers."""
        return [self.number(low, high) for _ in range(length)]

    def integers(self, length: int, low: int, high: int) -> list[int]:
        """A list of whole numbers from low to high, both included."""
        return [self._random.randint(low, high) for _ in range(length)]

    def shuffled(self, items: list[int]) -> list[int]:
        """The same items in another order."""
        return self._random.sample(items, len(items))

    def grid(
        self,
        where: list[list[bool]],
        low: float,
        high: float,
        garbage: tuple[float, ...] = GARBAGE,
    ) -> list[list[float]]:
        """Numbers on True places and garbage everywhere else."""
        return [
            [
                self.number(low, high) if is_sampled else garbage[(3 * b + t) % len(garbage)]
                for t, is_sampled in enumerate(row)
            ]
            for b, row in enumerate(where)
        ]

    def full_grid(self, rows: int, width: int, low: float, high: float) -> list[list[float]]:
        """Numbers on every place."""
        return [self.row(width, low, high) for _ in range(rows)]

    def near(self, grid: list[list[float]], distance: float) -> list[list[float]]:
        """The same grid moved a little, place by place: a new policy near an old one."""
        return [[round(x + self._random.uniform(-distance, distance), 4) for x in row] for row in grid]
