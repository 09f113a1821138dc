"""Running code that a recipe names, such as a reward or a task, so that it changes and ends nothing but itself.

`apart()` surrounds every call. What the code does to the process (working folder, environment, torch's threads and
default dtype, signal handlers, ...) is undone when the call returns, and done again for its next call: the code keeps
what it set up, and the run keeps its own. Random generators are shared on purpose: Tether draws from none of them.

`exits_told()` surrounds a run. An `os._exit` or `os.exec*` of such code would end the process with whatever exit code
it likes, 0 included; it ends with a sentence and the exit code of a faulty reward instead.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from tether.time_limit import EXIT_CODE, TimeLimitError

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
UNKNOWN = object()
end_process = os._exit  # for Tether itself, which knows what it is doing


class Interrupted(KeyboardInterrupt):
    """A person wants to end what runs now, whoever's code that is."""


def is_its_own(error: BaseException) -> bool:
    """Whether what came out of a user's code is that code's own affair, and no order to end this process.

    A KeyboardInterrupt is a person's where Python's own handler of Ctrl-C is installed, which raises it.
    """
    if isinstance(error, Interrupted):
        return False
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return isinstance(error, (Exception, SystemExit, GeneratorExit, asyncio.CancelledError, TimeLimitError))


# -- what belongs to the process ----------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One thing that all code of a process shares."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _read_folder() -> Any:
    try:
        return os.getcwd()  # noqa: PTH109 (text, as os.chdir takes it)
    except OSError:
        return UNKNOWN


def _read_mask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _write_mask(mask: int) -> None:
    os.umask(mask)


def _write_environment(wanted: dict[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _of_torch(read: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: read(sys.modules["torch"]) if "torch" in sys.modules else UNKNOWN


def _to_torch(write: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    return lambda value: write(sys.modules["torch"], value)


def _read_signal(number: int) -> Callable[[], Any]:
    return lambda: signal.getsignal(number) if threading.current_thread() is threading.main_thread() else UNKNOWN


def _write_signal(number: int) -> Callable[[Any], None]:
    def write(handler: Any) -> None:
        if handler is not None:  # None: it was not set from Python
            signal.signal(number, handler)

    return write


def _write_device(torch: Any, device: Any) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None is how torch starts


def _cuda(torch: Any) -> Any:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else UNKNOWN


SETTINGS = (
    Setting("working folder", _read_folder, os.chdir),
    Setting("environment", lambda: dict(os.environ), _write_environment),
    Setting("file mode mask", _read_mask, _write_mask),
    Setting("standard output", lambda: sys.stdout, lambda stream: setattr(sys, "stdout", stream)),
    Setting("standard error", lambda: sys.stderr, lambda stream: setattr(sys, "stderr", stream)),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Setting("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    Setting("socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
    Setting("threads", _of_torch(lambda t: t.get_num_threads()), _to_torch(lambda t, n: t.set_num_threads(n))),
    Setting("dtype", _of_torch(lambda t: t.get_default_dtype()), _to_torch(lambda t, d: t.set_default_dtype(d))),
    Setting("device", _of_torch(lambda t: t.get_default_device()), _to_torch(_write_device)),
    Setting("gradients", _of_torch(lambda t: t.is_grad_enabled()), _to_torch(lambda t, on: t.set_grad_enabled(on))),
    Setting(
        "deterministic algorithms",
        _of_torch(lambda t: t.get_deterministic_debug_mode()),
        _to_torch(lambda t, mode: t.set_deterministic_debug_mode(mode)),
    ),
    Setting(
        "precision of products",
        _of_torch(lambda t: t.get_float32_matmul_precision()),
        _to_torch(lambda t, kind: t.set_float32_matmul_precision(kind)),
    ),
    Setting("CUDA device", _of_torch(_cuda), _to_torch(lambda t, index: t.cuda.set_device(index))),
    *(Setting(signal.Signals(number).name, _read_signal(number), _write_signal(number)) for number in SIGNALS),
)


class _Apart:
    """The two sides of the process: what the run has set, and what users' code has set otherwise."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0
        self.theirs: dict[str, Any] = {}  # what users' code has set, by name

    def enter(self) -> dict[str, Any]:
        """Put on what users' code had set; returns what the run has."""
        ours = {setting.name: _read(setting) for setting in SETTINGS}
        for setting in SETTINGS:
            if setting.name in self.theirs and self.theirs[setting.name] != ours[setting.name]:
                _write(setting, self.theirs[setting.name])
        return ours

    def leave(self, ours: dict[str, Any]) -> None:
        """Keep what users' code has set, and put back what the run had."""
        for setting in SETTINGS:
            now, before = _read(setting), ours[setting.name]
            if now is UNKNOWN and setting.name != "working folder":
                continue
            if now != before:
                self.theirs[setting.name] = now
                _write(setting, before)
            else:
                self.theirs.pop(setting.name, None)


def _read(setting: Setting) -> Any:
    try:
        return setting.read()
    except Exception:  # a version of torch that refuses the question
        return UNKNOWN


def _write(setting: Setting, value: Any) -> None:
    if value is not UNKNOWN:
        with suppress(Exception):
            setting.write(value)


_apart = _Apart()


@contextmanager
def apart() -> Iterator[None]:
    """Around a call of a user's code; within another one it does nothing more. Other threads wait their turn."""
    with _apart.lock:
        if _apart.depth:
            yield
            return
        _apart.depth += 1
        ours = _apart.enter()
        try:
            yield
        finally:
            _apart.leave(ours)
            _apart.depth -= 1


# -- ways out of the process --------------------------------------------------------------------------------------


@contextmanager
def exits_told() -> Iterator[None]:
    """Within it, `os._exit` and `os.exec*` end this process with a sentence and the exit code of a faulty reward.

    Processes that the code forks are let alone.
    """
    pid = os.getpid()
    names = ("_exit", "execv", "execve")
    real = {name: getattr(os, name) for name in names}

    def told(name: str) -> Callable[..., Any]:
        def end(*arguments: Any, **named: Any) -> Any:
            if os.getpid() != pid:
                return real[name](*arguments, **named)
            return _say_and_end(f"os.{name}({', '.join(map(repr, arguments[:1]))})")

        return end

    for name in names:
        setattr(os, name, told(name))
    try:
        yield
    finally:
        for name in names:
            setattr(os, name, real[name])


def _say_and_end(call: str) -> NoReturn:
    words = f"tether: code that the recipe names called {call}, which would have ended the run without a word\n"
    with suppress(OSError):
        os.write(2, words.encode("utf-8", "replace"))
    end_process(EXIT_CODE)
