"""Models whose weights are shared over ranks by FSDP2, gathered around the work that reads them.

FSDP2 (`fully_shard`) keeps 1/W of each parameter's rows on each of W ranks. It gathers the parameters of a *unit*
before the unit's forward pass, frees them after it, gathers them again in the backward pass, and hands their gradients
to the ranks that own the rows. Units here are not the models' modules but small modules of our own (`Unit`):

- Roles share tensors (`roles.mode: lora` has one base under three trees). A unit is a set of parameters, wherever they
  stand: those of one layer, or of what is beside the layers, that the same roles train.
- The passes of `accel/` run no layer's own `forward`. They ask `tether.gathering` for the weights instead, as the
  model's own modules do here (`GatheredForward`). Both find them whole, and none finds hooks that it does not know.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from tether.distributed.copies import Copies
from tether.gathering import GatheredForward, set_gatherer
from tether.learner.norms import HALF
from tether.models.backbones import ScalarHead, layer_list


class Unit(nn.Module):
    """Parameters that are gathered together, somewhere in the modules given; its forward pass is any work on them."""

    def __init__(self, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(modules)
        self.held = 0  # how many contexts hold it gathered
        chosen = set(parameters)
        self.names = {name: each for name, each in self.named_parameters() if each in chosen}
        self.shares: list[Any] = []  # this rank's, once it is sharded

    def forward(self, work: Callable[..., Any], *given: Any) -> Any:
        """The work; FSDP's hooks around it gather the parameters, and see what is given and returned."""
        return work(*given)

    def shard(self, mesh: Any, copies: Copies, *, exact: bool, filling: Callable[[], bool]) -> dict[nn.Parameter, Any]:
        """Keep this rank's share of each parameter; returns them."""
        before, self.names = self.names, {}  # which holds the whole parameters
        chosen = set(before.values())
        half = next(iter(chosen)).dtype in HALF
        # Passes and sums have the weights' type, as in one process. Only with `fast` are sums over ranks in float32.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half and not exact else None)
        others = {each for each in self.parameters() if each not in chosen}
        made: Any = fully_shard(self, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=others)
        made.set_gradient_divide_factor(1.0)  # an objective's sum is divided by its size already
        made.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self.sums = OrderedReduceScatter(self, copies, filling) if exact else None
        if self.sums is not None:
            made.set_custom_reduce_scatter(self.sums)
        named = dict(self.named_parameters())
        self.shares = [named[name] for name in before]
        return {parameter: named[name] for name, parameter in before.items()}

    def forget_gradients(self) -> None:
        """Begin new sums."""
        if self.sums is not None:
            self.sums.sum = None
        for share in self.shares:
            share.grad = None


class UnitsGatherer:
    """Does work while some units are gathered."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units

    def __call__(self, work: Callable[..., Any], *given: Any) -> Any:
        """See `Gatherer`."""
        for unit in self.units:
            if not unit.held:
                work = functools.partial(unit, work)
        return work(*given)


class OrderedReduceScatter(ReduceScatter):
    """Adds the gradients of a round to the sum of those before it, in the order of ranks: see `sums.py`.

    FSDP calls it with the gradients of a unit's parameters side by side, and gives each its part of the output.
    The output is the new sum and not what is added to the old one: the order of additions must be that of one process.

    FSDP knows the ranks that share a copy of the weights, and the sum runs over all ranks. Where there are several
    copies, each adds up one part of a share, and the copies exchange the parts.
    """

    def __init__(self, unit: Unit, copies: Copies, filling: Callable[[], bool]) -> None:
        self.unit, self.copies, self.filling = unit, copies, filling
        self.sum: Tensor | None = None  # of the numbers that this rank adds up

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002 (the ranks of this copy)
        op: Any,  # noqa: ARG002
        async_op: bool = False,  # noqa: ARG002
    ) -> None:
        """Exchange the gradients, and add them in order."""
        if self.filling():
            input_tensor.fill_(-0.0)  # which changes nothing that it is added to
        sent = self.copies.dealt(input_tensor)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8))
        first, *others = received.view(self.copies.ranks, -1)
        part = output_tensor if self.copies.count == 1 else torch.empty_like(first)
        assert self.sum is None or len(self.sum) == len(part), "a backward pass left parameters of a unit out"
        torch.add(self.sum, first, out=part) if self.sum is not None else part.copy_(first)
        for each in others:
            part += each
        self.sum = part
        if self.copies.count > 1:
            output_tensor.copy_(self.copies.joined(part, len(output_tensor)))
        for share in self.unit.shares:
            share.grad = None  # the sum before: FSDP would add to it


class ShardedModels:
    """Every role's model in units, each rank with its share. The whole parameters are let go of as they are sharded."""

    def __init__(
        self, trees: Sequence[Tree], groups: Mapping[str, Sequence[nn.Parameter]], copies: Copies, *, exact: bool
    ) -> None:
        self.filling = False  # whether the pass at hand repeats another rank's, and counts for nothing
        device = next(trees[0].model.parameters()).device
        mesh = copies.mesh(device.type)
        pieces = [piece for tree in trees for piece in tree.pieces()]
        units = units_of(pieces, groups)
        owner = {parameter: unit for unit in units for parameter in unit.names.values()}
        self.of_model = {tree.model: _owners(owner, tree.model.parameters()) for tree in trees}
        gatherers = [UnitsGatherer(_owners(owner, parameters_of(piece.modules))) for piece in pieces]
        owner.clear()
        self.units, self.shares = units, dict[nn.Parameter, Any]()
        trained = {parameter for parameters in groups.values() for parameter in parameters}
        for unit in units:
            made = unit.shard(mesh, copies, exact=exact, filling=lambda: self.filling)
            self.shares |= {parameter: share for parameter, share in made.items() if parameter in trained}
        for piece, gatherer in zip(pieces, gatherers, strict=True):
            set_gatherer(piece.key, gatherer)
            if piece.is_layer:
                layer: Any = piece.key
                layer.forward = GatheredForward(gatherer, layer.forward)
        self.root: Any = fully_shard(Root(units), mesh=mesh)
        # The passes return views, and nothing changes these in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        state = self.root._get_fsdp_state()
        state._lazy_init()  # no pass goes through the root, which only ties the units together
        for unit in state._state_ctx.all_states:
            for group in unit._fsdp_param_groups:
                # They would share the weights again as soon as a gathered model is saved.
                for handle in group._module_to_pre_save_state_dict_hook_handle.values():
                    handle.remove()

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Hold a model's weights whole, on every rank: no pass through it exchanges anything meanwhile."""
        units: list[Any] = self.of_model[model]
        for unit in units:
            if not unit.held:
                unit.unshard()
            unit.held += 1
        try:
            yield
        finally:
            for unit in units:
                unit.held -= 1
                if not unit.held:
                    unit.reshard()


class Root(nn.Module):
    """All units."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)


def units_of(pieces: Sequence[TreePiece], groups: Mapping[str, Sequence[nn.Parameter]]) -> list[Unit]:
    """Units of the parameters that are read together, trained by the same role, and of one type."""
    group_of = {parameter: name for name, parameters in groups.items() for parameter in parameters}
    found: list[Unit] = []
    for joined in joined_pieces(pieces):
        modules = [module for piece in joined for module in piece.modules]
        sets: dict[tuple[str | None, torch.dtype], list[nn.Parameter]] = {}
        for parameter in parameters_of(modules):
            sets.setdefault((group_of.get(parameter), parameter.dtype), []).append(parameter)
        found += [Unit(modules, parameters) for parameters in sets.values()]
    return found


def _owners(owner: Mapping[nn.Parameter, Unit], parameters: Iterable[nn.Parameter]) -> list[Unit]:
    return list(dict.fromkeys(owner[parameter] for parameter in parameters))


# -- what a model is made of ------------------------------------------------------------------------------------------


class TreePiece:
    """Modules of a model whose weights are gathered together; who reads them asks for `key`."""

    def __init__(self, key: nn.Module, modules: Sequence[nn.Module], *, is_layer: bool = False) -> None:
        self.key, self.modules, self.is_layer = key, modules, is_layer


class Tree:
    """A model as it is gathered: the layers of a backbone inside it, what stands beside them, and a head."""

    def __init__(self, model: nn.Module, backbone: nn.Module | None, head: ScalarHead | None = None) -> None:
        self.model, self.backbone, self.head = model, backbone, head

    def pieces(self) -> Iterator[TreePiece]:
        """Its layers, what is beside them, and its head."""
        if self.backbone is not None:
            name, layers = layer_list(self.backbone)  # pyright: ignore[reportArgumentType]
            yield from (TreePiece(layer, [layer], is_layer=True) for layer in layers)
            beside = [child for own, child in self.backbone.named_children() if own != name]
            outside = [] if self.model is self.backbone else list(self.model.children())
            beside += [each for each in outside if each is not self.head and not _inside(each, self.backbone)]
            yield TreePiece(self.backbone, beside)
        if self.head is not None:
            yield TreePiece(self.head, [self.head])


def _inside(module: nn.Module, inner: nn.Module) -> bool:
    """Whether `inner` is somewhere in the module."""
    return any(each is inner for each in module.modules())


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters, each once."""
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def joined_pieces(pieces: Sequence[TreePiece]) -> list[list[TreePiece]]:
    """The pieces in sets, where those that have a parameter in common are in one."""
    found: list[list[TreePiece]] = []
    for piece in pieces:
        own = set(parameters_of(piece.modules))
        touching = [each for each in found if own & set(parameters_of(m for p in each for m in p.modules))]
        found = [each for each in found if each not in touching]
        found.append([*(p for each in touching for p in each), piece])
    return found
