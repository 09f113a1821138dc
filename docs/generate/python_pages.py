"""The Python reference, from signatures and docstrings, read with `ast`: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_text import code, escaped, from_docstring

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tether"
FOLDER = "reference/python"
PACKAGES = ("ops", "algorithms")
MODULES = ("types", "protocols")
NAME = re.compile(r"`(tether(?:\.\w+)+)(\(\))?`")


@dataclass(frozen=True)
class Module:
    """One Python file: its dotted name, its page and what it defines."""

    name: str
    page: str
    file: Path
    tree: ast.Module = field(repr=False)

    @property
    def public(self) -> list[ast.ClassDef | ast.FunctionDef]:
        """Its classes and functions whose names do not begin with an underscore."""
        return [
            node
            for node in self.tree.body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
        ]


@cache
def modules() -> tuple[Module, ...]:
    """The modules of the reference, in order."""
    files = [SOURCE / f"{name}.py" for name in MODULES]
    for package in PACKAGES:
        files += sorted(file for file in (SOURCE / package).glob("*.py") if file.stem != "__init__")
    found = []
    for file in files:
        parts = file.relative_to(SOURCE).with_suffix("").parts
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found.append(Module(".".join(("tether", *parts)), f"{FOLDER}/{'/'.join(parts)}.md", file, tree))
    return tuple(found)


def python_pages() -> dict[str, str]:
    """One page for each module, and one that lists them."""
    return {f"{FOLDER}/index.md": index_page()} | {module.page: module_page(module) for module in modules()}


def python_nav() -> list[object]:
    """The Python reference in the navigation."""
    by_package: dict[str, list[object]] = {}
    alone: list[object] = []
    for module in modules():
        parts = module.name.split(".")
        entry = {parts[-1]: module.page}
        (alone if len(parts) == 2 else by_package.setdefault(parts[1], [])).append(entry)
    return [f"{FOLDER}/index.md", *alone, *({name: entries} for name, entries in by_package.items())]


def index_page() -> str:
    """All modules with their first lines."""
    firsts = {module: (ast.get_docstring(module.tree) or "").partition("\n")[0] for module in modules()}
    lines = [
        f"- [{code(module.name)}]({module.page.removeprefix(f'{FOLDER}/')}): {escaped(first)}"
        for module, first in firsts.items()
    ]
    return "\n\n".join(
        [
            "# Python",
            "The types, the protocols that you extend, the mathematics (`tether.ops`) and the algorithms. "
            "[The mathematics](../../mathematics.md) has the equations; [architecture](../../architecture.md) has the "
            "rest of the packages.",
            "\n".join(lines),
        ]
    )


def module_page(module: Module) -> str:
    """A module: its docstring, constants, functions and classes."""
    parts = [f"# {code(module.name)}", from_docstring(ast.get_docstring(module.tree) or "")]
    lines = module.file.read_text(encoding="utf-8").splitlines()
    for node in module.public:
        parts += definition(node, module, lines)
    return "\n\n".join(part for part in parts if part)


def definition(node: ast.ClassDef | ast.FunctionDef, module: Module, lines: list[str]) -> Iterator[str]:
    """A class or a function: signature, docstring, fields, methods, source."""
    yield f"## {code(node.name)} {{ #{node.name} }}"
    if isinstance(node, ast.FunctionDef):
        yield _python(signature(node))
        yield from_docstring(ast.get_docstring(node) or "")
    else:
        bases = f"({', '.join(ast.unparse(base) for base in node.bases)})" if node.bases else ""
        decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
        fields = "".join(f"\n    {line}" for line in class_fields(node, lines))
        yield _python(f"{decorators}class {node.name}{bases}{':' if fields else ''}{fields}")
        yield from_docstring(ast.get_docstring(node) or "")
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and _is_public(method) and ast.get_docstring(method):
                yield f"#### {code(method.name)} {{ #{_anchor(node, method)} }}"
                yield _python(signature(method))
                yield from_docstring(ast.get_docstring(method) or "")
    source = "\n".join(lines[_start(node) - 1 : node.end_lineno])
    place = f"{module.file.relative_to(ROOT).as_posix()}, line {node.lineno}"
    yield f'<details class="quote" data-search-exclude markdown="1">\n<summary>Source: {place}</summary>'
    yield f"{_python(source)}\n\n</details>"


def signature(node: ast.FunctionDef) -> str:
    """`def name(...) -> type`, on one line where it fits, else one argument a line."""
    decorators = "".join(
        f"@{ast.unparse(each)}\n"
        for each in node.decorator_list
        if ast.unparse(each) in ("property", "classmethod", "staticmethod")
    )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    whole = f"def {node.name}({ast.unparse(node.args)}){returns}"
    if len(whole) <= 88:
        return decorators + whole
    return f"{decorators}def {node.name}(\n" + "".join(f"    {one},\n" for one in arguments(node.args)) + f"){returns}"


def arguments(args: ast.arguments) -> list[str]:
    """The arguments of a signature, one by one."""
    found: list[str] = []
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]
    for place, (arg, default) in enumerate(zip(positional, defaults, strict=True), 1):
        found.append(_argument(arg, default))
        if place == len(args.posonlyargs):
            found.append("/")
    if args.vararg:
        found.append(f"*{ast.unparse(args.vararg)}")
    elif args.kwonlyargs:
        found.append("*")
    found += [_argument(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [*found, f"**{ast.unparse(args.kwarg)}"] if args.kwarg else found


def class_fields(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """The annotated fields of a class with their defaults and the remarks behind them."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            remark = lines[(item.end_lineno or item.lineno) - 1][item.end_col_offset or 0 :].strip()
            yield ast.unparse(item) + (f"  {remark}" if remark.startswith("#") else "")


def anchors() -> dict[str, str]:
    """Dotted name -> page and anchor, of every module, class, function and method in the reference."""
    found = {module.name: module.page for module in modules()}
    for module in modules():
        for node in module.public:
            found[f"{module.name}.{node.name}"] = f"{module.page}#{node.name}"
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and _is_public(method) and ast.get_docstring(method):
                    found[f"{module.name}.{node.name}.{method.name}"] = f"{module.page}#{_anchor(node, method)}"
    return found


def _anchor(node: ast.ClassDef | ast.FunctionDef, method: ast.FunctionDef) -> str:
    """Double underscores would be read as bold text."""
    return f"{node.name}.{method.name.strip('_')}"


def _is_public(method: ast.FunctionDef) -> bool:
    return method.name == "__call__" or not method.name.startswith("_")


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(arg)
    return f"{ast.unparse(arg)}{' = ' if arg.annotation else '='}{ast.unparse(default)}"


def _start(node: ast.ClassDef | ast.FunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _python(text: str) -> str:
    return f"```python\n{text}\n```"
