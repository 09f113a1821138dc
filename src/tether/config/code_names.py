"""What a recipe names that lies outside it: code that would be run, and addresses that answers would be sent to.

A run's folder keeps a seal over these, made with the user's key. A folder whose seal is missing or wrong came from
somebody else, or was changed.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from tether.config.recipes import Recipe, RLRecipe
from tether.config.rewards import FunctionPart, RemotePart
from tether.config.sections import TaskSettings
from tether.config.user import seal_of

SEAL = "begun-by.json"  # in a run's folder
REASONING = "reasoning-gym:"
OBJECT = "object:"  # before the name of a task that a Python program passed
MAX_BYTES = 1_000_000  # of a seal
PLACE_KEYS = ("host", "hostaddr", "port", "dbname", "service", "servicefile", "passfile")  # in a database's query

BUILT_IN = frozenset(("tether.demo.task:DemoTask", "tether.rewards.math_verified:compare_by_math_verify"))
"""The names of Tether's own code that recipes use."""


@dataclass(frozen=True)
class CodeName:
    """One name: `field` is the recipe's key, `detail` what it is called or sent with."""

    field: str
    reference: str
    detail: str = ""
    is_address: bool = False


def names_in(task: TaskSettings | None, parts: Sequence[Any]) -> tuple[CodeName, ...]:
    """The names in a task and in the parts of a reward; Tether's own are left out."""
    found: list[CodeName] = []
    if task is not None:
        name = task.name or ""
        if ":" in name and not name.startswith((REASONING, OBJECT)) and task.prompts is None:
            found.append(CodeName("task.name", name, json.dumps(task.options, sort_keys=True)))
        if task.reward:
            found.append(CodeName("task.reward", task.reward))
    for place, part in enumerate(parts):
        if isinstance(part, FunctionPart):
            found.append(CodeName(f"reward.parts[{place}].function", part.function))
        elif isinstance(part, RemotePart):
            found.append(CodeName(f"reward.parts[{place}].url", part.url, part.token_env or "", is_address=True))
    return tuple(each for each in found if each.reference not in BUILT_IN)


def not_typed(names: Iterable[CodeName], flags: Sequence[str]) -> tuple[CodeName, ...]:
    """The names that stand in a file: those whose key is no flag of the command line."""
    keys = {flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")}
    return tuple(name for name in names if name.field.partition("[")[0] not in keys)


def code_names(recipe: Recipe) -> tuple[CodeName, ...]:
    """All names in a recipe."""
    names = names_in(recipe.task, recipe.reward.parts) if isinstance(recipe, RLRecipe) else ()
    if recipe.store.url is not None:
        names = (*names, CodeName("store.url", without_secrets(recipe.store.url), is_address=True))
    return names


def names_of_record(record: Mapping[str, Any]) -> tuple[CodeName, ...]:
    """The same for a recipe as a run keeps it; nothing where it is none of this version."""
    from tether.config.load import recipe_from_record

    try:
        return code_names(recipe_from_record(record))
    except ValueError:
        return ()


def without_secrets(url: str) -> str:
    """A database's address: scheme, host and path, and what of the query says where it is."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    host, slash, path = place.partition("/")
    where = sorted(pair for pair in parse_qsl(query) if pair[0] in PLACE_KEYS)
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}" + (f"?{urlencode(where)}" if where else "")


def seal_record(names: Iterable[CodeName], root: Path) -> dict[str, Any]:
    """What a run's folder keeps; empty where the recipe names nothing, or no key can be kept."""
    names = tuple(names)
    seal = seal_of(_message(names, str(root))) if names else None
    return {"folder": str(root), "seal": seal} if seal is not None else {}


def begun_in(folder: Path, names: Iterable[CodeName]) -> str | None:
    """The folder from which this user began the run with these names; None where the seal does not say so."""
    file = folder / SEAL
    try:
        if not file.is_file():  # a named pipe would be waited for
            return None
        with file.open("rb") as opened:
            record = json.loads(opened.read(MAX_BYTES))
        root, seal = record["folder"], record["seal"]
        expected = seal_of(_message(tuple(names), root))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    ours = expected is not None and isinstance(seal, str) and hmac.compare_digest(expected.encode(), seal.encode())
    return root if ours else None


def _message(names: tuple[CodeName, ...], root: str) -> bytes:
    rows = [[name.field, name.reference, name.detail] for name in names]
    return json.dumps(["tether run", root, rows]).encode()
