"""Where the code lies that a recipe names, found without importing anything.

A name leads to a file under the folder that the user ran from, or to a package that they allowed; to the standard
library never, and to an installed package not by default.
"""

from __future__ import annotations

import ast
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

from tether.config.user import FILE, user_folder
from tether.errors import ConfigError

MAX_FILES = 500  # that a digest looks at
MAX_SOURCE = 2_000_000  # bytes of a file that is looked at for what it imports
PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Code:
    """A module that a recipe names. `file` is None for a package that was allowed by its name."""

    module: str
    file: Path | None
    folder: Path | None = None  # in which it is looked for, where it is not on Python's own path
    digest: str = ""  # SHA-256 of the file and of what it imports from beside it

    @property
    def shown(self) -> str:
        """For people: the file and the beginning of its digest."""
        return f"{self.file} (SHA-256 {self.digest[:16]})" if self.file is not None else self.module


def locate(place: str, field: str, root: Path, allowed: Sequence[str] = ()) -> Code:
    """The code at `package.module` or `file.py`; raises ConfigError, with the repair, where it may not be run."""
    if place.endswith(".py"):
        return _file(place, field, root)
    top = place.partition(".")[0]
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"{field}: {place!r} is no module: write package.module:name or file.py:name")
    if top in sys.stdlib_module_names or top == "tether":
        owner = "Tether itself" if top == "tether" else "Python's standard library"
        repair = f"write a function of your own around it, in a file under {root}"
        if (hidden := _below(root, place)) is not None:
            repair = f"name your file of that name as {hidden.relative_to(root)}:name"
        raise ConfigError(f"{field}: {place} is of {owner}, which a recipe never calls: {repair}")
    installed = _installed(top, root)
    inside = _below(root, place)
    if installed is None:
        if inside is None:
            raise ConfigError(
                f"{field}: there is no module {place!r}; install it, or run from the folder that holds it"
            )
        return _own(place, inside, field, root, root)
    homes = [Path(home) for home in installed.submodule_search_locations or ()]
    if installed.origin is not None:
        homes.append(Path(installed.origin).parent)
    own = all(_is_own(home.resolve(), root) for home in homes)
    if not own and is_allowed(place, allowed):
        return Code(place, None)
    if inside is not None and not own:
        raise ConfigError(
            f"{field}: {top} is both in {root} and an installed package: name the file, such as {top}.py:name, or "
            f"allow the package with --allow-code {top}"
        )
    if not own:
        raise ConfigError(
            f"{field}: {top} is code outside {root}, which a recipe runs only if you allow it: add --allow-code {top}, "
            f"or `allow: [{top}]` to {user_folder() / FILE}"
        )
    found = inside or next((file for home in homes if (file := _below(_parent(home, top), place))), None)
    if found is None:
        raise ConfigError(f"{field}: there is no module {place!r}; install it, or run from the folder that holds it")
    return _own(place, found, field, root, _top_folder(found, place))


def is_allowed(place: str, allowed: Sequence[str]) -> bool:
    """Whether a module, or a package that it is in, is among those that were allowed."""
    return any(place == name or place.startswith(f"{name}.") for name in allowed)


def _file(place: str, field: str, root: Path) -> Code:
    try:
        file = (root / Path(place).expanduser()).resolve()
        if not file.is_relative_to(root):
            raise ConfigError(
                f"{field}: {place} is outside the working folder {root}: run tether from a folder above it"
            )
        if not file.is_file():
            raise ConfigError(f"{field}: there is no file {place} in {root}")
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a loop of links, a zero byte
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{field}: {place!r} is no file's name ({error})") from None
    return _own("", file, field, root, file.parent)


def _own(module: str, file: Path, field: str, root: Path, folder: Path) -> Code:
    """Code of the user's own; a virtual environment or Tether's source below the working folder is not."""
    file = file.resolve()
    if not _is_own(file, root):
        raise ConfigError(
            f"{field}: {file} is not your own code in {root} but installed there, or linked from elsewhere: name a "
            "file of yours"
        )
    try:
        return Code(module, file, folder, digest_of(file, (folder, root)))
    except OSError as error:
        raise ConfigError(f"{field}: {file} cannot be read: {error.strerror}") from error


def _is_own(path: Path, root: Path) -> bool:
    installed = any(part in PACKAGES for part in path.parts) or any(map(path.is_relative_to, _libraries()))
    return path.is_relative_to(root) and not installed


@cache
def _libraries() -> tuple[Path, ...]:
    """Where Python, its packages and Tether are."""
    named = sysconfig.get_paths()
    places = [named[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    return tuple({Path(place).resolve() for place in places})


def _installed(top: str, root: Path) -> ModuleSpec | None:
    """Where Python would find a module, the working folder apart; nothing is imported.

    A package that is installed in editable mode may be found by a finder of its own, and lies on no search path.
    """
    found = PathFinder.find_spec(top, [entry for entry in sys.path if entry and not _same(entry, root)])
    for finder in sys.meta_path:
        kind = finder if isinstance(finder, type) else type(finder)
        if found is None and kind not in (PathFinder, BuiltinImporter, FrozenImporter) and not _is_ours(kind):
            with suppress(Exception):
                found = finder.find_spec(top, None)
    return found


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "tether"


def _same(entry: str, folder: Path) -> bool:
    try:
        return Path(entry).resolve() == folder
    except OSError:
        return False


def _parent(home: Path, top: str) -> Path:
    """The folder that a top-level package or module lies in."""
    return home.parent if home.name == top else home


def _top_folder(file: Path, module: str) -> Path:
    """The folder from which `module` is imported, where it is in `file`."""
    up = len(module.split(".")) - (file.name != "__init__.py")
    return file.parents[up]


def _below(folder: Path, module: str) -> Path | None:
    """The file of a module below a folder."""
    base = folder.joinpath(*module.split("."))
    for file in (base / "__init__.py", base.with_name(f"{base.name}.py")):
        if file.is_file():
            return file
    return None


# -- the digest ---------------------------------------------------------------------------------------------------


def digest_of(file: Path, folders: Sequence[Path]) -> str:
    """SHA-256 of a file and of every file in `folders` that its import statements lead to, and theirs."""
    seen: dict[Path, bytes] = {}
    waiting = [file]
    while waiting and len(seen) < MAX_FILES:
        each = waiting.pop()
        if each in seen:
            continue
        seen[each] = each.read_bytes()
        if each.suffix == ".py":
            waiting += _imported(seen[each], each, folders)
    base = file.parent
    rows = sorted((_relative(path, base), hashlib.sha256(text).hexdigest()) for path, text in seen.items())
    return hashlib.sha256("\n".join(f"{digest} {name}" for name, digest in rows).encode()).hexdigest()


def _relative(path: Path, base: Path) -> str:
    up = 0
    while not path.is_relative_to(base) and base != base.parent:
        base, up = base.parent, up + 1
    return "../" * up + path.relative_to(base).as_posix()


def _imported(source: bytes, file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    if len(source) > MAX_SOURCE:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # importing it says what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _chain(folders, alias.name)
        elif isinstance(node, ast.ImportFrom):
            bases = folders if not node.level else [_up(file, node.level)]
            start = f"{node.module}." if node.module else ""
            if node.module:
                yield from _chain(bases, node.module)
            for alias in node.names:
                yield from _chain(bases, start + alias.name)


def _up(file: Path, level: int) -> Path:
    parents = file.parents
    return parents[min(level, len(parents)) - 1]


def _chain(folders: Sequence[Path], module: str) -> Iterator[Path]:
    """The files that `import a.b.c` runs."""
    parts = module.split(".")
    for folder in folders:
        found = False
        for count in range(1, len(parts) + 1):
            base = folder.joinpath(*parts[:count])
            names = (base / "__init__.py", *(base.with_name(base.name + end) for end in (".py", *EXTENSION_SUFFIXES)))
            for path in names:
                if path.is_file():
                    found = True
                    yield path
        if found:
            return
