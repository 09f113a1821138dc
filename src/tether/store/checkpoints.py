"""Checkpoints: each a folder that is written atomically in the background and verified byte by byte when read.

    checkpoints/step-00000012/
        learner-00000.safetensors ...   tensors, in files of at most SHARD_BYTES
        learner.00001-00000.safetensors some rows of each, written by rank 1, where ranks share the weights
        state.json                      everything else
        manifest.json                   size and SHA-256 of each of them, and its own

A folder is written under a temporary name, flushed to disk file by file, and then renamed. The new name is on disk when
`write` returns. The bytes that are hashed on reading are the bytes that are loaded, so they cannot change in between.
`CheckpointWriter` writes in a thread: training waits for the copy of the tensors, not for the disk.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from tether.errors import StorageError
from tether.files import REPLACED, canonical, read_plain, recover, sealed, swap
from tether.store.folder import sync_folder

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
SHARD_BYTES = 2**26  # a file is held in memory twice while it is written, and serializing it blocks training
NAME = re.compile(r"step-(\d{8})")
OF_RANK = "."  # between a kind of tensors and the rank that wrote its share
UNFINISHED, REMOVED = ".unfinished-", ".removed-"
ERROR = "error"  # in place of files: why a rank could not write them


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` steps. `tensors` is by kind, then by name; `values` is JSON.

    `written` has the files that are in the unfinished folder already, each with its size and digest.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    values: Mapping[str, Any]
    written: Mapping[str, Any] = field(default_factory=dict[str, Any])


class DamagedCheckpoint(StorageError):  # noqa: N818 (the checkpoint's state)
    """A checkpoint whose bytes are not what was written."""


def write(folder: Path, checkpoint: Checkpoint, before_naming: Callable[[], object] = lambda: None) -> Path:
    """Write a checkpoint into `folder`, replacing one of the same step.

    `before_naming` is called once all bytes are on disk, before the rename. An OSError leaves existing checkpoints
    unchanged.
    """
    target, unfinished = folder / _name(checkpoint.step), unfinished_folder(folder, checkpoint.step)
    try:
        if not checkpoint.written:
            begin(folder, checkpoint.step)
        if ERROR in checkpoint.written:
            raise OSError(checkpoint.written[ERROR])
        files = {**checkpoint.written, **write_part(unfinished, checkpoint.tensors)}
        files |= {STATE: _write_file(unfinished / STATE, canonical(checkpoint.values))}
        _write_file(unfinished / MANIFEST, _sealed({"format": FORMAT, "step": checkpoint.step, "files": files}))
        sync_folder(unfinished)
        before_naming()
        swap(unfinished, target)
        sync_folder(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return target


def _name(step: int) -> str:
    return f"step-{step:08d}"


def unfinished_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder / f"{UNFINISHED}{_name(step)}"


def begin(folder: Path, step: int) -> Path:
    """Make the unfinished folder, empty."""
    unfinished = unfinished_folder(folder, step)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    sync_folder(folder.parent)
    return unfinished


def write_part(unfinished: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Write tensors by kind; returns the size and digest of each file."""
    _check_room(unfinished, tensors)
    return {name: _write_file(unfinished / name, content) for name, content in _files(tensors)}


def _check_room(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise the OSError of a full disk if the tensors do not fit.

    A write that fails halfway would fill the disk for a while, and the run's records could not be written.
    """
    needed = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every byte. Raises DamagedCheckpoint, which describes the damage."""
    manifest = _read_manifest(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, Any] = {}
    for name, about in manifest["files"].items():
        content = _read_checked(path / name, about)
        if name == STATE:
            values = json.loads(content)
        else:
            try:
                tensors.setdefault(name.rpartition("-")[0], {}).update(load_tensors(content))
            except SafetensorError as error:
                raise DamagedCheckpoint(f"{path / name} cannot be read: {error}") from error
    return joined(Checkpoint(manifest["step"], tensors, values))


def joined(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with whole tensors: what each rank wrote are some rows, in the order of ranks."""
    tensors = {kind: dict(named) for kind, named in checkpoint.tensors.items()}
    for shared in sorted(kind for kind in tensors if OF_RANK in kind):
        of, parts = tensors.setdefault(shared.partition(OF_RANK)[0], {}), tensors.pop(shared)
        for name, part in parts.items():
            of[name] = torch.cat([of[name], part]) if name in of and part.dim() else part
    shapes = (
        checkpoint.values.get("learner", {}).get("kinds", {}) if tensors.keys() != checkpoint.tensors.keys() else {}
    )
    for name, kind in shapes.items():
        try:
            tensors["learner"][name] = tensors["learner"][name].view(json.loads(kind.partition(" ")[2]))
        except (KeyError, RuntimeError, ValueError) as error:
            raise DamagedCheckpoint(f"the shares of {name} do not make {kind} ({error})") from error
    return dataclasses.replace(checkpoint, tensors=tensors)


def damage(path: Path) -> str | None:
    """Describe the damage of a checkpoint; None if every byte is what was written."""
    try:
        for name, about in _read_manifest(path)["files"].items():
            _read_checked(path / name, about)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def listed(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint in a folder, oldest first; damaged ones are included."""
    if not folder.is_dir():
        return []
    found = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def read_newest(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Read the newest undamaged checkpoint; each damaged one on the way is reported and skipped."""
    for _, path in reversed(listed(folder)):
        try:
            return read(path)
        except DamagedCheckpoint as error:
            report(f"skipping a damaged checkpoint: {error}")
    return None


def newest_values(folder: Path) -> dict[str, Any] | None:
    """The values of the newest checkpoint whose manifest and values are undamaged; its tensors are not read."""
    for _, path in reversed(listed(folder)):
        try:
            return json.loads(_read_checked(path / STATE, _read_manifest(path)["files"][STATE]))
        except (DamagedCheckpoint, KeyError, ValueError):
            continue
    return None


def prune(folder: Path, newest: int, every: int = 0, known_whole: set[Path] | None = None) -> None:
    """Remove all but the `newest` newest checkpoints and those whose step is a multiple of `every`.

    Only undamaged checkpoints count as kept, so the last valid one is never removed. Checkpoints in `known_whole` are
    not read again, and those found undamaged are added to it.
    """
    known = set[Path]() if known_whole is None else known_whole
    kept = 0
    for step, path in reversed(listed(folder)):
        if kept >= newest and not (every and step % every == 0):
            remove(path)
        elif kept < newest and (path in known or damage(path) is None):
            known.add(path)
            kept += 1


def remove(path: Path) -> None:
    """Remove a checkpoint by renaming it first, so that an interruption leaves no partial one under its name."""
    removed = path.with_name(f"{REMOVED}{path.name}")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def clear_leftovers(folder: Path) -> None:
    """Remove the partial folders of a killed process, and restore a folder that it had only renamed."""
    if folder.is_dir():
        for path in list(folder.iterdir()):
            if path.name.startswith((UNFINISHED, REMOVED)):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(REPLACED):
                recover(folder / path.name.removeprefix(REPLACED))


# -- parts --------------------------------------------------------------------------------------------------------


def _files(tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, bytes]]:
    for kind, named in tensors.items():
        for index, shard in enumerate(_shards(named)):
            yield f"{kind}-{index:05d}.safetensors", save_tensors(shard)


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest with its own digest."""
    return canonical(sealed(manifest))


def _write_file(path: Path, content: bytes) -> dict[str, Any]:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = read_plain(path / MANIFEST)
        manifest = json.loads(content)
        body = {name: value for name, value in manifest.items() if name != "sha256"}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path / MANIFEST} is missing or cannot be read ({error})") from error
    if content != _sealed(body):
        raise DamagedCheckpoint(f"{path / MANIFEST} is not what was written")
    if body.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {body.get('format')}, and this version reads {FORMAT}")
    return manifest


def _read_checked(path: Path, about: Mapping[str, Any]) -> bytes:
    try:
        content = read_plain(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing or cannot be read ({error.strerror})") from error
    if len(content) != about["bytes"]:
        raise DamagedCheckpoint(f"{path} has {len(content)} bytes where {about['bytes']} were written")
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        raise DamagedCheckpoint(f"{path} is not what was written: its SHA-256 differs")
    return content


# -- writing in the background ------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints one after another in a thread, and keeps the newest few.

    A failed write is reported to `notify`; existing checkpoints stay, and training continues.
    """

    def __init__(self, folder: Path, *, keep: int, keep_every: int, notify: Callable[[str], None]) -> None:
        self.folder = folder.absolute()  # a reward may change the working folder while the thread writes
        self.keep = keep
        self.keep_every = keep_every
        self.notify = notify
        self._known_whole: set[Path] = set()
        self._thread: threading.Thread | None = None
        clear_leftovers(folder)

    def save(self, checkpoint: Checkpoint, before_naming: Callable[[], object] = lambda: None) -> None:
        """Start to write a checkpoint, after the previous one is complete; its tensors must not change any more.

        `before_naming` is called in the thread once all bytes are on disk, before the rename.
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(checkpoint, before_naming), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, checkpoint: Checkpoint, before_naming: Callable[[], object]) -> None:
        try:
            self._known_whole.add(write(self.folder, checkpoint, before_naming))
            prune(self.folder, self.keep, self.keep_every, self._known_whole)
        except Exception as error:  # training can continue without this checkpoint
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self.notify(f"The checkpoint of step {checkpoint.step} was not written ({reason}): {self.folder}")
