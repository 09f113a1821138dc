"""Code and addresses that a recipe names, and the user's own list of what may run.

The user's folder has the packages that they allow, the code that ran before, and a key. The user writes its
`config.yaml`; Tether writes the rest. No recipe, run folder or model can change it.

A recipe can name code to run, and addresses to send answers to. A run's folder keeps a seal over these names, made with
the user's key. If the seal is missing or wrong, the folder came from another user or was changed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import yaml

from tether.config.control_recipe import ControlRecipe
from tether.config.recipes import Recipe, RLRecipe
from tether.config.rewards import FunctionPart, RemotePart
from tether.config.sections import TaskSettings
from tether.errors import ConfigError

VARIABLE = "TETHER_CONFIG"
FILE = "config.yaml"
KNOWN = "known-code.txt"  # one line per piece of code that ran: its digest, a space, and its description
KEY = "key"  # 32 random bytes, readable by the user alone; its seals identify the user's own runs
MAX_CONFIG_BYTES = 100_000  # of config.yaml


def user_folder() -> Path:
    """$TETHER_CONFIG, else $XDG_CONFIG_HOME/tether, else ~/.config/tether."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        return (shared if shared.is_absolute() else Path.home() / ".config") / "tether"
    except RuntimeError as error:  # from Path.home()
        raise ConfigError(f"there is no home folder to keep settings in: set HOME or {VARIABLE} ({error})") from error


def allowed_by_user() -> tuple[str, ...]:
    """`allow` in config.yaml: packages, modules or files whose code a recipe may name."""
    file = user_folder() / FILE
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{file} is longer than {MAX_CONFIG_BYTES} bytes: it may contain only `allow: [PACKAGE, ...]`"
        )
    try:
        found = yaml.safe_load(text.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a YAML file: write `allow: [PACKAGE, ...]` in it") from error
    if found is None:
        return ()
    allow = found.get("allow", []) if isinstance(found, dict) else None
    if not isinstance(found, dict) or set(found) - {"allow"} or not isinstance(allow, list):
        raise ConfigError(f"{file} must contain one key, `allow`, a list of packages: allow: [my_package]")
    if wrong := [word for word in allow if not isinstance(word, str)]:
        raise ConfigError(f"allow in {file}: {wrong[0]!r} is not the name of a package")
    return tuple(allow)


def is_known(digest: str) -> bool:
    """Whether this code ran before, or was agreed to."""
    try:
        lines = (user_folder() / KNOWN).read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ConfigError):
        return False
    return any(line.partition(" ")[0] == digest for line in lines)


def remember(digest: str, what: str) -> None:
    """Add a line to the list of known code; if the folder is not writable, the user is asked again next time."""
    line = f"{digest} {' '.join(what.split())}\n".encode()
    with suppress(OSError, ConfigError):
        folder = user_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / KNOWN, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)  # one write, so that the lines of two processes do not mix
        finally:
            os.close(descriptor)


def seal_of(message: bytes) -> str | None:
    """An HMAC-SHA256 with the user's key; None where no key can be stored."""
    key = _key()
    return hmac.new(key, message, hashlib.sha256).hexdigest() if key is not None else None


def _key() -> bytes | None:
    try:
        file = user_folder() / KEY
        with suppress(FileNotFoundError):
            return _whole(file.read_bytes())
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = file.with_name(f".{KEY}-{os.getpid()}-{secrets.token_hex(4)}")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(32))
        finally:
            os.close(descriptor)
        try:
            os.link(unfinished, file)  # if two processes make a key, the first one's is used
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            unfinished.replace(file)
        unfinished.unlink(missing_ok=True)
        return _whole(file.read_bytes())
    except (OSError, ConfigError):
        return None


def _whole(key: bytes) -> bytes | None:
    return key if len(key) == 32 else None


SEAL = "begun-by.json"  # in a run's folder
REASONING = "reasoning-gym:"
OBJECT = "object:"  # prefix of the name of a task that a Python program passed
MAX_SEAL_BYTES = 1_000_000  # of a seal
PLACE_KEYS = ("host", "hostaddr", "port", "dbname", "service", "servicefile", "passfile")  # in a database URL's query

BUILT_IN = frozenset(("tether.demo.rule:DemoTask", "tether.rewards.math_verified:compare_by_math_verify"))
"""Names of Tether's own code that recipes may use."""


@dataclass(frozen=True)
class CodeName:
    """One name: `field` is the recipe key, `detail` is what it is called or sent with."""

    field: str
    reference: str
    detail: str = ""
    is_address: bool = False


def names_in(task: TaskSettings | None, parts: Sequence[Any]) -> tuple[CodeName, ...]:
    """The names in a task and in the parts of a reward, without Tether's own."""
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
    """The names that come from a file: those whose key is not a flag on the command line."""
    keys = {flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")}
    return tuple(name for name in names if name.field.partition("[")[0] not in keys)


def code_names(recipe: Recipe | ControlRecipe) -> tuple[CodeName, ...]:
    """All names in a recipe. A new key that holds a `CodeReference` is added here."""
    names = list(names_in(recipe.task, recipe.reward.parts) if isinstance(recipe, RLRecipe) else ())
    if recipe.store.url is not None:
        names.append(CodeName("store.url", without_secrets(recipe.store.url), is_address=True))
    if isinstance(recipe, ControlRecipe):
        return tuple(names)
    if recipe.model.loader is not None:
        names.append(CodeName("model.loader", recipe.model.loader))
    if isinstance(recipe, RLRecipe):
        if recipe.algorithm is not None:
            names.append(CodeName("algorithm", recipe.algorithm))
        if is_code(recipe.rollout.engine):
            names.append(CodeName("rollout.engine", recipe.rollout.engine))
    lists = {"store.trackers": recipe.store.trackers, "run.doctor_rules": recipe.run.doctor_rules}
    for field, references in lists.items():
        names += [CodeName(f"{field}[{place}]", each) for place, each in enumerate(references) if is_code(each)]
    return tuple(names)


def is_code(word: str) -> bool:
    """Whether a word names the user's code, where it may also be one of Tether's own words."""
    return ":" in word


def names_of_record(record: Mapping[str, Any]) -> tuple[CodeName, ...]:
    """The same for the recipe that a run stored; empty where this version cannot read it."""
    from tether.config.load import control_from_record, recipe_from_record

    read = control_from_record if record.get("method") == ControlRecipe.method else recipe_from_record
    try:
        return code_names(read(record))
    except ValueError:
        return ()


def without_secrets(url: str) -> str:
    """A database URL without secrets: scheme, host, path, and the query keys that locate the database."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    host, slash, path = place.partition("/")
    where = sorted(pair for pair in parse_qsl(query) if pair[0] in PLACE_KEYS)
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}" + (f"?{urlencode(where)}" if where else "")


def seal_record(names: Iterable[CodeName], root: Path) -> dict[str, Any]:
    """The seal for a run's folder; empty where the recipe names nothing or no key can be stored."""
    names = tuple(names)
    seal = seal_of(_message(names, str(root))) if names else None
    return {"folder": str(root), "seal": seal} if seal is not None else {}


def begun_in(folder: Path, names: Iterable[CodeName]) -> str | None:
    """The folder from which this user started the run with these names; None where the seal does not confirm it."""
    file = folder / SEAL
    try:
        if not file.is_file():  # reading a named pipe would block
            return None
        with file.open("rb") as opened:
            record = json.loads(opened.read(MAX_SEAL_BYTES))
        root, seal = record["folder"], record["seal"]
        expected = seal_of(_message(tuple(names), root))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    ours = expected is not None and isinstance(seal, str) and hmac.compare_digest(expected.encode(), seal.encode())
    return root if ours else None


def _message(names: tuple[CodeName, ...], root: str) -> bytes:
    rows = [[name.field, name.reference, name.detail] for name in names]
    return json.dumps(["tether run", root, rows]).encode()
