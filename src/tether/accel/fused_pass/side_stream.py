"""The gradients of weights, put aside: in a captured pass they run on a stream of their own.

A layer's way back is a chain: products, and between them short kernels that read and write much and compute little.
The gradients of its weights hang off that chain, nothing waits for them before the pass ends, and they fill what the
chain leaves idle. They read tensors that the chain has done with, and whose memory must not be used again before that:
those of a layer are held until the next layer's chain is through, which then waits for its work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def capture_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """`(chain, side)` to capture on, a device's only ones: where both could go on, the chain's kernels do.

    Whatever is put on them during a capture is captured, so only what captures may use them, one at a time.
    """
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)


class Aside:
    """The side stream of one way back; without a stream, what is put aside is done at once."""

    def __init__(self, side: torch.cuda.Stream | None = None) -> None:
        self._side = side
        self._held: list[object] = []
        self._before: tuple[Any, list[object]] | None = None  # of the layer before: its end, and what it reads

    @contextmanager
    def __call__(self, *read: object) -> Iterator[None]:
        """What is done in here goes aside, after all that the chain has done so far; `read` is held until it is."""
        if self._side is None:
            yield
            return
        self._held.extend(read)
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            yield

    def next_layer(self) -> None:
        """Wait for what the layer before put aside, and let go of what that read."""
        if self._side is None or not self._held:
            return
        own = self._side.record_event(), self._held
        if self._before is not None:
            torch.cuda.current_stream(self._side.device).wait_event(self._before[0])
        self._before, self._held = own, []

    def join(self) -> None:
        """Wait for all of it."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._held, self._before = [], None
