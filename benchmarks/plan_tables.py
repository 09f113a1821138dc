"""The plan's predictions beside measured and published figures, as the tables of docs/plan.md.

    python benchmarks/plan_tables.py [--docs docs/plan.md]

Needs no device: it recomputes the predictions from src/tether/plan/calibration.json and published.json. With `--docs`
the tables between the marks in that file are replaced; tests/plan/test_published.py compares them.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tether.plan.own_rows import OwnRow, own_rows
from tether.plan.published import PublishedRow, published_data, published_rows

OWN, PUBLISHED = "own rows", "published rows"


def own_table(rows: list[OwnRow]) -> str:
    """Our own rows."""
    lines = ["| one H200 | measured | predicted | ratio |", "|---|---|---|---|"]
    for row in rows:
        measured, ratio = f"{row.measured:,.4g} {row.unit}", _ratio(row.ratio, 0.1)
        lines.append(f"| {row.name} | {measured} | {row.predicted:,.4g} | {ratio} |")
    return "\n".join(lines)


def published_table(rows: tuple[PublishedRow, ...]) -> str:
    """Published rows."""
    sources = published_data()["sources"]
    lines = ["| source | run | published s | simulated s | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        link = f"[{row.source}]({sources[row.source]['url']})"
        ratio = "sets the factor" if row.calibrates else _ratio(row.ratio, 0.25)
        lines.append(f"| {link} | {row.name} | {row.published:g} | {row.predicted:.1f} | {ratio} |")
    return "\n".join(lines)


def _ratio(ratio: float, allowed: float) -> str:
    """The ratio; bold where it is off by more than is allowed."""
    text = f"{ratio:.2f}"
    return text if 1 - allowed <= ratio <= 1 + allowed else f"**{text}**"


def in_place(text: str, name: str, table: str) -> str:
    """The page with one table replaced."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return re.sub(f"{start}.*?{end}", lambda _: f"{start}\n{table}\n{end}", text, flags=re.DOTALL)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    tables = {OWN: own_table(own_rows()), PUBLISHED: published_table(published_rows())}
    if options.docs is None:
        print("\n\n".join(tables.values()))
        return
    text = options.docs.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = in_place(text, name, table)
    options.docs.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
