"""The user's own folder: which packages they allow recipes to run, which code they have run before, and a key.

`config.yaml` in it is written by the user; the rest is written by Tether. No recipe, run folder or model can change it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

import yaml

from tether.errors import ConfigError

VARIABLE = "TETHER_CONFIG"
FILE = "config.yaml"
KNOWN = "known-code.txt"  # one line for each piece of code that was run: its digest, a space, and what it was
KEY = "key"  # 32 random bytes, readable by the user alone, by which runs are recognised as the user's own
MAX_BYTES = 100_000  # of config.yaml


def user_folder() -> Path:
    """$TETHER_CONFIG, else $XDG_CONFIG_HOME/tether, else ~/.config/tether."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        return (shared if shared.is_absolute() else Path.home() / ".config") / "tether"
    except RuntimeError as error:  # of Path.home()
        raise ConfigError(f"there is no home folder to keep settings in: set HOME or {VARIABLE} ({error})") from error


def allowed_by_user() -> tuple[str, ...]:
    """`allow` in config.yaml: packages, modules or files whose code a recipe may name."""
    file = user_folder() / FILE
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{file} is longer than {MAX_BYTES} bytes: it holds no more than `allow: [PACKAGE, ...]`")
    try:
        found = yaml.safe_load(text.decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no YAML file: write `allow: [PACKAGE, ...]` in it") from error
    if found is None:
        return ()
    allow = found.get("allow", []) if isinstance(found, dict) else None
    if not isinstance(found, dict) or set(found) - {"allow"} or not isinstance(allow, list):
        raise ConfigError(f"{file} holds one key, `allow`, which is a list of packages: allow: [my_package]")
    if wrong := [word for word in allow if not isinstance(word, str)]:
        raise ConfigError(f"allow in {file}: {wrong[0]!r} is no name of a package")
    return tuple(allow)


def is_known(digest: str) -> bool:
    """Whether this was run or agreed to before."""
    try:
        lines = (user_folder() / KNOWN).read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ConfigError):
        return False
    return any(line.partition(" ")[0] == digest for line in lines)


def remember(digest: str, what: str) -> None:
    """Add a line to the list of known code; where the folder cannot be written, it is asked or told again next time."""
    line = f"{digest} {' '.join(what.split())}\n".encode()
    with suppress(OSError, ConfigError):
        folder = user_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / KNOWN, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)  # one write: lines of two processes do not mix
        finally:
            os.close(descriptor)


def seal_of(message: bytes) -> str | None:
    """An HMAC-SHA256 by the user's key, which nobody else can make; None where no key can be kept."""
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
            os.link(unfinished, file)  # of two processes that make a key, the first one's counts
        except FileExistsError:
            pass
        except OSError:  # a disk without links
            unfinished.replace(file)
        unfinished.unlink(missing_ok=True)
        return _whole(file.read_bytes())
    except (OSError, ConfigError):
        return None


def _whole(key: bytes) -> bytes | None:
    return key if len(key) == 32 else None
