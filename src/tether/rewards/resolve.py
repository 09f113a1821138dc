"""Finding an object that a recipe names as `package.module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from tether.config.code_names import BUILT_IN, CodeName
from tether.errors import ConfigError
from tether.rewards import consent
from tether.rewards.agree import agree_to_code
from tether.rewards.explain import explain
from tether.rewards.locate import Code, is_allowed, locate
from tether.rewards.user_modules import FILES, import_code
from tether.user_code import is_its_own


def resolve(reference: str, field: str) -> Any:
    """The object that `reference` names; `field` is the recipe's key, for the error."""
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
    """Raise where `resolve` would refuse the name, and tell the user what is about to run; nothing is imported."""
    if reference not in BUILT_IN:
        _checked(reference, field)


def _checked(reference: str, field: str) -> Code:
    place, _, name = reference.rpartition(":")
    now = consent.current()
    code = locate(place, field, now.root, now.allowed)
    agree_to_code(code, name, CodeName(field, reference))
    return code


def _attribute(found: Any, code: Code, place: str, name: str, field: str) -> Any:
    """What a name leads to in a module; what the module only imported from a library is not its own."""
    for step in name.split("."):
        if not hasattr(found, step):
            raise ConfigError(f"{field}: {place} has no {name!r}")
        found = getattr(found, step)
        if isinstance(found, ModuleType):
            raise ConfigError(f"{field}: {place}:{name} leads through a module, {step}: name what stands in {place}")
    defined = inspect.isroutine(found) or inspect.isclass(found)
    made = not defined or "<locals>" in getattr(found, "__qualname__", "")  # by a call in the user's code
    home = place if made else getattr(found, "__module__", None)
    if not _is_of(home, code, place):
        top = str(home).partition(".")[0]
        also = "" if _is_never_called(top) or home is None else f", or allow it with --allow-code {top}"
        raise ConfigError(
            f"{field}: {name} in {place} is {home or 'a built-in'}'s, which {place} only imports: write a function of "
            f"your own around it{also}"
        )
    return found


def _is_never_called(top: str) -> bool:
    return top == "tether" or top in sys.stdlib_module_names


def _is_of(home: str | None, code: Code, place: str) -> bool:
    """Whether an object of module `home` belongs to the code that was named, or to the user's other code."""
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
