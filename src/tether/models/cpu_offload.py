"""Frozen weights that wait in host memory and come to the device for their pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Waiting:
    """A frozen module's tensors: between visits they lie in host memory, pinned where that makes the way short.

    The host's copy stays the one that counts, so leaving the device costs nothing. Tensors that other modules share
    would leave with it, so it is only for modules that stand alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        assert not any(tensor.requires_grad for tensor in self.tensors), "what is trained cannot wait elsewhere"
        self.device = next((tensor.device for tensor in self.tensors), torch.device("cpu"))
        self.homes = [_home(tensor) for tensor in self.tensors]
        self._visits = 0
        self._leave()

    @contextmanager
    def visit(self) -> Iterator[None]:
        """The module on its device, for a while; a visit within a visit is the same one."""
        if self._visits == 0:
            for tensor, home in zip(self.tensors, self.homes, strict=True):
                tensor.data = self._brought(home)
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            if self._visits == 0:
                self._leave()

    def _brought(self, home: Tensor) -> Tensor:
        return home.to(self.device, non_blocking=True)

    def _leave(self) -> None:
        for tensor, home in zip(self.tensors, self.homes, strict=True):
            tensor.data = home


def _home(tensor: Tensor) -> Tensor:
    host = tensor.detach().to("cpu")
    return host.pin_memory() if tensor.device.type == "cuda" else host
