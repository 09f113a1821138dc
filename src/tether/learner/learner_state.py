"""The state of a learner as named tensors and plain numbers: all that is needed to resume it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tether.errors import StorageError

Parameters = Mapping[str, nn.Parameter]
ABOUT = {"kinds", "plain", "optimizer", "hyperparameters"}
COUNTERS = {"micro_batch_tokens", "skipped_in_a_row", "largest_norm", "out_of_memory"}


@dataclass(frozen=True)
class LearnerState:
    """A learner between two steps.

    `tensors` holds each trained parameter as `{group}/{name}` and what the optimiser keeps for it as
    `{group}/{name}/{slot}` (AdamW: exp_avg, exp_avg_sq, step). `numbers` is JSON: counters, hyperparameters by group,
    and the kind of every tensor, against which the tensors are checked when they are loaded.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


def parameter_names(model: object, groups: Mapping[str, list[nn.Parameter]]) -> dict[str, nn.Parameter]:
    """`{group}/{name}` of each trained parameter: the model's own name for it, or its place in the group."""
    known: dict[int, str] = {}
    if isinstance(model, nn.Module):
        known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{group}/{known.get(id(parameter), str(index))}": parameter
        for group, parameters in groups.items()
        for index, parameter in enumerate(parameters)
    }


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What each of the optimiser's groups is set to, as JSON."""
    return {
        group["name"]: {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name not in ("params", "name") and not isinstance(value, Tensor)
        }
        for group in optimizer.param_groups
    }


def kind(tensor: Tensor) -> str:
    """Type and shape in words, such as `float32 [16, 4]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def capture(
    parameters: Parameters,
    optimizer: torch.optim.Optimizer,
    *,
    copy: bool,
    start: dict[str, dict[str, Any]],
    counters: dict[str, Any],
) -> LearnerState:
    """The state of these parameters and their optimiser, whose groups were set to `start` at first.

    The tensors are references to what changes in place with the next step, or with `copy` clones on the CPU.
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}  # by parameter, those of the optimiser's slots that are no tensors
    for name, parameter in parameters.items():
        tensors[name] = parameter.detach()
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{slot}"] = value.detach()
            else:
                plain.setdefault(name, {})[slot] = value
    if copy:
        tensors = {name: cpu_clone(tensor) for name, tensor in tensors.items()}
    about = {
        "kinds": {name: kind(tensor) for name, tensor in tensors.items()},
        "plain": plain,
        "optimizer": type(optimizer).__name__,
        "hyperparameters": {"start": start, "now": hyperparameters(optimizer)},
    }
    return LearnerState(tensors, about | counters)


def cpu_clone(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares nothing with `tensor`."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def put_back(
    state: LearnerState, parameters: Parameters, optimizer: torch.optim.Optimizer, start: dict[str, dict[str, Any]]
) -> None:
    """Write a checked state's tensors and hyperparameters back, bit for bit."""
    slots: dict[str, dict[str, Any]] = {name: dict(state.numbers["plain"].get(name, {})) for name in parameters}
    for name in state.numbers["kinds"]:  # in the order in which the optimiser had them
        if name not in parameters:
            owner, slot = name.rsplit("/", 1)
            slots[owner][slot] = state.tensors[name]
    fused = {id(p): bool(group.get("fused")) for group in optimizer.param_groups for p in group["params"]}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state.tensors[name])
            optimizer.state.pop(parameter, None)
            if slots[name]:
                optimizer.state[parameter] = {
                    slot: _placed(value, parameter, fused[id(parameter)]) if isinstance(value, Tensor) else value
                    for slot, value in slots[name].items()
                }
    _put_hyperparameters(optimizer, start, state.numbers["hyperparameters"])


def _placed(value: Tensor, parameter: Tensor, fused: bool) -> Tensor:
    """A copy where the optimiser wants it: beside the parameter; a count of steps on the CPU, unless fused."""
    device = parameter.device if fused or value.dim() > 0 else torch.device("cpu")
    return value.detach().to(device, copy=True)


def _put_hyperparameters(optimizer: torch.optim.Optimizer, start: dict[str, Any], saved: dict[str, Any]) -> None:
    """Set each group as it was saved, except where it now starts from another setting than the saved one did.

    A resumed run starts from the same settings and gets everything back; a fork that changes one keeps its own.
    """
    for group in optimizer.param_groups:
        before, now = saved["start"].get(group["name"], {}), saved["now"].get(group["name"], {})
        for name, value in now.items():
            if name in group and before.get(name) == start[group["name"]].get(name):
                group[name] = tuple(value) if isinstance(group[name], tuple) else value


def check(state: LearnerState, ours: Mapping[str, str], optimizer: torch.optim.Optimizer) -> None:
    """Raise unless the state is whole and belongs to parameters of these names and kinds, and to this optimiser."""
    missing = sorted((ABOUT | COUNTERS) - state.numbers.keys())
    if missing:
        raise StorageError(f"the learner's state is damaged: it lacks {', '.join(missing)}; use another checkpoint")
    saved = {name: kind(tensor) for name, tensor in state.tensors.items()}
    _compare("the learner's state is damaged", state.numbers["kinds"], saved, "use another checkpoint")
    # A slot stands below its parameter; whatever does not, has to be a parameter.
    theirs = {name: text for name, text in saved.items() if name in ours or name.rsplit("/", 1)[0] not in saved}
    repair = "resume with the model, roles and precision that the run was started with"
    _compare("the checkpoint is of another model", ours, theirs, repair)
    if any(name.endswith("/exp_avg_scales") for name in saved):
        raise StorageError(
            "the checkpoint's 8-bit optimiser state was written by an earlier version, which rounded it otherwise: "
            "resume with that version, or start a new run from the model (`tether export`)"
        )
    optimizer_name = type(optimizer).__name__
    if state.numbers["optimizer"] != optimizer_name:
        raise StorageError(
            f"the checkpoint is of the optimiser {state.numbers['optimizer']}, but this learner's is {optimizer_name}: "
            "resume with the one that the run was started with"
        )


def _compare(what: str, expected: Mapping[str, str], found: Mapping[str, str], repair: str) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            here, there = found.get(name, "missing"), expected.get(name, "nothing")
            raise StorageError(f"{what}: {name} is {here} where {there} was expected; {repair}")
