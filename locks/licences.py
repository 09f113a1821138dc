"""`make licences`: docs/licences.md, the licences of what `make setup` installs and of what is shipped."""

from __future__ import annotations

from collections import Counter

from installed import ROOT, Package, locked, packages, vendored

HEAD = """# Licences

Made by `make licences` from the metadata of what `make setup` installs: do not edit. Tether itself is Apache-2.0.

## Shipped inside Tether

| what | version | licence | where |
|---|---|---|---|
"""
AFTER = """
The page uses the fonts of the system it is shown on and ships none. The licence of uPlot lies beside it. The data of
the demo was written for it. Models are not shipped: [docs/models.md](models.md) says where each comes from.

## Installed beside it

None of these is copied into Tether: pip takes them from the registry, with the hashes in [locks/](../locks).

| package | version | licence |
|---|---|---|
"""


def main() -> None:
    """Write the page."""
    shipped = "".join(f"| {one.name} | {one.version} | {one.licence} | `{one.place}` |\n" for one in vendored())
    names = {requirement.partition("==")[0] for requirement in locked("torch.txt", "dev.txt")}
    there = [one for one in packages() if one.name in names]
    rows = "".join(f"| {one.name} | {one.version.partition('+')[0]} | {_cell(one)} |\n" for one in there)
    counts = Counter(one.licence for one in there).most_common()
    told = "\n" + ", ".join(f"{name}: {count}" for name, count in counts) + ".\n"
    path = ROOT / "docs" / "licences.md"
    path.write_text(HEAD + shipped + AFTER + rows + told, encoding="utf-8")
    print(f"{path}: {len(there)} packages")


def _cell(one: Package) -> str:
    return one.licence.replace("|", "/")


if __name__ == "__main__":
    main()
