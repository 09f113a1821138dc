"""Threads for requests that wait for a model.

Routes share a pool of 40 threads. An answer takes seconds, and models answer one request at a time: without a limit of
their own, 40 questions at once would hold every thread, and all other routes would wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

AT_ONCE = 8

P = ParamSpec("P")
T = TypeVar("T")
_waiting: RunVar[anyio.CapacityLimiter] = RunVar("model_threads")


async def in_model_thread(call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
    """What `call` returns, run in one of `AT_ONCE` threads that are kept for models."""
    return await anyio.to_thread.run_sync(lambda: call(*given, **named), limiter=_limiter())


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _waiting.get()
    except LookupError:
        made = anyio.CapacityLimiter(AT_ONCE)
        _waiting.set(made)
        return made
