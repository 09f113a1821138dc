"""All that a run is between two steps, as a checkpoint holds it: learner, KL controllers, random streams, position.

The position is the number of steps taken: the data cursor, the learning rates and the seeds of every stream of Tether's
own follow from it. The process-wide random generators are kept for the sake of rewards and tasks that draw from them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from tether.algorithms.algorithm import Controllers
from tether.errors import StorageError
from tether.learner.learner import Learner
from tether.learner.learner_state import LearnerState
from tether.models.shared_backbone import SharedBackbone
from tether.ops.kl import AdaptiveKL, FixedKL, KLController, ProportionalKL
from tether.seeds import derive_seed
from tether.store.checkpoints import Checkpoint

CONTROLLERS: dict[str, type[Any]] = {kind.__name__: kind for kind in (FixedKL, AdaptiveKL, ProportionalKL)}


def capture(
    step: int,
    learner: Learner,
    values: dict[str, Any],
    *,
    shared: SharedBackbone | None = None,
    controllers: tuple[Controllers, Controllers] | None = None,
) -> Checkpoint:
    """A checkpoint after `step` steps; `controllers` as they were at first and as they are now.

    Its tensors are copies: training may go on while it is written.
    """
    state = learner.state(copy=True)
    tensors: dict[str, Mapping[str, Tensor]] = {"learner": state.tensors, "random": random_tensors()}
    if shared is not None:
        tensors["backbone"] = shared.memory()
    return Checkpoint(
        step,
        tensors,
        values
        | {
            "learner": state.numbers,
            "random": random_numbers(),
            "controllers": controllers_as_json(*controllers) if controllers is not None else None,
        },
    )


def restore(
    checkpoint: Checkpoint, learner: Learner, *, shared: SharedBackbone | None = None, fresh: Controllers | None = None
) -> Controllers | None:
    """Become what was captured. Returns the controllers, where there are any; those of a changed setting start anew."""
    learner.load_state(LearnerState(dict(checkpoint.tensors["learner"]), checkpoint.values["learner"]))
    if shared is not None and "backbone" in checkpoint.tensors:
        shared.restore_rows(checkpoint.tensors["backbone"])
    set_random_state(checkpoint.tensors["random"], checkpoint.values["random"])
    saved = checkpoint.values["controllers"]
    if fresh is None or saved is None:
        return fresh
    return Controllers(_controller(fresh.reference, saved["reference"]), _controller(fresh.old, saved["old"]))


# -- KL controllers -----------------------------------------------------------------------------------------------


def controllers_as_json(start: Controllers, now: Controllers) -> dict[str, Any]:
    """Both controllers' kinds and numbers, at first and now."""
    return {"reference": _as_json(start.reference, now.reference), "old": _as_json(start.old, now.old)}


def _as_json(start: Any, now: Any) -> dict[str, Any]:
    return {"kind": type(now).__name__, "start": asdict(start), "now": asdict(now)}


def _controller(fresh: KLController, saved: Mapping[str, Any]) -> KLController:
    """The saved controller, if it began as the recipe's begins; a fork that changes it keeps its own."""
    kind = CONTROLLERS.get(saved["kind"])
    if kind is None:
        raise StorageError(f"the checkpoint has a KL controller of unknown kind {saved['kind']}")
    return kind(**saved["now"]) if fresh == kind(**saved["start"]) else fresh


# -- random generators of the process -----------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Start the process-wide generators from the run's seed."""
    torch.manual_seed(derive_seed(seed, "torch"))
    random.seed(derive_seed(seed, "python"))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(derive_seed(seed, "numpy") % 2**32)


def random_tensors() -> dict[str, Tensor]:
    """The states of torch's generators, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda/{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def random_numbers() -> dict[str, Any]:
    """The states of Python's generator, and of numpy's where it is loaded."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(numbers), gauss]}
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return states


def set_random_state(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Put every generator back; a device that is no longer there is passed over."""
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda/{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda/{index}"], index)
    version, state, gauss = numbers["python"]
    random.setstate((version, tuple(state), gauss))
    if "numpy" in numbers and "numpy" in sys.modules:
        kind, keys, *rest = numbers["numpy"]
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
