"""The policy's weights on their way to rollout workers: a digest of all of them, and the trained ones in a file.

The digest counts every parameter, so that a worker whose frozen base is another model has another digest. Frozen
parameters are hashed once. Only trained parameters travel: of a LoRA run, its adapters.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor, nn

from tether.errors import DataError
from tether.files import digest_of

VERSION = 1  # of what runs and workers tell each other: see messages.py
ABOUT = "about"  # the entry of a file's metadata that holds JSON
THREADS = min(8, os.cpu_count() or 1)  # hashlib releases the GIL


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bits."""
    host = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{host.dtype} {tuple(host.shape)}".encode())
    bits: Any = host.view(-1).view(torch.uint8).numpy()
    digest.update(bits)
    return digest.hexdigest()


class PolicyWeights:
    """The weights of a model, by name, and their digests."""

    def __init__(self, model: nn.Module) -> None:
        self.named = dict(model.named_parameters())
        self._frozen: dict[str, str] | None = None

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes."""
        return {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}

    def digest(self) -> str:
        """SHA-256 of the digests of all parameters, by name."""
        return self._digest(self.trained)

    def _digest(self, trained: Mapping[str, Tensor]) -> str:
        if self._frozen is None:
            frozen = {name: parameter for name, parameter in self.named.items() if not parameter.requires_grad}
            self._frozen = digests(frozen)
        return digest_of(self._frozen | digests(trained))

    def snapshot(self, folder: Path, version: int) -> Snapshot:
        """The weights as they are now, with a file of the trained ones, which is complete once it has its name."""
        host = {name: parameter.detach().cpu().contiguous() for name, parameter in self.trained.items()}
        digest = self._digest(host)
        path = folder / f"{version}-{digest}.safetensors"
        if not path.exists():
            about = {"version": VERSION, "policy_version": version, "weights": digest}
            unfinished = path.with_suffix(".unfinished")
            save_file(host, unfinished, {ABOUT: json.dumps(about)})
            unfinished.replace(path)
        return Snapshot(path, version, digest)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these values, in place; DataError where they are those of another model."""
        for name, tensor in tensors.items():
            own = self.named.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                here = "missing" if own is None else f"{own.dtype} {tuple(own.shape)}"
                raise DataError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the run, and {here} in the worker")
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.named[name].copy_(tensor)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each tensor."""
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(tensors, threads.map(tensor_digest, tensors.values()), strict=True))


@dataclass(frozen=True)
class Snapshot:
    """The policy's weights at one moment: what a worker must hold before it samples."""

    path: Path
    version: int
    digest: str


class Snapshots:
    """Snapshots of a policy in a folder. Those that no call needs are deleted, except for the newest."""

    def __init__(self, weights: PolicyWeights, folder: Path) -> None:
        self.weights, self.folder = weights, folder
        self._lock = threading.Lock()
        self._users: dict[Path, int] = {}
        self._newest: Path | None = None

    def take(self, version: int) -> Snapshot:
        """The weights as they are now; give them back with `drop`."""
        with self._lock:
            snapshot = self.weights.snapshot(self.folder, version)
            self._users[snapshot.path] = self._users.get(snapshot.path, 0) + 1
            self._newest = snapshot.path
            self._clean()
            return snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """A call no longer needs it."""
        with self._lock:
            self._users[snapshot.path] -= 1
            self._clean()

    def _clean(self) -> None:
        for path in [path for path, users in self._users.items() if not users and path != self._newest]:
            del self._users[path]
            path.unlink(missing_ok=True)


# -- tensors with JSON beside them ------------------------------------------------------------------------------------


def pack(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors, with JSON in the metadata."""
    return save(dict(tensors), {ABOUT: json.dumps(about)})


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `pack` was given; ValueError where the bytes are something else."""
    try:
        tensors = load(body)
        length = int.from_bytes(body[:8], "little")
        about = json.loads(json.loads(body[8 : 8 + length])["__metadata__"][ABOUT])
    except (SafetensorError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(f"it is not a safetensors file with a header of Tether ({error})") from error
    if not isinstance(about, dict):
        raise ValueError("its header is no object")
    return about, tensors
