"""The doctor's table: the diseases it finds in sick runs, and its false alarms on healthy runs.

    python benchmarks/doctor.py [--json]

It reads the recorded runs of tests/doctor/recorded; tests/doctor/record_runs.py trains them again. Healthy runs form
three sets: `tuned` (even seeds), on which thresholds were set; `held back` (odd seeds), examined once after that; and
`fresh` (seeds 10 and 11), recorded after the last change of a threshold. A false alarm is a warning or an alarm on a
healthy run, at its end or at any examination while it trains; notes are counted separately.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests" / "doctor"
sys.path[:0] = [str(TESTS)]

from recipes_of_runs import SICK  # noqa: E402  # pyright: ignore[reportMissingImports]
from stored_runs import read_recorded, recorded_names  # noqa: E402  # pyright: ignore[reportMissingImports]

from tether.doctor.doctor import Doctor, LiveDoctor  # noqa: E402
from tether.doctor.findings import Finding  # noqa: E402
from tether.store.recorded import RecordedRun  # noqa: E402

EVERY = 5  # steps between two examinations while training


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    report = {"diseases": diseases(), "healthy": healthy(), "cost": cost()}
    print(json.dumps(report, indent=2) if options.json else as_text(report))


def diseases() -> list[dict[str, Any]]:
    """One row per disease of each sick run: whether it was found, its severity, and when it was found in training."""
    rows: list[dict[str, Any]] = []
    for sick in SICK:
        run = read_recorded(sick.name)
        found = {finding.audit: finding for finding in Doctor().examine(run)}
        live = {finding.audit: step for step, finding in reversed(watched(run))}
        for disease in sick.diseases:
            rows.append(
                {
                    "run": sick.name,
                    "disease": disease,
                    "found": disease in found,
                    "severity": found[disease].severity if disease in found else None,
                    "live_at_step": live.get(disease),
                    "also": sorted(found.keys() - set(sick.diseases)),
                }
            )
    return rows


def healthy() -> list[dict[str, Any]]:
    """One row per healthy run: its set, and the findings."""
    rows: list[dict[str, Any]] = []
    for name in recorded_names("healthy-"):
        run = read_recorded(name)
        findings = Doctor().examine(run)
        live = [finding for _, finding in watched(run)]
        rows.append(
            {
                "run": name,
                "set": set_of(name),
                "method": run.method,
                "false_alarms": names(findings, ("warning", "alarm")),
                "notes": names(findings, ("note",)),
                "live_false_alarms": names(live, ("warning", "alarm")),
                "live_notes": names(live, ("note",)),
            }
        )
    return rows


def set_of(name: str) -> str:
    """The set of a healthy run, by its seed."""
    seed = int(name.rpartition("-")[2])
    return "fresh" if seed >= 10 else ("tuned", "held back")[seed % 2]


def names(findings: Sequence[Finding], severities: Sequence[str]) -> list[str]:
    """The audits with findings of these severities."""
    return sorted({finding.audit for finding in findings if finding.severity in severities})


def watched(run: RecordedRun) -> list[tuple[int, Finding]]:
    """The findings of the live doctor, step by step."""
    doctor, kept = LiveDoctor(run.method, run.config, every=EVERY), set(run.rollout_steps)
    return [
        (int(row["step"]), finding)
        for row in run.metrics
        for finding in doctor.see(int(row["step"]), row, run.rollouts(int(row["step"])) if row["step"] in kept else ())
    ]


def cost() -> dict[str, float]:
    """Milliseconds of one examination of a full window of 200 steps, and of a step without one."""
    run = read_recorded("healthy-ppo-kl-0")
    doctor = LiveDoctor(run.method, run.config, every=10**9)
    rows = [dict(run.metrics[step % len(run.metrics)]) for step in range(400)]
    began = time.perf_counter()
    for step, row in enumerate(rows):
        doctor.see(step, row)
    handed = time.perf_counter() - began
    doctor.every = 1
    began = time.perf_counter()
    for step in range(20):
        doctor.see(400 + step, rows[step])
    return {"look_ms": 1e3 * (time.perf_counter() - began) / 20, "step_ms": 1e3 * handed / len(rows)}


def as_text(report: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    lines = ["| disease | run | found | found while training | other findings |", "|---|---|---|---|---|"]
    for row in report["diseases"]:
        verdict = row["severity"] if row["found"] else "MISSED"
        live = "at the end" if row["live_at_step"] is None else f"step {row['live_at_step']}"
        lines.append(
            f"| {row['disease']} | {row['run']} | {verdict} | {live} | {', '.join(row['also']) or 'nothing'} |"
        )
    total, found = len(report["diseases"]), sum(row["found"] for row in report["diseases"])
    lines += ["", f"Diseases: {found} found, {total - found} missed.", ""]
    lines += ["| healthy runs | number | silent | with a note | false alarms | false alarms while training |"]
    lines += ["|---|---|---|---|---|---|"]
    for name in ("tuned", "held back", "fresh", "all"):
        rows = [row for row in report["healthy"] if name in (row["set"], "all")]
        silent = sum(not row["false_alarms"] and not row["notes"] for row in rows)
        counts = [sum(bool(row[key]) for row in rows) for key in ("notes", "false_alarms", "live_false_alarms")]
        lines.append(f"| {name} | {len(rows)} | {silent} | {' | '.join(map(str, counts))} |")
    spoken = [(row["run"], *row["false_alarms"], *row["notes"]) for row in report["healthy"]]
    lines += ["", *(f"{run}: {', '.join(said)}" for run, *said in spoken if said)]
    lines += [
        f"A look takes {report['cost']['look_ms']:.1f} ms, a step without one {report['cost']['step_ms']:.3f} ms."
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
