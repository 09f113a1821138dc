"""The frozen lower layers that several roles share: run once per row, cached in memory and in a folder.

The folder's files are keyed by the digest of the backbone's weights and the tokens of each text, so a later run on the
same backbone reads them. A file holds many texts, one after the other: `tokens` (N,) int64, `lengths` (rows,) and
`states` (N, H). Files are written whole and never changed, so runs may share a folder; they are memory-mapped, and the
operating system may drop their pages.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.errors import ConfigError, StorageError
from tether.models.acceleration import training_unsupported
from tether.models.backbones import Backbone, PackedBackend, hidden_states, layer_list, layers_between, probe_batch
from tether.models.save import weights_digest
from tether.types import Sequences


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


SPLIT = 1e-5  # how far what two parts give may be from what the whole does, as a share of its norm


@dataclass
class CachedRow:
    """A row's states (T, H), and the batch in which they were found.

    Rounding depends on what is run together, so finding them again to the bit takes the same batch. Without `states`
    a row is only known to be findable; without `batch` its states came from elsewhere and cannot be found again.
    """

    states: Tensor | None
    batch: Sequences | None
    nbytes: int


class SharedBackbone:
    """The frozen lower layers of several roles. A row is run through them once and remembered.

    Rows are keyed by their tokens: the states of a row depend on nothing else, because positions start at its first
    real token and padding is not attended to. The least recently used rows are forgotten above `memory_bytes`.

    `memory` and `restore_rows` carry the cached rows over a checkpoint: not the states, which are large, but which rows
    were run together, so that they come out the same to the bit when they are next wanted. Rows that lie in a folder
    (`kept`) are read there each time.
    """

    def __init__(
        self, model: PreTrainedModel, depth: int, memory_bytes: int = 2**29, kept: BackboneCache | None = None
    ) -> None:
        self.depth = depth
        self.kept = kept
        self.bottom = layers_between(model, 0, depth)
        self.fast = PackedBackend(model)
        self.memory_bytes = memory_bytes
        self.rows_run = 0
        self._rows: OrderedDict[bytes, CachedRow] = OrderedDict()
        self._bytes = 0

    @torch.no_grad()
    def states(self, batch: Sequences) -> Tensor:
        """(B, T, H) what the lower layers put out; 0 on padding."""
        keys, places = _row_keys(batch)
        for key in keys:
            if key in self._rows and self._rows[key].states is None:
                self._find_again(self._rows[key])
        unknown = [row for row, key in enumerate(keys) if not self._is_cached(key)]
        fresh: dict[bytes, Tensor] = {}
        together = _tokens_only(batch.select(torch.tensor(unknown))) if unknown else None
        if together is not None:
            fresh = self._run(together)
        like = self.bottom.get_input_embeddings().weight
        assert isinstance(like, Tensor)
        width = self.bottom.config.get_text_config().hidden_size
        result = torch.zeros(*batch.tokens.shape, width, dtype=like.dtype, device=like.device)
        for row, key in enumerate(keys):
            result[row, places[row]] = fresh[key] if key in fresh else self._known(key).to(like.device)
        for key in keys:
            self._cache_row(key, fresh.get(key), together)
        return result

    def _is_cached(self, key: bytes) -> bool:
        return key in self._rows or (self.kept is not None and key in self.kept)

    def _known(self, key: bytes) -> Tensor:
        """(T, H) of a cached row."""
        if self.kept is not None and key in self.kept:
            return self.kept.find(key)
        states = self._rows[key].states
        assert states is not None
        return states

    def _run(self, batch: Sequences) -> dict[bytes, Tensor]:
        """Each row's states (T, H) by its key."""
        keys, places = _row_keys(batch)
        self.rows_run += len(keys)
        found = self.fast.states(self.bottom, batch, None, None)
        return {key: found[row, places[row]] for row, key in enumerate(keys)}

    def _find_again(self, row: CachedRow) -> None:
        """Run the batch that a remembered row was found in, for all of its rows that are still remembered."""
        assert row.batch is not None
        for key, states in self._run(row.batch.to(self.bottom.device)).items():
            known = self._rows.get(key)
            if known is not None and known.batch is row.batch:
                known.states = states.clone()

    def keep(self, tokens: Tensor, states: Tensor) -> None:
        """Remember the states (T, H) of a row of tokens (T,), found by someone who ran the same layers on it."""
        self._cache_row(tokens.numpy().tobytes(), states, None)

    def _cache_row(self, key: bytes, states: Tensor | None, batch: Sequences | None) -> None:
        if key in self._rows:
            self._rows.move_to_end(key)
        elif states is not None:
            self._rows[key] = CachedRow(states.clone(), batch, states.nbytes)
            self._bytes += states.nbytes
        while self._bytes > self.memory_bytes:
            self._bytes -= self._rows.popitem(last=False)[1].nbytes

    def write_kept(self) -> None:
        """Put every row that is remembered into the folder, found again where need be; without one do nothing."""
        if self.kept is None:
            return
        for key, row in self._rows.items():
            if row.states is None:
                self._find_again(row)
            self.kept.keep(torch.frombuffer(bytearray(key), dtype=torch.int64), self._known(key))
        self.kept.write()

    def clear(self) -> None:
        """Forget every row."""
        self._rows.clear()
        self._bytes = 0

    def memory(self) -> dict[str, Tensor]:
        """What is remembered, from the least recently used on: batches that were run, and which of their rows are left.

        Rows stored by `keep` are not part of it: clear them before a checkpoint.
        """
        saved: dict[str, Tensor] = {}
        found: dict[int, tuple[int, dict[bytes, int]]] = {}  # by batch, its number and its rows' places
        order: list[tuple[int, int]] = []
        for key, row in self._rows.items():
            if row.batch is None:
                continue
            if id(row.batch) not in found:
                number = len(found)
                found[id(row.batch)] = number, {key: place for place, key in enumerate(_row_keys(row.batch)[0])}
                saved[f"tokens/{number}"] = row.batch.tokens.to("cpu", torch.int32)
                saved[f"mask/{number}"] = row.batch.attention_mask.cpu()
            number, places = found[id(row.batch)]
            order.append((number, places[key]))
        return saved | {"order": torch.tensor(order, dtype=torch.int64).reshape(-1, 2)}

    def restore_rows(self, saved: Mapping[str, Tensor]) -> None:
        """Take up what `memory` gave; the states are found when they are wanted."""
        self.clear()
        weight = self.bottom.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        width = self.bottom.config.get_text_config().hidden_size * weight.element_size()
        batches: dict[int, tuple[Sequences, list[bytes]]] = {}
        for number, row in saved["order"].tolist():
            if number not in batches:
                tokens, mask = saved[f"tokens/{number}"].long(), saved[f"mask/{number}"]
                batch = Sequences(tokens=tokens, attention_mask=mask, response_mask=mask)
                batches[number] = batch, _row_keys(batch)[0]
            batch, keys = batches[number]
            nbytes = int(batch.attention_mask[row].sum()) * width
            self._rows[keys[row]] = CachedRow(None, batch, nbytes)
            self._bytes += nbytes


def _tokens_only(batch: Sequences) -> Sequences:
    """The batch's rows as the layers see them, without the columns of its stage."""
    return Sequences(tokens=batch.tokens, attention_mask=batch.attention_mask, response_mask=batch.attention_mask)


def _row_keys(batch: Sequences) -> tuple[list[bytes], list[Tensor]]:
    """Each row's real tokens as bytes, and their columns."""
    tokens, mask = batch.tokens.cpu(), batch.attention_mask.cpu()
    places = [row.nonzero()[:, 0] for row in mask]
    keys = [tokens[row, columns].numpy().tobytes() for row, columns in enumerate(places)]
    return keys, [columns.to(batch.tokens.device) for columns in places]


class TopBackbone(Backbone):
    """A backbone whose lower layers are a `SharedBackbone`'s: only the layers above them are run here."""

    def __init__(self, model: PreTrainedModel, shared: SharedBackbone) -> None:
        super().__init__(model)
        self.shared = shared
        self.top = layers_between(model, shared.depth, None)

    def be_exact(self) -> None:
        """From now on run by the exact pass, with the layers below; then so do the other roles' tops' lower layers."""
        super().be_exact()
        self.shared.fast.be_exact(self.shared.bottom)

    def forward(self, batch: Sequences, wanted: Tensor | None = None) -> Tensor:
        """(B, T, H) hidden states after the final norm; only those of `wanted` (B, T) have to be right."""
        return self.fast.states(self.top, batch, self.shared.states(batch), wanted)

    def plain(self, batch: Sequences) -> Tensor:
        """(B, T, H) the same by the model's own modules, differentiable twice."""
        return hidden_states(self.top, batch, self.shared.states(batch))


def side_by_side(first: PreTrainedModel, second: PreTrainedModel) -> tuple[Backbone, Backbone]:
    """The backbones of two models; the lower layers that they have in common are run once for both."""
    depth = common_depth(first, second)
    if depth == 0:
        return Backbone(first), Backbone(second)
    shared = SharedBackbone(first, depth)
    return TopBackbone(first, shared), TopBackbone(second, shared)


def common_depth(first: PreTrainedModel, second: PreTrainedModel) -> int:
    """Up to which layer two backbones of a known kind hold the same numbers; the last layer is not counted."""
    if (
        type(first) is not type(second)
        or first.device != second.device
        or training_unsupported(first)
        or training_unsupported(second)
    ):
        return 0
    if _shape(first) != _shape(second) or not _same(first.get_input_embeddings(), second.get_input_embeddings()):
        return 0
    layers = list(zip(layer_list(first)[1], layer_list(second)[1], strict=True))[:-1]
    return next((depth for depth, pair in enumerate(layers) if not _same(*pair)), len(layers))


def _shape(backbone: PreTrainedModel) -> dict[str, Any]:
    """Its configuration, whatever folder it was read from."""
    return {name: value for name, value in backbone.config.to_dict().items() if name != "_name_or_path"}


def _same(first: nn.Module, second: nn.Module) -> bool:
    """Whether two modules hold the same numbers under the same names."""
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


@torch.no_grad()
def check_split(backbone: PreTrainedModel, depth: int) -> None:
    """Raise unless the two parts, one after the other, are the whole: not every architecture can be cut so."""
    refusal = ConfigError(
        f"roles.mode: {type(backbone).__name__} cannot be cut into a shared backbone and tops; use separate or lora"
    )
    probe = probe_batch(backbone)
    mask = probe.attention_mask
    whole = hidden_states(backbone, probe)[mask]
    try:
        lower, upper = layers_between(backbone, 0, depth), layers_between(backbone, depth, None)
        parts = hidden_states(upper, probe, hidden_states(lower, probe))[mask]
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise refusal from error  # whatever else it does with its layers, it does not run some of them alone
    # the same modules on the same numbers, so that rounding is no excuse
    if not (parts - whole).float().norm() <= SPLIT * whole.float().norm():
        raise refusal
