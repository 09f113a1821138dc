"""Decide whether code that a recipe names may run: find its file, and ask the user where needed.

Nothing is imported here. A name leads to a file under the folder that the user ran from, or to a package that the user
allowed. Tether and the standard library are never called, and installed packages only if the user allows them.

A name is the user's own where they typed it, where it is in a recipe under the folder that they ran from, or where it
is in a run that they started there. The user's own code is announced once; code from anywhere else needs permission.
See docs/security.md.
"""

from __future__ import annotations

import ast
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

from tether.config.allowed_code import (
    BUILT_IN,
    FILE,
    CodeName,
    begun_in,
    code_names,
    is_known,
    not_typed,
    remember,
    user_folder,
)
from tether.config.control_recipe import ControlRecipe
from tether.config.recipes import Recipe
from tether.errors import ConfigError
from tether.rewards.consent import current
from tether.store.folder import is_run

MAX_FILES = 500  # maximum number of files in a digest
MAX_SOURCE = 2_000_000  # bytes; the imports of larger files are not followed
PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Code:
    """A module that a recipe names. `file` is None for a package that was allowed by its name."""

    module: str
    file: Path | None
    folder: Path | None = None  # the folder to import it from, where it is not on Python's own path
    digest: str = ""  # SHA-256 of the file and of the neighboring files that it imports

    @property
    def shown(self) -> str:
        """The file and the beginning of its digest, for messages."""
        return f"{self.file} (SHA-256 {self.digest[:16]})" if self.file is not None else self.module


def locate(place: str, field: str, root: Path, allowed: Sequence[str] = ()) -> Code:
    """The code at `package.module` or `file.py`; raises ConfigError, with the repair, where it may not run."""
    if place.endswith(".py"):
        return _file(place, field, root)
    top = place.partition(".")[0]
    if not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"{field}: {place!r} is not a module: write package.module:name or file.py:name")
    if top in sys.stdlib_module_names or top == "tether":
        owner = "Tether itself" if top == "tether" else "Python's standard library"
        repair = f"write a function of your own around it, in a file under {root}"
        if (hidden := _below(root, place)) is not None:
            repair = f"name your file of that name as {hidden.relative_to(root)}:name"
        raise ConfigError(f"{field}: {place} belongs to {owner}, which a recipe may not call: {repair}")
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
    """Whether a module, or a package that contains it, is allowed."""
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
    except (OSError, ValueError, RuntimeError) as error:  # the name is too long, has a zero byte, or is a link loop
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{field}: {place!r} is not a file name ({error})") from None
    return _own("", file, field, root, file.parent)


def _own(module: str, file: Path, field: str, root: Path, folder: Path) -> Code:
    """The user's own code; raises for a file in a virtual environment or in Tether's source, even below `root`."""
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
    """The folders of Python, its packages and Tether."""
    named = sysconfig.get_paths()
    places = [named[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    return tuple({Path(place).resolve() for place in places})


def _installed(top: str, root: Path) -> ModuleSpec | None:
    """Find a module as Python would, without the working folder and without importing anything.

    A package that is installed in editable mode may have its own finder and be on no search path.
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
    """The folder that contains a top-level package or module."""
    return home.parent if home.name == top else home


def _top_folder(file: Path, module: str) -> Path:
    """The folder from which `module`, in `file`, is imported."""
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
    """SHA-256 of a file and, recursively, of every file in `folders` that its import statements name."""
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
        return  # importing the file reports the error
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
    """The files that `import a.b.c` executes."""
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


# -- who gave a name ----------------------------------------------------------------------------------------------


def agree_to_recipe(recipe: Recipe | ControlRecipe, path: str | None, flags: Sequence[str]) -> None:
    """For `tether train`: names in flags, and in a recipe in the user's folder, are the user's own."""
    _agree_to(code_names(recipe), flags, _elsewhere(path))


def agree_to_file(names: Sequence[CodeName], path: str) -> None:
    """For a file with several recipes: its names are the user's own if it is in the user's folder."""
    _agree_to(names, (), _elsewhere(path))


def agree_to_run(recipe: Recipe | ControlRecipe, folder: Path, flags: Sequence[str] = ()) -> None:
    """For a resumed run: its names are the user's own if they started it from this folder."""
    agree_to_names(code_names(recipe), code_names(recipe), folder, flags)


def agree_to_names(
    names: Sequence[CodeName], sealed: Sequence[CodeName], folder: Path, flags: Sequence[str] = ()
) -> None:
    """The same for some names of a run whose seal covers `sealed`."""
    began = begun_in(folder, sealed)
    if began is None:
        _agree_to(names, flags, f"{folder}, which you did not start on this account")
    elif Path(began) != current().root:  # a file of the same name may differ here; a URL is the same everywhere
        _check_found(names, began)
        _agree_to([name for name in names if not name.is_address], flags, f"{folder}, which was started in {began}")
    else:
        _agree_to(names, flags, "")


def _check_found(names: Sequence[CodeName], began: str) -> None:
    """Where the code of a run is not found from here, name the folder that the run was started in."""
    for name in names:
        if not name.is_address and name.reference not in BUILT_IN:
            try:
                locate(name.reference.rpartition(":")[0], name.field, current().root, current().allowed)
            except ConfigError as error:
                raise ConfigError(f"{error}; the run was started in {began}: run the command from there") from None


def _agree_to(names: Sequence[CodeName], flags: Sequence[str], came_with: str) -> None:
    """What the user typed is their own; the rest came with `came_with`, unless that is empty."""
    written = not_typed(names, flags)
    agree([name for name in names if name not in written], "")
    agree(written, came_with)


def _elsewhere(path: str | None) -> str:
    """Why a recipe file is not the user's own; empty where it is."""
    if path is None:
        return ""
    file = Path(path).expanduser().resolve()
    shipped = Path(__file__).parents[1]
    if not file.is_relative_to(current().root) and not file.is_relative_to(shipped):
        return f"{path}, which is outside {current().root}"
    if is_run(file.parent):
        return f"{path}, which is in a run's folder"
    return ""


# -- asking -------------------------------------------------------------------------------------------------------


def agree(names: Iterable[CodeName], came_with: str) -> None:
    """Get the user's permission for each name before anything runs; raises ConfigError where it is not given.

    `came_with` names where the names came from; it is empty for the user's own.
    """
    for name in names:
        if name.reference in BUILT_IN:
            continue
        if not name.is_address:
            place, _, attribute = name.reference.rpartition(":")
            agree_to_code(locate(place, name.field, current().root, current().allowed), attribute, name, came_with)
        elif not came_with:
            if current().tell is not None and not is_known(mark := _mark("address", name.reference, name.detail)):
                remember(mark, name.reference)
        else:
            with_token = f" with the value of the variable {name.detail}" if name.detail else ""
            what = f"send its texts to {name.reference}{with_token}"
            _agree(_mark("address", name.reference, name.detail), what, name, came_with)


def agree_to_code(code: Code, attribute: str, name: CodeName, came_with: str = "") -> None:
    """Get the user's permission for one piece of code."""
    if code.file is None:
        return  # a package that the user allowed by name
    mark = _mark(code.digest, attribute, name.detail)
    if came_with:
        _agree(mark, f"run {attribute} of {code.shown}", name, came_with)
        current().agreed.add(_mark(code.digest, attribute, ""))
        return
    tell = current().tell
    if tell is None:
        return
    for each in dict.fromkeys((_mark(code.digest, attribute, ""), mark)):
        if each in current().agreed:
            continue
        if not is_known(each):
            if each is not mark or not name.detail:
                tell(f"running {attribute} of {code.shown}, which {name.field} names")
            remember(each, name.reference)
        current().agreed.add(each)


def _agree(mark: str, what: str, name: CodeName, came_with: str) -> None:
    if mark in current().agreed or is_known(mark) or _is_allowed(name):
        current().agreed.add(mark)
        return
    question = f"{name.field} in {came_with}, wants to {what}."
    ask = current().ask
    if ask is not None and ask(question):
        _settle(mark, name.reference)
        return
    word = name.reference if name.is_address else name.reference.rpartition(":")[0]
    raise ConfigError(f"{question} Nothing was run. If you trust it, add --allow-code {word}")


def _is_allowed(name: CodeName) -> bool:
    if name.is_address:
        return name.reference in current().allowed
    place = name.reference.rpartition(":")[0]
    if not place.endswith(".py"):
        return is_allowed(place, current().allowed)
    root = current().root
    files = [(root / word).resolve() for word in current().allowed if word.endswith(".py")]
    return (root / place).resolve() in files


def _settle(mark: str, what: str) -> None:
    current().agreed.add(mark)
    remember(mark, what)


def _mark(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
