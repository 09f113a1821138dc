"""Several calls at the same time, with results in the order of what they were called with."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Sequence[Item], at_once: int) -> list[Result]:
    """`[function(item) for item in items]` by up to `at_once` threads.

    The first exception is raised here, and no further item is begun. The threads are daemons: neither an exception nor
    Ctrl-C waits for calls that are under way.
    """
    if at_once <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(len(items)):
        waiting.put(place)
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((place, function(items[place]), None))
            except BaseException as error:
                done.put((place, None, error))

    for number in range(min(at_once, len(items))):
        threading.Thread(target=work, daemon=True, name=f"tether-reward-{number}").start()
    results: dict[int, Any] = {}
    try:
        while len(results) < len(items):
            place, result, error = done.get()
            if error is not None:
                raise error
            results[place] = result
    finally:
        over.set()
    return [results[place] for place in range(len(items))]
