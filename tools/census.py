"""Counts of src/tether: files, lines, repeated names, and names that little or nothing uses.

    python tools/census.py [--json]

A name is counted wherever it is written, whatever it refers to: a function and a method with one name share their uses.
A method that only a framework calls therefore shows up as unused, and a dead function whose name is common does not.
Functions that a decorator such as `@router.get(...)` registers, and those that `cli.py` calls by name, are left out.
Read the lists before you delete anything.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tether"
ELSEWHERE = ("benchmarks", "docs", "examples", "conformance", "recipes", "tools", "locks", ".ci")
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".ipynb", ".json", ".js", ".html"}
WORD = re.compile(r"[A-Za-z_]\w*")
SHARED = {"__init__", "main", "upgrade", "downgrade", "revision", "down_revision", "branch_labels", "depends_on"}


@dataclass(frozen=True)
class Definition:
    """A public name and where it is defined; `kind` is function, class, constant or method."""

    name: str
    kind: str
    file: str
    line: int


@dataclass
class Census:
    """All counts of one tree."""

    files: int = 0
    lines: int = 0
    functions: int = 0
    classes: int = 0
    one_caller: list[Definition] = field(default_factory=list)
    repeated: dict[str, list[str]] = field(default_factory=dict)
    repeated_files: dict[str, list[str]] = field(default_factory=dict)
    unused: list[Definition] = field(default_factory=list)
    only_tests: list[Definition] = field(default_factory=list)


def is_registered(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Whether a decorator hands the function to somebody: `@router.get("/runs")`."""
    return any(isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) for one in node.decorator_list)


def definitions(tree: ast.Module, file: str) -> Iterator[Definition]:
    """The public functions, classes and constants of a file, and the public methods of its classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if is_registered(node) or (file.startswith("commands/") and node.name.endswith("_command")):
                continue
            yield Definition(node.name, "function", file, node.lineno)
        elif isinstance(node, ast.ClassDef):
            yield Definition(node.name, "class", file, node.lineno)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield Definition(inner.name, "method", file, inner.lineno)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (
                    Definition(one.id, "constant", file, node.lineno) for one in names if isinstance(one, ast.Name)
                )


def uses(tree: ast.Module) -> Counter[str]:
    """How often each name is read: as a name, an attribute or a word of a string; imports do not count."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found[node.attr] += 1
    return found


def words_in(folders: tuple[str, ...]) -> set[str]:
    """Every word in the text files below these folders and in the files beside them."""
    found: set[str] = set()
    for folder in folders:
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in TEXT and file != Path(__file__) and file.is_file():
                found |= set(WORD.findall(file.read_text(encoding="utf-8", errors="ignore")))
    return found


def strings_in(tree: ast.Module) -> set[str]:
    """The words of the strings of a file other than docstrings: what `getattr` and `import_module` are given."""
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return {
        word
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents
        for word in WORD.findall(node.value)
    }


def count() -> Census:
    """Read src/tether once and count."""
    census = Census()
    defined: list[Definition] = []
    used: Counter[str] = Counter()
    strings: set[str] = set()
    stems: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        text, name = file.read_text(encoding="utf-8"), str(file.relative_to(SOURCE))
        tree = ast.parse(text)
        census.files += 1
        census.lines += text.count("\n")
        defined += [one for one in definitions(tree, name) if not one.name.startswith("_")]
        used += uses(tree)
        strings |= strings_in(tree)
        stems.setdefault(file.stem, []).append(name)
    tested, elsewhere = words_in(("tests",)), words_in(ELSEWHERE)
    places: dict[str, set[str]] = {}
    for one in defined:
        census.functions += one.kind == "function"
        census.classes += one.kind == "class"
        if one.kind in ("function", "class") and one.name not in SHARED:
            places.setdefault(one.name, set()).add(one.file)
        if one.kind == "function" and used[one.name] == 1:
            census.one_caller.append(one)
        if used[one.name] or one.name in strings or one.name in elsewhere or one.name in SHARED:
            continue
        (census.only_tests if one.name in tested else census.unused).append(one)
    census.repeated = {name: sorted(files) for name, files in sorted(places.items()) if len(files) > 1}
    census.repeated_files = {
        stem: files for stem, files in sorted(stems.items()) if len(files) > 1 and stem not in SHARED
    }
    return census


def as_json(census: Census) -> dict[str, object]:
    """The counts, and the names behind them."""
    return {
        "files": census.files,
        "lines": census.lines,
        "public_functions": census.functions,
        "public_classes": census.classes,
        "functions_with_one_caller": len(census.one_caller),
        "repeated_names": census.repeated,
        "repeated_file_names": census.repeated_files,
        "unused": [vars(one) for one in census.unused],
        "used_by_tests_only": [vars(one) for one in census.only_tests],
    }


def print_census(census: Census) -> None:
    """The counts as a list, then the names worth a look."""
    rows = {
        "files": census.files,
        "lines": census.lines,
        "public functions": census.functions,
        "public classes": census.classes,
        "functions with one caller": len(census.one_caller),
        "names defined in several files": len(census.repeated),
        "file names used twice": len(census.repeated_files),
        "unused names": len(census.unused),
        "names that only tests use": len(census.only_tests),
    }
    for label, number in rows.items():
        print(f"{label:32} {number:6d}")
    for title, repeated in (("several files define", census.repeated), ("files share the name", census.repeated_files)):
        for name, files in repeated.items():
            print(f"{title} {name}: {', '.join(files)}")
    for title, found in (("unused", census.unused), ("only tests use", census.only_tests)):
        for one in found:
            print(f"{title}: {one.kind} {one.name} ({one.file}:{one.line})")


def main() -> int:
    """Print the census."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    census = count()
    if options.json:
        print(json.dumps(as_json(census)))
    else:
        print_census(census)
    return 0


if __name__ == "__main__":
    sys.exit(main())
