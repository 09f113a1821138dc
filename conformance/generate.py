"""Write the golden traces: `python conformance/generate.py`, or `--check` to compare with what is on disk.

Each case is proved before it is written: a number typed in by hand must be the oracle's, and no case may be so badly
conditioned, or so close to a decision, that rounding its inputs to float32 changes the answer.
"""

import argparse
import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:  # so that `python conformance/generate.py` finds the package it lives in
    sys.path.insert(0, str(REPOSITORY))

from conformance import oracle  # noqa: E402
from conformance.families import Case, Family, all_families  # noqa: E402
from conformance.families.case import FLOAT64_TOLERANCE  # noqa: E402

TRACES = REPOSITORY / "src" / "tether" / "conformance" / "traces"
SHAKES = 8  # how often each case's inputs are moved by float32's rounding
FLOAT32_ROUNDING = 2.0**-24
HARD_SHAKE = 2.0**-16  # what float32's rounding may grow to inside a computation
JUMP = 1e-2  # a smooth answer cannot move this far under a hard shake; a flipped decision does


def rounded(number: float) -> float:
    """Thirteen digits: far inside the tolerance, and the same on every platform's mathematics library."""
    return float(f"{number:.13g}") + 0.0  # + 0.0 turns -0.0 into 0.0


def tidy(result: Any) -> Any:
    """The result with every float rounded; None, booleans, integers and strings as they are."""
    if isinstance(result, dict):
        return {key: tidy(item) for key, item in result.items()}
    if isinstance(result, list):
        return [tidy(item) for item in result]
    return rounded(result) if isinstance(result, float) else result


def like(template: Any, typed: Any) -> Any:
    """What was typed by hand, with 0 for 0.0 forgiven: floats where the oracle has floats."""
    if isinstance(typed, dict):
        return {key: like(template[key], item) for key, item in typed.items()}
    if isinstance(typed, list):
        assert len(typed) == len(template), f"shape differs: {typed} and {template}"
        return [like(part, item) for part, item in zip(template, typed, strict=True)]
    return float(typed) if isinstance(template, float) and typed is not None else typed


def differences(expected: Any, actual: Any, tolerance: float, path: str = "") -> list[str]:
    """Where two results differ by more than tolerance * max(1, |expected|); undefined places are passed over."""
    if isinstance(expected, dict):
        return [d for key in expected for d in differences(expected[key], actual[key], tolerance, f"{path}.{key}")]
    if isinstance(expected, list):
        pairs = enumerate(zip(expected, actual, strict=True))
        return [d for i, (e, a) in pairs for d in differences(e, a, tolerance, f"{path}[{i}]")]
    if expected is None:
        return []
    if isinstance(expected, float):
        near = abs(actual - expected) <= tolerance * max(1.0, abs(expected))
        return [] if near else [f"{path}: {expected} and {actual}"]
    return [] if expected == actual else [f"{path}: {expected} and {actual}"]


def to_float32(number: float) -> float:
    """The nearest float32."""
    return struct.unpack("f", struct.pack("f", number))[0]


def shaken(inputs: Any, source: random.Random, size: float) -> Any:
    """The inputs as float32 holds them, each moved by up to `size` of itself."""
    if isinstance(inputs, dict):
        return {key: shaken(item, source, size) for key, item in inputs.items()}
    if isinstance(inputs, list):
        return [shaken(item, source, size) for item in inputs]
    return to_float32(inputs) * (1.0 + source.uniform(-size, size)) if isinstance(inputs, float) else inputs


def assert_well_conditioned(case: Case, expected: dict[str, Any]) -> None:
    """Rounding the inputs must not use up more than half of the float32 tolerance, nor flip any decision."""
    method = getattr(oracle, case.method)
    for attempt in range(SHAKES):
        source = random.Random(attempt)  # noqa: S311 - reproducible, not secret
        for size, tolerance in ((FLOAT32_ROUNDING, case.float32 / 2), (HARD_SHAKE, JUMP)):
            inputs = shaken(case.inputs, source, 0.0 if case.exact else size)
            moved = differences(expected, method(**inputs), tolerance)
            assert not moved, f"{case.method}, {case.name}: badly conditioned for float32: {moved[:3]}"


def solved(case: Case) -> dict[str, Any]:
    """The case as it stands in the file, proved."""
    answer = getattr(oracle, case.method)(**case.inputs)
    expected = answer
    if case.expected is not None:
        expected = like(answer, case.expected)
        wrong = differences(expected, answer, FLOAT64_TOLERANCE / 10)
        assert not wrong, f"{case.method}, {case.name}: by hand and by the oracle differ: {wrong[:3]}"
    assert_well_conditioned(case, expected)
    return {
        "name": case.name,
        "why": case.why,
        "method": case.method,
        "inputs": case.inputs,
        "expected": tidy(expected),
        "tolerance": {"float32": case.float32, "float64": FLOAT64_TOLERANCE},
        "source": case.source,
    }


def file_text(family: Family) -> str:
    """The family's file: valid JSON with one case on a line, so that a changed case is a changed line."""
    names = [case.name for case in family.cases]
    assert len(set(names)) == len(names), f"{family.name}: two cases share a name"
    lines = [json.dumps(solved(case), separators=(",", ":"), allow_nan=False) for case in family.cases]
    head = f'{{"family": {json.dumps(family.name)},\n"about": {json.dumps(family.about)},\n"cases": [\n'
    return head + ",\n".join(lines) + "\n]}\n"


def stale_files(texts: dict[str, str]) -> list[str]:
    """The names of files that differ from what would be written, are missing, or belong to no family."""
    on_disk = {path.name: path.read_text(encoding="utf-8") for path in TRACES.glob("*.json")}
    return sorted(name for name in texts.keys() | on_disk.keys() if texts.get(name) != on_disk.get(name))


def main(arguments: list[str] | None = None) -> int:
    """Write the traces, or check them; 1 if a check finds a difference."""
    parser = argparse.ArgumentParser(description="Write or check the golden traces of the conformance suite.")
    parser.add_argument("--check", action="store_true", help="compare with the files on disk and write nothing")
    check = parser.parse_args(arguments).check
    families = all_families()
    texts = {f"{family.name}.json": file_text(family) for family in families}
    stale = stale_files(texts)
    if check:
        for name in stale:
            print(f"differs from what the oracle says: {name}")
        return 1 if stale else 0
    TRACES.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in texts:
            (TRACES / name).write_text(texts[name], encoding="utf-8")
        else:
            (TRACES / name).unlink()
    cases = sum(len(family.cases) for family in families)
    print(f"{len(families)} families, {cases} cases, {len(stale)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
