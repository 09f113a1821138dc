"""Arithmetic with small whole numbers: problems from a seed, worked examples as earlier turns, the number given."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from tether.seeds import derive_seed
from tether.types import Message, Prompt

MAX_NEW_TOKENS = 12
MAX_PROBLEMS = 300  # a third of them from the table up to 12, which has 121
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Problem:
    """`a operator b`, with its result."""

    a: int
    operator: str
    b: int

    @property
    def result(self) -> int:
        """What it comes to."""
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.operator]

    @property
    def question(self) -> str:
        """The problem as a question."""
        return f"What is {self.a} {self.operator} {self.b}?"

    def prompt(self, number: int) -> Prompt:
        """The worked examples as earlier turns, then the problem."""
        turns: list[Message] = []
        for each in EXAMPLES:
            worked = f"{each.a} {each.operator} {each.b} = {each.result}"
            turns.append({"role": "user", "content": each.question})
            turns.append({"role": "assistant", "content": worked})
        asked: Message = {"role": "user", "content": self.question}
        return Prompt(id=f"arithmetic-{number}", messages=(*turns, asked), answer=str(self.result))


EXAMPLES = (Problem(3, "+", 5), Problem(14, "-", 6), Problem(4, "*", 7), Problem(21, "+", 9))


def problems(count: int, seed: int) -> list[Problem]:
    """Different problems: sums and differences below 100 (no result below 0), and the table up to 12."""
    if count > MAX_PROBLEMS:
        raise ValueError(f"there are at most {MAX_PROBLEMS} different problems, not {count}")
    draw = random.Random(derive_seed(seed, "arithmetic"))  # noqa: S311 (not for secrets)
    found: dict[Problem, None] = {}
    while len(found) < count:
        operator = "+-*"[len(found) % 3]
        if operator == "*":
            a, b = draw.randint(2, 12), draw.randint(2, 12)
        else:
            a, b = draw.randint(1, 50), draw.randint(1, 49)
            a, b = (max(a, b), min(a, b)) if operator == "-" else (a, b)
        if Problem(a, operator, b) not in EXAMPLES:
            found[Problem(a, operator, b)] = None
    return list(found)


def given_number(answer: str) -> int | None:
    """The number that an answer gives: the first one of its first line, or after the last `=` of that line."""
    lines = answer.strip().splitlines()
    found = _NUMBER.search(lines[0].rpartition("=")[2]) if lines else None
    return int(found[0]) if found else None


def is_right(problem: Problem, answer: str) -> bool:
    """Whether the answer gives the result."""
    return given_number(answer) == problem.result
