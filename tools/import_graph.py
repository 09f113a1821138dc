"""Which package imports which, read off the code: `python tools/import_graph.py [--check | --write FILE]`.

`--check` exits with 1 where files import each other in a circle. Imports in functions and under TYPE_CHECKING do not
count: they run after their file was read, or never.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "tether"
START, END = "<!-- graph -->", "<!-- /graph -->"


def module_name(file: Path) -> str:
    """tether.ops.kl for src/tether/ops/kl.py, tether.ops for its __init__.py."""
    return ".".join(["tether", *file.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a file is imported."""
    for node in body:
        yield node
        if (
            isinstance(node, ast.If)
            and "TYPE_CHECKING" in ast.unparse(node.test)
            and " or " not in ast.unparse(node.test)
        ):
            yield from statements(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []))


def graph() -> dict[str, set[str]]:
    """module -> the modules of tether that it imports."""
    files = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        wanted: set[str] = set()
        for node in statements(ast.parse(file.read_text(encoding="utf-8")).body):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= {one if one in files else node.module for one in inner}
        found[name] = {one for one in wanted if one in files} - {name}
    return found


def circle(edges: dict[str, set[str]]) -> list[str] | None:
    """The modules of one circle of imports, in order; None where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for other in sorted(edges[node]):
            if found := visit(other, [*path, node]):
                return found
        done.add(node)
        return None

    for node in sorted(edges):
        if found := visit(node, []):
            return found
    return None


def packages(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """package -> the packages that it imports; single files of `tether` are left out."""
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for name, others in edges.items():
        own = name.split(".")[1] if "." in name else ""
        if own in rooms:
            found[own] |= {other.split(".")[1] for other in others if "." in other and other.split(".")[1] in rooms}
    return {room: others - {room} for room, others in found.items()}


def table(rooms: dict[str, set[str]]) -> str:
    """A Markdown table, in an order in which a package stands below all that it imports."""
    lines = ["| package | imports |", "|---|---|"]
    left = dict(rooms)
    while left:
        room = min(room for room, others in left.items() if not others & left.keys())
        lines.append(f"| `{room}` | {', '.join(f'`{other}`' for other in sorted(left.pop(room))) or '-'} |")
    return "\n".join(lines)


def main() -> int:
    """Print, check or write the graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where imports go in a circle")
    parser.add_argument("--write", metavar="FILE", type=Path, help=f"put the table between {START} and {END}")
    options = parser.parse_args()
    edges = graph()
    if found := circle(edges):
        print("Imports in a circle: " + " -> ".join(found), file=sys.stderr)
        return 1
    text = table(packages(edges))
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        before, _, rest = page.partition(START)
        options.write.write_text(f"{before}{START}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    elif not options.check:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
