"""Whether code that a recipe names may run: the user's own is told of once, code from elsewhere is asked about.

A name is the user's own where they typed it, or where it stands in a recipe under the folder that they ran from, or in
a run that they began there. Everything else came from elsewhere. docs/security.md says it in full.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tether.config.code_names import BUILT_IN, CodeName, begun_in, code_names, not_typed
from tether.config.recipes import Recipe
from tether.config.user import is_known, remember
from tether.errors import ConfigError
from tether.rewards.consent import current
from tether.rewards.locate import Code, is_allowed, locate
from tether.store.folder import is_run

# -- by whom a name was given -------------------------------------------------------------------------------------


def agree_to_recipe(recipe: Recipe, path: str | None, flags: Sequence[str]) -> None:
    """For `tether train`: what the flags name is the user's own, and so is what a recipe in their folder names."""
    _agree_to(code_names(recipe), flags, _elsewhere(path))


def agree_to_run(recipe: Recipe, folder: Path, flags: Sequence[str] = ()) -> None:
    """For a run that is gone on with: what it names is the user's own if they began it from this folder."""
    agree_to_names(code_names(recipe), code_names(recipe), folder, flags)


def agree_to_names(
    names: Sequence[CodeName], sealed: Sequence[CodeName], folder: Path, flags: Sequence[str] = ()
) -> None:
    """The same for some names of a run, whose seal is over `sealed`."""
    began = begun_in(folder, sealed)
    if began is None:
        _agree_to(names, flags, f"{folder}, which you did not begin on this account")
    elif Path(began) != current().root:  # a file of the same name may be another's here; an address is the same
        _check_found(names, began)
        _agree_to([name for name in names if not name.is_address], flags, f"{folder}, which was begun in {began}")
    else:
        _agree_to(names, flags, "")


def _check_found(names: Sequence[CodeName], began: str) -> None:
    """Say where a run was begun, where the code that it names is not found from here."""
    for name in names:
        if not name.is_address and name.reference not in BUILT_IN:
            try:
                locate(name.reference.rpartition(":")[0], name.field, current().root, current().allowed)
            except ConfigError as error:
                raise ConfigError(f"{error}; the run was begun in {began}: run the command from there") from None


def _agree_to(names: Sequence[CodeName], flags: Sequence[str], came_with: str) -> None:
    """What the user typed is their own; the rest came with `came_with`, where that says something."""
    written = not_typed(names, flags)
    agree([name for name in names if name not in written], "")
    agree(written, came_with)


def _elsewhere(path: str | None) -> str:
    """Why a recipe's file is not the user's own; empty where it is."""
    if path is None:
        return ""
    file = Path(path).expanduser().resolve()
    shipped = Path(__file__).parents[1]
    if not file.is_relative_to(current().root) and not file.is_relative_to(shipped):
        return f"{path}, which is outside {current().root}"
    if is_run(file.parent):
        return f"{path}, which lies in a run's folder"
    return ""


# -- asking -------------------------------------------------------------------------------------------------------


def agree(names: Iterable[CodeName], came_with: str) -> None:
    """Have the user's word for each name before anything runs; raises ConfigError where it is not given.

    `came_with` says what the names came with, where that is not the user's own.
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
    """Have the user's word for one piece of code."""
    if code.file is None:
        return  # a package that was allowed by its name
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
