"""The last line of a test run: how many tests were skipped, what they need, and the command that installs it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Need:
    """Something that tests are skipped without; `install` is empty where no command installs it."""

    pattern: str
    name: str
    install: str = ""


@dataclass(frozen=True)
class Skip:
    """A skipped test, or a file whose tests were never collected."""

    node: str
    reason: str
    whole_file: bool = False


PIP = ".venv/bin/pip install"
NEEDS = (
    Need(r"chromium", "Chromium", "apt-get install chromium"),
    Need(r"psycopg", "psycopg", "make setup"),
    Need(r"postgresql", "PostgreSQL", "apt-get install postgresql"),
    Need(
        r"triton is not installed|triton before",
        "Triton",
        f"{PIP} --require-hashes --no-deps -r locks/ci-triton.txt",
    ),
    Need(
        r"extra `reasoning`|reasoning.gym",
        "reasoning-gym",
        f"{PIP} --require-hashes --no-deps -r locks/ci-reasoning.txt",
    ),
    Need(
        r"extra `lm-eval`",
        "lm-eval",
        f"{PIP} --require-hashes --no-deps -r locks/ci-lm-eval.txt",
    ),
    Need(r"extra `ray`", "Ray", f"{PIP} 'ray>=2.50'"),
    Need(r"extra `control`", "gymnasium", f"{PIP} 'gymnasium[mujoco]>=1.1'"),
    Need(r"extra `sweep`", "Optuna", f"{PIP} 'optuna>=4'"),
    Need(r"cuda device", "a CUDA device"),
    Need(r"bitsandbytes", "bitsandbytes", f"{PIP} 'bitsandbytes>=0.46'"),
    Need(r"nginx", "nginx", "apt-get install nginx"),
    Need(r"caddy", "Caddy", "apt-get install caddy"),
    Need(r"openssl", "OpenSSL", "apt-get install openssl"),
    Need(r"small disk", "the right to mount a small disk"),
)


def last_line(skips: Iterable[Skip]) -> str:
    """One line about all that was skipped, the largest group first."""
    tests: dict[Need, set[str]] = {}
    files: dict[Need, set[str]] = {}
    for skip in skips:
        (files if skip.whole_file else tests).setdefault(need_of(skip.reason), set()).add(skip.node)
    if not tests and not files:
        return "Not tested: nothing; no test was skipped."
    sizes = {need: (len(files.get(need, ())), len(tests.get(need, ()))) for need in {**files, **tests}}
    ordered = sorted(sizes.items(), key=lambda item: (-item[1][0], -item[1][1], item[0].name))
    return "Not tested: " + "; ".join(_group(need, *size) for need, size in ordered) + "."


def need_of(reason: str) -> Need:
    """What the reason of a skip asks for; a reason that is not known speaks for itself."""
    text = re.sub(r"^Skipped: ", "", reason).strip()
    for need in NEEDS:
        if re.search(need.pattern, text, flags=re.IGNORECASE):
            return need
    return Need("", f'"{text}"')


def _group(need: Need, files: int, tests: int) -> str:
    counts = [_count(files, "whole test file"), _count(tests, "test")]
    told = " and ".join(count for count in counts if count)
    one = files + tests == 1
    subcommand = ("was skipped:" if one else "were skipped:") if not need.pattern else ("needs" if one else "need")
    return f"{told} {subcommand} {need.name}" + (f" ({need.install})" if need.install else "")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}" if number else ""
