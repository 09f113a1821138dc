"""Run the golden traces against an implementation, and report what passed, what failed where, and what is not claimed.

Results are compared value by value. The report is printed as tables, or as JSON for programs.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tether.conformance.adapter import Unsupported
from tether.rewards.resolve import import_module_from


@dataclass(frozen=True)
class Mismatch:
    """One value of a result that differs from the trace."""

    path: str
    expected: Any
    actual: Any


def plain(result: Any) -> Any:
    """The result as lists, dicts and numbers: tensors and arrays through `.tolist()`, tuples as lists."""
    if hasattr(result, "tolist"):
        return plain(result.tolist())
    if isinstance(result, dict):
        return {key: plain(item) for key, item in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(item) for item in result]
    return result


def mismatches(expected: Any, actual: Any, tolerance: float, path: str) -> Iterator[Mismatch]:
    """Every value that violates |actual - expected| <= tolerance * max(1, |expected|).

    An expected None is undefined and is skipped. Booleans, integers and strings are compared exactly. A list of another
    length, or a number in place of a list, is one mismatch at that path.
    """
    if expected is None:
        return
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            yield Mismatch(path, expected, actual)
            return
        for index, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            yield from mismatches(wanted, got, tolerance, f"{path}[{index}]")
    elif not _agrees(expected, actual, tolerance):
        yield Mismatch(path, expected, actual)


def _agrees(expected: Any, actual: Any, tolerance: float) -> bool:
    if not isinstance(expected, float):
        return not isinstance(actual, list) and bool(actual == expected)
    if not isinstance(actual, (int, float)):
        return False
    return abs(actual - expected) <= tolerance * max(1.0, abs(expected))  # False for NaN, as intended


SHOWN_FAILURES = 40


def _json_safe(value: Any) -> Any:
    """The value itself, or its text where JSON cannot represent it (NaN, infinity, foreign objects)."""
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def report_json(report: ConformanceReport) -> dict[str, Any]:
    """The report as plain data. `failed` counts cases; `failures` has one entry per case and dtype."""
    return {
        "target": report.target,
        "dtypes": list(report.dtypes),
        "cases": report.cases,
        "passed": report.passed,
        "failed": report.failed_cases,
        "families": {name: asdict(result) for name, result in report.families.items()},
        "failures": [_json_safe(asdict(failure)) for failure in report.failed],
        "not_claimed": [asdict(item) for item in report.not_claimed],
        "partly_claimed": [asdict(item) for item in report.partly_claimed],
    }


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _family_table(report: ConformanceReport) -> Table:
    table = Table(title=f"Conformance of {report.target or 'the adapter'} in {' and '.join(report.dtypes)}")
    table.add_column("family", no_wrap=True)
    for heading in ("cases", "passed", "failed", "not claimed"):
        table.add_column(heading, justify="right")
    for name, result in report.families.items():
        style = "red" if result.failed else "dim" if not result.passed else None
        counts = [str(n) if n else "" for n in (result.cases, result.passed, result.failed, result.not_claimed)]
        table.add_row(name, *counts, style=style)
    return table


def _failure_table(report: ConformanceReport) -> Table:
    table = Table(title="Failures: the first value of each result that differs")
    for heading in ("family", "case", "method", "dtype", "place", "expected", "actual", "tolerance"):
        table.add_column(heading)
    for failure in report.failed[:SHOWN_FAILURES]:
        place = failure.path if failure.places == 1 else f"{failure.path} and {failure.places - 1} more"
        numbers = (_short(failure.expected), _short(failure.actual), f"{failure.tolerance:g}")
        cells = (failure.family, failure.case, failure.method, failure.dtype, place, *numbers)
        # Text, not markup: rich would read a path such as advantages[1][3] as a style.
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _print_not_claimed(console: Console, heading: str, items: list[NotClaimed]) -> None:
    if not items:
        return
    console.print(Text(heading))
    for (method, reason), count in sorted(Counter((item.method, item.reason) for item in items).items()):
        console.print(Text(f"  {method} ({count}): {reason}"))


def render(report: ConformanceReport, console: Console) -> None:
    """Print the families, the failures, and what was not claimed."""
    console.print(_family_table(report))
    if report.failed:
        console.print(_failure_table(report))
        hidden = len(report.failed) - SHOWN_FAILURES
        if hidden > 0:
            console.print(f"and {hidden} more; --json lists them all")
    _print_not_claimed(console, "Not claimed:", report.not_claimed)
    _print_not_claimed(console, "Claimed in part:", report.partly_claimed)
    claimed = report.cases - len(report.not_claimed)
    verdict = "nothing failed" if not report.failed else f"{report.failed_cases} failed"
    families = f"{len(report.families)} families"
    console.print(f"{report.cases} cases in {families}, {claimed} claimed, {report.passed} passed, {verdict}.")


__all__ = [
    "DEFAULT_TARGET",
    "ConformanceReport",
    "Failure",
    "NotClaimed",
    "load_families",
    "load_target",
    "main",
    "render",
    "report_json",
    "run",
]

DEFAULT_TARGET = "tether.conformance.tether_adapter:adapter"
DTYPES = ("float32", "float64")

AdapterFactory: TypeAlias = Callable[[str], Any]


@dataclass(frozen=True)
class Failure:
    """A case whose result is wrong in one dtype: the first value that differs, and the number that do."""

    family: str
    case: str
    method: str
    dtype: str
    path: str
    expected: Any
    actual: Any
    tolerance: float
    places: int


@dataclass(frozen=True)
class NotClaimed:
    """A case, or some results of it, that the implementation does not offer."""

    family: str
    case: str
    method: str
    reason: str


@dataclass
class FamilyResult:
    """The results of one family's cases. A case fails if it fails in any dtype."""

    about: str
    cases: int = 0
    passed: int = 0
    failed: int = 0
    not_claimed: int = 0


@dataclass
class ConformanceReport:
    """The results of a run. `failed` has an entry per case and dtype; `partly_claimed` cases passed in part."""

    target: str
    dtypes: tuple[str, ...]
    families: dict[str, FamilyResult] = field(default_factory=dict)
    failed: list[Failure] = field(default_factory=list)
    not_claimed: list[NotClaimed] = field(default_factory=list)
    partly_claimed: list[NotClaimed] = field(default_factory=list)

    @property
    def cases(self) -> int:
        """The number of cases in the run."""
        return sum(family.cases for family in self.families.values())

    @property
    def passed(self) -> int:
        """The number of cases that passed in every dtype."""
        return sum(family.passed for family in self.families.values())

    @property
    def failed_cases(self) -> int:
        """The number of cases that failed in at least one dtype."""
        return sum(family.failed for family in self.families.values())


def load_families(names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The traces in alphabetical order, or only the named families."""
    folder = files("tether.conformance") / "traces"
    available = sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
    for name in names or ():
        if name not in available:
            raise ValueError(f"families: there is no family {name!r}; choose from {', '.join(available)}")
    chosen = [name for name in available if not names or name in names]
    return [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in chosen]


def load_target(target: str) -> AdapterFactory:
    """The factory that `package.module:attribute` names. Imports also search the current directory."""
    module_name, colon, attribute = target.partition(":")
    if not (colon and module_name and attribute):
        raise ValueError(f"target: {target!r} names no attribute; write package.module:factory, like {DEFAULT_TARGET}")
    try:
        module = import_module_from(Path.cwd(), module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            repair = "check the spelling, and run from the directory that holds it or install it"
            raise ValueError(f"target: there is no module {missing!r}; {repair}") from error
        raise ValueError(f"target: {module_name} imports {missing!r}, which is not installed; install it") from error
    if not hasattr(module, attribute):
        offered = ", ".join(name for name in vars(module) if not name.startswith("_")) or "nothing"
        raise ValueError(f"target: {module_name} has no attribute {attribute!r}; it has {offered}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise ValueError(f"target: {target} is not callable; name a function that takes a dtype and returns an adapter")
    return factory


@dataclass(frozen=True)
class _Verdict:
    """The outcome of one case in one dtype."""

    failures: tuple[Failure, ...] = ()
    refused: str | None = None  # why the whole case is not claimed
    left_out: str | None = None  # which results are not claimed


def _checked(family: str, case: dict[str, Any], adapter: Any, dtype: str) -> _Verdict:
    """Run one case and compare its result with the trace."""
    method = getattr(adapter, case["method"], None)
    if method is None:
        return _Verdict(refused="no such method")
    tolerance = case["tolerance"][dtype]

    def failure(first: Mismatch, places: int) -> _Verdict:
        where = (family, case["name"], case["method"], dtype)
        return _Verdict((Failure(*where, first.path, first.expected, first.actual, tolerance, places),))

    try:
        result = plain(method(**copy.deepcopy(case["inputs"])))
    except Unsupported as refusal:
        return _Verdict(refused=str(refusal) or "not offered")
    except Exception as error:  # an implementation may raise anything; the report shows it
        return failure(Mismatch("(raised)", case["expected"], f"{type(error).__name__}: {error}"), 1)
    if not isinstance(result, dict):
        return failure(Mismatch("(result)", "a dict of results", result), 1)
    claimed = [name for name in case["expected"] if name in result]
    missing = ", ".join(name for name in case["expected"] if name not in result)
    if not claimed:
        return _Verdict(refused=f"results left out: {missing}")
    wrong = [m for name in claimed for m in mismatches(case["expected"][name], result[name], tolerance, name)]
    if wrong:
        return failure(wrong[0], len(wrong))
    return _Verdict(left_out=f"results left out: {missing}" if missing else None)


def _made(factory: AdapterFactory, dtype: str) -> Any:
    """The adapter, or an object without methods where the implementation does not offer the dtype."""
    try:
        return factory(dtype)
    except Unsupported:
        return object()


def run(
    adapter_factory: AdapterFactory,
    dtypes: Sequence[str] = DTYPES,
    families: Sequence[str] | None = None,
    target: str = "",
) -> ConformanceReport:
    """Run every case of the chosen families in each dtype."""
    report = ConformanceReport(target, tuple(dtypes))
    adapters = {dtype: _made(adapter_factory, dtype) for dtype in dtypes}
    for trace in load_families(families):
        counts = report.families[trace["family"]] = FamilyResult(trace["about"])
        for case in trace["cases"]:
            verdicts = [_checked(trace["family"], case, adapter, dtype) for dtype, adapter in adapters.items()]
            _file(report, counts, NotClaimed(trace["family"], case["name"], case["method"], ""), verdicts)
    return report


def _file(report: ConformanceReport, counts: FamilyResult, about: NotClaimed, verdicts: list[_Verdict]) -> None:
    """Record one case: failed if any dtype failed, else not claimed if any was refused, else passed."""
    counts.cases += 1
    failures = [failure for verdict in verdicts for failure in verdict.failures]
    refused = next((verdict.refused for verdict in verdicts if verdict.refused), None)
    left_out = next((verdict.left_out for verdict in verdicts if verdict.left_out), None)
    if failures:
        counts.failed += 1
        report.failed.extend(failures)
    elif refused:
        counts.not_claimed += 1
        report.not_claimed.append(NotClaimed(about.family, about.case, about.method, refused))
    else:
        counts.passed += 1
        if left_out:
            report.partly_claimed.append(NotClaimed(about.family, about.case, about.method, left_out))


def main(target: str | None, json_output: bool, families: list[str] | None) -> int:
    """Run the suite and print the report; 0 if something passed and nothing failed, else 1."""
    name = target or DEFAULT_TARGET
    report = run(load_target(name), families=families, target=name)
    if json_output:
        print(json.dumps(report_json(report), indent=2))
    else:
        render(report, Console())
    return 0 if report.passed and not report.failed else 1
