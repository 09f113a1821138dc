"""Grade the corpus of tests/rewards/math_corpus.py with the built-in `math` and with math-verify.

    python benchmarks/math_answers.py                  # a table by kind, and every pair that either gets wrong
    python benchmarks/math_answers.py --write          # save math-verify's disagreements for the test

It takes a minute on one core. math-verify is an extra: pip install 'tether-rl[math]'.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "rewards"
sys.path.insert(0, str(TESTS))

from math_corpus import Pair, pairs  # pyright: ignore[reportMissingImports]  # noqa: E402

from tether.rewards.math_answer import math_correct  # noqa: E402
from tether.rewards.math_verified import math_verified  # noqa: E402


def marked_wrongly(check: Callable[[str, str], bool]) -> tuple[list[Pair], float]:
    """The pairs on which the checker and the label differ, and the total seconds."""
    began = time.perf_counter()
    wrong = [pair for pair in pairs() if check(pair.completion, pair.reference) != pair.right]
    return wrong, time.perf_counter() - began


def main() -> int:
    """Grade the corpus twice and print the differences."""
    parser = argparse.ArgumentParser(description="Grade the corpus of mathematical answers with both checkers.")
    parser.add_argument("--write", action="store_true", help="save math-verify's disagreements for the test")
    options = parser.parse_args()
    built_in, seconds = marked_wrongly(lambda completion, reference: math_correct(completion, reference, 1e-8))
    verified, verify_seconds = marked_wrongly(math_verified)
    total = Counter(pair.kind for pair in pairs())
    ours, theirs = Counter(pair.kind for pair in built_in), Counter(pair.kind for pair in verified)
    print(f"{'kind':<16}{'pairs':>7}{'math':>7}{'math_verify':>13}   (graded wrongly)")
    for kind, count in total.items():
        print(f"{kind:<16}{count:>7}{ours[kind]:>7}{theirs[kind]:>13}")
    print(f"{'all':<16}{total.total():>7}{ours.total():>7}{theirs.total():>13}")
    print(f"{'seconds':<16}{'':>7}{seconds:>7.1f}{verify_seconds:>13.1f}")
    for name, wrong in (("math", built_in), ("math_verify", verified)):
        for pair in wrong:
            verdict = "is right, but rejected" if pair.right else "is wrong, but accepted"
            print(f"{name}: {pair.completion!r} for {pair.reference!r} {verdict}")
    if options.write:
        kept = TESTS / "math_verify_disagreements.json"
        rows = [json.dumps(pair._asdict(), ensure_ascii=False) for pair in verified]
        kept.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
