"""Weights that several ranks share: gathered around the work that reads them.

With `distributed.shard: full` a rank keeps its share of each weight. A module whose weights are shared has a gatherer,
and whoever reads the weights does so inside `with_weights`. Without a gatherer the work is simply done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

GATHERER = "_tether_gatherer"


class Gatherer(Protocol):
    """Does work while a module's weights are whole."""

    def __call__(self, work: Callable[..., Any], *given: Any) -> Any:
        """`work(*given)`: what is differentiated must be among the tensors given and the tensors returned."""
        ...


class GatheredForward:
    """A module's forward pass, with its weights whole: in place of `forward`, for whoever calls the module itself."""

    def __init__(self, gatherer: Gatherer, forward: Callable[..., Any]) -> None:
        self.gatherer, self.forward = gatherer, forward

    def __call__(self, hidden: Any, *given: Any, **named: Any) -> Any:
        """The forward pass; `hidden` is what gradients go through."""
        return self.gatherer(lambda x: self.forward(x, *given, **named), hidden)


def gatherer_of(module: nn.Module) -> Gatherer | None:
    """The module's gatherer; None where its weights are whole."""
    return vars(module).get(GATHERER)


def set_gatherer(module: nn.Module, gatherer: Gatherer) -> None:
    """From now on the module's weights are whole only inside `with_weights`."""
    vars(module)[GATHERER] = gatherer


def with_weights(module: nn.Module, work: Callable[..., Any], *given: Any) -> Any:
    """`work(*given)` while the module's weights are whole."""
    gatherer = gatherer_of(module)
    return work(*given) if gatherer is None else gatherer(work, *given)
