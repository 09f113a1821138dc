"""Import an object that a recipe names as `package.module:name` or `file.py:name`.

The working folder is not on `sys.path`. A finder at the end of Python's list serves it, so a `queue.py` there hides no
library module. The finder answers only imports from the user's own code, so a library that looks for an optional
package never finds a file of the working folder. Bytecode is neither read nor written: the code that runs is the code
that was digested.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, ModuleSpec
from importlib.machinery import SourceFileLoader as _SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from tether.config.allowed_code import BUILT_IN, CodeName
from tether.errors import ConfigError
from tether.rewards import consent
from tether.rewards.agree import Code, agree_to_code, is_allowed, locate
from tether.rewards.calling import explain
from tether.user_code import is_its_own

FILES = "tether_user_file"  # prefix, in sys.modules, of modules loaded from files


class SourceLoader(_SourceFileLoader):
    """Compiles the source; ignores `.pyc` files, which may hold different code."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of a module."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


LOADERS = ((SourceLoader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES))


class _Finders:
    """The finders of the user's modules; one pair per process."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.served: set[str] = set()  # names of the modules found here
        self.asked = threading.local()  # the name from the recipe, during its import
        self.first, self.last = _First(self), _Last(self)

    def add(self, folders: Sequence[Path]) -> None:
        """Add folders to search."""
        self.folders += [folder for folder in folders if folder not in self.folders]
        if self.first not in sys.meta_path:
            sys.meta_path.insert(0, self.first)
        if self.last not in sys.meta_path:
            sys.meta_path.append(self.last)

    def find(self, name: str, folders: Sequence[Path | str]) -> ModuleSpec | None:
        """The module in the first folder that has it."""
        spaces: list[str] = []
        for folder in folders:
            spec = FileFinder(str(folder), *LOADERS).find_spec(name)
            if spec is not None and spec.loader is not None:
                self.served.add(name)
                return spec
            spaces += (spec.submodule_search_locations or []) if spec is not None else []
        if not spaces:
            return None
        self.served.add(name)
        space = ModuleSpec(name, None, is_package=True)
        space.submodule_search_locations = spaces
        return space


class _First:
    """The first finder: serves the module that a recipe names, and modules inside packages found here."""

    def __init__(self, ours: _Finders) -> None:
        self.ours = ours

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """The named module, or one inside a package of the user's."""
        del target
        if path is None:
            place = getattr(self.ours.asked, "place", None)
            return self.ours.find(name, [place]) if place is not None and self.ours.asked.name == name else None
        return self.ours.find(name, list(path)) if name.rpartition(".")[0] in self.ours.served else None


class _Last:
    """The last finder: serves modules that no other finder has, for imports from the user's own code."""

    def __init__(self, ours: _Finders) -> None:
        self.ours = ours

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """A top-level module of the working folder."""
        del target
        if path is not None or not (getattr(self.ours.asked, "name", None) == name or _asked_by_user_code()):
            return None
        return self.ours.find(name, self.ours.folders)


_finders = _Finders()


def _asked_by_user_code() -> bool:
    """Whether the current import statement is in a module that was loaded here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and file not in (__file__, importlib.__file__):
            return isinstance(frame.f_globals.get("__loader__"), SourceLoader)
        frame = frame.f_back
    return False


def import_module_from(folder: Path, name: str) -> ModuleType:
    """Import a module by a name that the user typed; `folder` is searched last."""
    _finders.add([folder.resolve()])
    _finders.asked.name = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    finally:
        _finders.asked.name = None


def import_code(code: Code, root: Path) -> ModuleType:
    """Import the module; replaces a module of the same name from another folder."""
    if code.file is None:
        return importlib.import_module(code.module)
    assert code.folder is not None
    _finders.add([code.folder, root])
    if not code.module:
        return _from_file(code.file, root)
    known = sys.modules.get(code.module)
    if known is not None and getattr(known, "__file__", None) not in (None, str(code.file)):
        _forget(code.module.partition(".")[0])
    _finders.folders.sort(key=lambda folder: folder != code.folder)
    _finders.asked.name, _finders.asked.place = code.module.partition(".")[0], code.folder
    try:
        return importlib.import_module(code.module)
    finally:
        _finders.asked.name = _finders.asked.place = None


def _forget(top: str) -> None:
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        if name in _finders.served:
            del sys.modules[name]
            _finders.served.discard(name)


def _from_file(file: Path, root: Path) -> ModuleType:
    """Import a file as a module; it can import from its own folder, like a script."""
    name = f"{FILES}.{file.relative_to(root).with_suffix('').as_posix().replace('/', '.')}"
    if (known := sys.modules.get(name)) is not None and known.__file__ == str(file):
        return known
    _finders.folders.sort(key=lambda folder: folder != file.parent)
    spec = spec_from_file_location(name, file, loader=SourceLoader(name, str(file)))
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def resolve(reference: str, field: str) -> Any:
    """The object that `reference` names; `field` is the recipe key, for errors."""
    place, colon, name = reference.rpartition(":")
    if not (place and colon and name):
        raise ConfigError(f"{field}: {reference!r} is neither package.module:name nor file.py:name")
    if reference in BUILT_IN:
        return getattr(importlib.import_module(place), name)
    code = _checked(reference, field)
    try:
        found: Any = import_code(code, consent.current().root)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{place}.".startswith(f"{missing.name}."):  # a module that the code imports
            raise ConfigError(f"{field}: {place} could not be imported: {explain(missing)}") from missing
        raise ConfigError(
            f"{field}: there is no module {missing.name!r}; install it, or run from the folder that holds it"
        ) from missing
    except ConfigError:
        raise
    except BaseException as error:
        if not is_its_own(error):
            raise
        raise ConfigError(f"{field}: {place} could not be imported: {explain(error)}") from error
    return _attribute(found, code, place, name, field)


def check_code(reference: str, field: str) -> None:
    """Raise where `resolve` would reject the name, and announce the code that will run; imports nothing."""
    if reference not in BUILT_IN:
        _checked(reference, field)


def _checked(reference: str, field: str) -> Code:
    place, _, name = reference.rpartition(":")
    now = consent.current()
    code = locate(place, field, now.root, now.allowed)
    agree_to_code(code, name, CodeName(field, reference))
    return code


def _attribute(found: Any, code: Code, place: str, name: str, field: str) -> Any:
    """The object behind a name in a module; rejects objects that the module only imported from a library."""
    for step in name.split("."):
        if not hasattr(found, step):
            close = get_close_matches(step, [known for known in dir(found) if not known.startswith("_")], n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{field}: {place} has no {name!r}{hint}")
        found = getattr(found, step)
        if isinstance(found, ModuleType):
            raise ConfigError(f"{field}: {place}:{name} leads through a module, {step}: name what is in {place}")
    defined = inspect.isroutine(found) or inspect.isclass(found)
    made = not defined or "<locals>" in getattr(found, "__qualname__", "")  # by a call in the user's code
    home = place if made else getattr(found, "__module__", None)
    if not _is_of(home, code, place):
        top = str(home).partition(".")[0]
        also = "" if _is_never_called(top) or home is None else f", or allow it with --allow-code {top}"
        raise ConfigError(
            f"{field}: {name} in {place} belongs to {home or 'a built-in'}, and {place} only imports it: write a "
            f"function of your own around it{also}"
        )
    return found


def _is_never_called(top: str) -> bool:
    return top == "tether" or top in sys.stdlib_module_names


def _is_of(home: str | None, code: Code, place: str) -> bool:
    """Whether an object of module `home` belongs to the named code, or to other code of the user's."""
    if home is None:
        return False
    top = home.partition(".")[0]
    if home == place or home.startswith(FILES):
        return True
    if not place.endswith(".py") and top == place.partition(".")[0]:
        return True
    now = consent.current()
    if _is_never_called(top):
        return False
    if is_allowed(home, now.allowed):
        return True
    try:
        return locate(home, "", now.root).file is not None if code.file is not None else False
    except ConfigError:
        return False
