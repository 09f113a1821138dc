"""Finding an object that a recipe names as `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from tether.errors import ConfigError


def resolve(reference: str, field: str) -> Any:
    """The object called `package.module:name`; `field` is the recipe's key, for the error."""
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{field}: {reference!r} is not of the form package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"{field}: there is no module {missing.name!r}; install it, or run from the folder that holds it"
        ) from missing
    if not hasattr(module, name):
        raise ConfigError(f"{field}: module {module_name} has no {name!r}")
    return getattr(module, name)
