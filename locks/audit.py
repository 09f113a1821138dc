"""`make audit`: looks every locked version up among the known vulnerabilities.

Exit 0: none is known. Exit 1: some are, and are listed. Exit 3: it could not be found out, and a sentence says why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from installed import INSTALLABLE

HERE = Path(__file__).parent
LOCKS = (*INSTALLABLE, "tools.txt")
UNREACHED = 3
SECONDS = 300


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pip-audit", default="pip-audit", help="the program that looks them up")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in LOCKS:  # one by one: two of them may hold two versions of a package
        told = look_up(options.pip_audit, HERE / name)
        if isinstance(told, str):
            return _unreached(f"{name}: {told}")
        found += told
    skipped = [one for one in found if "skip_reason" in one]
    if skipped:
        names = ", ".join(one["name"] for one in skipped[:5])
        return _unreached(f"nothing is known of {len(skipped)} of {len(found)} packages, such as {names}")
    worse = [(one["name"], one["version"], hole) for one in found for hole in one["vulns"]]
    for name, version, hole in worse:
        mended = ", ".join(hole["fix_versions"]) or "no version yet"
        print(f"{name} {version}: {hole['id']}, mended in {mended}")
    print(f"audit: {len(found)} packages looked up, {len(worse)} known vulnerabilities")
    return 1 if worse else 0


def look_up(program: str, lock: Path) -> list[dict[str, Any]] | str:
    """What is known of the packages of a lock, or why that could not be found out."""
    words = [program, "--disable-pip", "--require-hashes", "--format=json", "--progress-spinner=off"]
    try:
        done = subprocess.run(  # noqa: S603
            [*words, "--requirement", str(lock)], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS} s"
    except OSError as error:
        return f"{program} could not be started: {error.strerror}"
    try:
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"pip-audit ended with exit code {done.returncode}"


def _unreached(reason: str) -> int:
    print(f"audit: not found out: the data on vulnerabilities could not be reached ({reason[:300]})", file=sys.stderr)
    return UNREACHED


if __name__ == "__main__":
    sys.exit(main())
