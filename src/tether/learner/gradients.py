"""The loss of a micro-batch, clipping, and the search for values that are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from tether.errors import ConfigError
from tether.learner.batching import BatchPart
from tether.learner.ranks import Codec
from tether.protocols import Objective
from tether.types import Loss, ScoreOutputs, Sequences, TokenOutputs, columns_of


def clip(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale gradients of this norm together so that it is `limit` at most: by min(1, limit / (norm + 1e-6)).

    By a number and not, as torch's own does, by a tensor, which takes gradients in half precision one by one.
    """
    factor = limit / (norm + 1e-6)
    if factor < 1.0:
        scale_all: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        scale_all(list(gradients), factor)


def loss_of(objective: Objective[Any, Any], outputs: Any, batch: Sequences) -> Loss:
    """The loss of a micro-batch; raises where the user's objective returns anything but a sum with its metrics."""
    loss: Any = objective(outputs, batch)
    if not isinstance(loss, Loss):
        raise ConfigError(
            f"the objective returned a {type(loss).__name__}: it must return Loss(total, metrics) with a sum in it"
        )
    shape = tuple(loss.total.shape) if isinstance(cast("Any", loss.total), Tensor) else type(loss.total).__name__
    if shape != ():
        raise ConfigError(f"the objective returned a total of shape {shape}: it must be a sum, one number in a tensor")
    return loss


PLACES_KEPT = 8
# Columns that no gradient depends on: two that are only measured, and one that acts through the advantages.
NOT_LEARNED_FROM = {"behavior_logprobs", "untruncated_logprobs", "final_values"}


@dataclass(frozen=True)
class NonfiniteTensor:
    """Numbers of one tensor that are not finite."""

    tensor: str  # such as advantages, logprobs, "gradient of policy/policy.lm_head.weight"
    count: int
    value: str  # of the first: nan, inf or -inf
    places: tuple[tuple[int, ...], ...]  # the first few, as indices: for a batch (row, token)
    batch: int = 0  # which of the fault's batches the rows are of


@dataclass(frozen=True)
class Fault:
    """An update that was skipped: why, where, and what it would have learned from."""

    reason: str
    findings: tuple[NonfiniteTensor, ...]
    batches: tuple[Sequences, ...]  # what its gradient was gathered over, in order
    norms: Mapping[str, float]  # of the gradient, by group; empty where it was not gathered to the end
    micro_batch_tokens: int


def find(name: str, tensor: Tensor, mask: Tensor | None = None) -> NonfiniteTensor | None:
    """Where `tensor` is not finite, among the True places of `mask` if there is one."""
    bad = ~torch.isfinite(tensor.detach())
    if mask is not None:
        bad &= mask
    count = int(bad.sum())
    if count == 0:
        return None
    places = tuple(tuple(int(index) for index in place) for place in bad.nonzero()[:PLACES_KEPT])
    return NonfiniteTensor(name, count, str(float(tensor.detach()[places[0]])), places)


def find_all(tensors: Mapping[str, Tensor]) -> list[NonfiniteTensor]:
    """Where each of the tensors is not finite."""
    found = (find(name, tensor) for name, tensor in tensors.items())
    return [finding for finding in found if finding is not None]


def in_columns(batch: Sequences) -> list[NonfiniteTensor]:
    """What is not finite in the columns that are learned from, on trained tokens."""
    found: list[NonfiniteTensor | None] = []
    for name, column in columns_of(batch).items():
        if isinstance(column, Tensor) and column.is_floating_point() and name not in NOT_LEARNED_FROM:
            found.append(find(name, column, batch.response_mask if column.dim() == 2 else None))
    return [finding for finding in found if finding is not None]


def outputs_to_check(outputs: object, micro: Sequences) -> dict[str, tuple[Tensor, Tensor | None]]:
    """`(tensor, mask)` of a model's outputs by name; entropy is checked if it enters the loss."""
    if isinstance(outputs, TokenOutputs):
        columns = {"logprobs": outputs.logprobs, "values": outputs.values}
        return {name: (column, micro.response_mask) for name, column in columns.items() if column is not None}
    return {"scores": (outputs.scores, None)} if isinstance(outputs, ScoreOutputs) else {}


@dataclass(frozen=True)
class Unread:
    """A model's outputs for a micro-batch, and a flag that the device computes and the host reads later."""

    sound: Tensor  # scalar bool
    loss: Tensor
    outputs: Mapping[str, tuple[Tensor, Tensor | None]]
    part: BatchPart
    batch: int  # which of the step's batches it is of

    @classmethod
    def of(cls, loss: Tensor, outputs: object, part: BatchPart, batch: int) -> Unread:
        """Of a micro-batch's loss and outputs; nothing is waited for."""
        kept = {name: (x.detach(), mask) for name, (x, mask) in outputs_to_check(outputs, part.micro).items()}
        return cls(sound(loss, kept.values()), loss.detach(), kept, part, batch)


def sound(loss: Tensor, outputs: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Whether the loss and the outputs are finite, as a scalar on their device."""
    result = torch.isfinite(loss.detach())
    for tensor, mask in outputs:
        finite = torch.isfinite(tensor.detach())
        result = result & (finite if mask is None else finite | ~mask).all()
    return result


FINDINGS = Codec[NonfiniteTensor](
    lambda finding: (asdict(finding), {}),
    lambda value, _: NonfiniteTensor(**value | {"places": tuple(map(tuple, value["places"]))}),
)


def read_all(unread: Sequence[Unread]) -> list[tuple[int, NonfiniteTensor]]:
    """What is not finite in any of these micro-batches, with its number; the device is waited for once."""
    if not unread or bool(torch.stack([each.sound for each in unread]).all()):
        return []
    return [
        (each.part.number, replace(finding, batch=each.batch))
        for each in unread
        for finding in in_micro_batch(each.loss, each.outputs, each.part)
    ]


def in_micro_batch(
    loss: Tensor, outputs: Mapping[str, tuple[Tensor, Tensor | None]], part: BatchPart
) -> list[NonfiniteTensor]:
    """What is not finite in a micro-batch's outputs and loss, with the batch's rows and tokens."""
    found: list[NonfiniteTensor] = []
    for name, (tensor, mask) in outputs.items():
        finding = find(name, tensor, mask)
        if finding is not None:
            places = tuple(
                (int(part.rows[row]), *(column + part.first for column in columns)) for row, *columns in finding.places
            )
            found.append(NonfiniteTensor(name, finding.count, finding.value, places))
    finding = find("loss", loss)
    return found if finding is None else [*found, finding]
