"""What a shared backbone gave for each text, kept in a folder: a later run on the same backbone reads it there.

A backbone is known by the digest of its weights, a text by its tokens. A file holds many texts, one after the other:
`tokens` (N,) int64, `lengths` (rows,) and `states` (N, H). Files are written whole and never changed, so runs may share
a folder; what is read stays on disk, in pages that the operating system may drop.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tether.errors import StorageError
from tether.models.backbones import layers_between
from tether.models.digest import weights_digest


@dataclass(frozen=True)
class _Place:
    """Where the states of a text lie."""

    file: Any  # the `states` of an opened file, by slice
    start: int
    stop: int


class BackboneCache:
    """The folder's rows for the layers of `backbone` below `depth`, which are frozen."""

    def __init__(self, folder: Path, backbone: PreTrainedModel, depth: int) -> None:
        self.folder, self.depth = folder, depth
        self.digest = weights_digest(layers_between(backbone, 0, depth))
        self._places: dict[bytes, _Place] = {}
        self._new: dict[bytes, Tensor] = {}
        with self._writing():  # before there is anything to lose
            folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.glob(f"{self.digest[:16]}-{depth}-*.safetensors")):
            self._read(file)

    def __contains__(self, key: bytes) -> bool:
        """Whether the states of this text are in the folder."""
        return key in self._places

    def find(self, key: bytes) -> Tensor:
        """The states (T, H) of the text whose tokens, int64, are these bytes."""
        place = self._places[key]
        return place.file[place.start : place.stop]

    def keep(self, tokens: Tensor, states: Tensor) -> None:
        """Take the states (T, H) of a text of tokens (T,) along for the next `write`."""
        key = tokens.numpy().tobytes()
        if key not in self._places:
            self._new[key] = states.detach().cpu()

    def write(self) -> None:
        """Put what was kept into the folder, as one file."""
        if not self._new:
            return
        tokens = [torch.frombuffer(bytearray(key), dtype=torch.int64) for key in self._new]
        content = {
            "tokens": torch.cat(tokens),
            "lengths": torch.tensor([len(row) for row in tokens]),
            "states": torch.cat(list(self._new.values())),
        }
        file = self.folder / f"{self.digest[:16]}-{self.depth}-{secrets.token_hex(8)}.safetensors"
        unfinished = file.with_suffix(".part")
        with self._writing(unfinished):
            save_file(content, unfinished, metadata={"backbone": self.digest})
            unfinished.replace(file)
        self._new.clear()
        self._read(file)

    @contextmanager
    def _writing(self, unfinished: Path | None = None) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            if unfinished is not None:
                with suppress(OSError):
                    unfinished.unlink()
            raise StorageError(
                f"roles.backbone_cache: {self.folder} cannot be written ({getattr(error, 'strerror', None) or error}): "
                "make room, or leave the setting out"
            ) from error

    def _read(self, file: Path) -> None:
        """Learn which texts a file holds."""
        try:
            opened: Any = safe_open(file, framework="pt")
            if opened.metadata().get("backbone") != self.digest:
                return
            tokens, lengths = opened.get_tensor("tokens"), opened.get_tensor("lengths").tolist()
            states = opened.get_slice("states")
        except (OSError, SafetensorError) as error:
            raise StorageError(f"roles.backbone_cache: {file} is damaged ({error}): remove it") from error
        for row, start in zip(tokens.split(lengths), _starts(lengths), strict=True):
            self._places[row.numpy().tobytes()] = _Place(states, start, start + len(row))


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where each of some stretches begins, laid end to end."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends[:-1].tolist()
