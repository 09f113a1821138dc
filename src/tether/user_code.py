"""Run code that a recipe names (a reward, a task, a chat template): isolated from the run's state, with a time limit.

`time_limit()` limits one call. A thread watches the clock and raises `TimeLimitError` in the code that takes too long:
by a signal in the main thread, which also interrupts a blocking call such as `time.sleep` or a regular expression, and
as an asynchronous exception in any other thread. An operating-system timer covers code that never releases the GIL. The
error is a BaseException and is raised again every second, so `except Exception` does not swallow it. If the code
still goes on `GRACE` seconds after the limit, the process is ended.

`apart()` surrounds every call. Changes to process state (working folder, environment, torch's threads and default
dtype, signal handlers, ...) are undone when the call returns and restored before the next call. The user's code keeps
its settings and the run keeps its own. Random generators are shared on purpose: Tether uses none of the global ones.

`exits_told()` surrounds a run. If user code calls `os._exit` or `os.exec*`, the process would end with any exit code,
including 0. Instead it ends with a message and the exit code of a faulty reward.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

# -- time limits --------------------------------------------------------------------------------------------------

GRACE = 15.0  # seconds after a limit at which the process is ended
AGAIN = 1.0  # seconds between two raises of the error
EXIT_CODE = 5  # that of tether.errors.DataError
SIGNAL = getattr(signal, "SIGVTALRM", None)  # SIGALRM stays free for limits in user code
_end_process = os._exit


class TimeLimitError(BaseException):
    """The code took longer than its limit."""


class _Watch:
    """The nearest limit of each thread. `end` takes no lock, because the error may interrupt it at any point."""

    def __init__(self) -> None:
        self.limits: dict[int, tuple[float, str]] = {}  # by thread: the deadline, and the name of the code
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.pid = 0

    def begin(self, until: float, what: str) -> tuple[float, str] | None:
        """Watch this thread; returns the outer limit that this one replaces."""
        me = threading.get_ident()
        with self.changed:
            if self.thread is None or self.pid != os.getpid():  # a fork has no threads
                self.pid = os.getpid()
                self.thread = threading.Thread(target=self._run, name="tether-time-limit", daemon=True)
                try:
                    self.thread.start()
                except RuntimeError:  # no memory for a thread: the code that needs memory reports it
                    self.thread = None
            before = self.limits.get(me)
            self.limits[me] = (until, what) if before is None or until < before[0] else before
            self.changed.notify()
        return before

    def end(self, before: tuple[float, str] | None) -> None:
        """Restore the outer limit."""
        if before is None:
            self.limits.pop(threading.get_ident(), None)
        else:
            self.limits[threading.get_ident()] = before

    def is_over(self) -> bool:
        """Whether this thread is past its limit."""
        mine = self.limits.get(threading.get_ident())
        return mine is not None and time.monotonic() >= mine[0]

    def _run(self) -> None:
        while True:
            with self.changed:
                limits = list(self.limits.items())
                soonest = min((until for _, (until, _) in limits), default=None)
                wait = None if soonest is None else soonest - time.monotonic()
                if wait is None or wait > 0:
                    self.changed.wait(wait)
                    continue
            for who, (until, what) in limits:
                if time.monotonic() < until:
                    continue
                if time.monotonic() > until + GRACE:
                    _end(what)
                _raise_in(who)
            time.sleep(AGAIN)


_watch = _Watch()


def _end(what: str) -> None:
    with suppress(OSError):
        os.write(2, f"\ntether: {what} took longer than its time limit and could not be stopped\n".encode())
    _end_process(EXIT_CODE)


def _raise_in(thread: int) -> None:
    if thread == threading.main_thread().ident and SIGNAL is not None:
        signal.pthread_kill(thread, SIGNAL)
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitError))


def _raise(*_: object) -> None:
    if _watch.is_over():
        raise TimeLimitError


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Raise TimeLimitError in the block after `seconds`; None or 0 means no limit. `what` names the code."""
    if not seconds:
        yield
        return
    in_main = threading.current_thread() is threading.main_thread()
    if SIGNAL is not None and in_main and signal.getsignal(SIGNAL) is not _raise:
        # The handler stays installed: a late signal must not reach the default action, which ends the process.
        signal.signal(SIGNAL, _raise)
    before = _watch.begin(time.monotonic() + seconds, what)
    timed = SIGNAL is not None and in_main
    try:
        if timed:  # a regular expression holds the GIL, so the watching thread cannot run
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN)
        yield
    finally:
        _watch.end(before)
        if timed and before is None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


# -- whose error it is --------------------------------------------------------------------------------------------

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
UNKNOWN = object()
end_process = os._exit  # the original, for Tether's own use


class Interrupted(KeyboardInterrupt):
    """The user asked to stop, whichever code is running."""


def is_its_own(error: BaseException) -> bool:
    """Whether an error of user code is that code's own failure, not a request to end this process.

    A KeyboardInterrupt comes from the user if Python's own Ctrl-C handler, which raises it, is installed.
    """
    if isinstance(error, Interrupted):
        return False
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return isinstance(error, (Exception, SystemExit, GeneratorExit, asyncio.CancelledError, TimeLimitError))


# -- process state ------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One setting that all code in a process shares."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _read_folder() -> Any:
    try:
        return os.getcwd()  # noqa: PTH109 (os.chdir takes text)
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
    torch.set_default_device(None if device.type == "cpu" else device)  # None is torch's initial value


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
        "matmul precision",
        _of_torch(lambda t: t.get_float32_matmul_precision()),
        _to_torch(lambda t, kind: t.set_float32_matmul_precision(kind)),
    ),
    Setting("CUDA device", _of_torch(_cuda), _to_torch(lambda t, index: t.cuda.set_device(index))),
    *(Setting(signal.Signals(number).name, _read_signal(number), _write_signal(number)) for number in SIGNALS),
)


class _Apart:
    """The two versions of the process state: the run's settings, and the changes that user code made."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.depth = 0
        self.theirs: dict[str, Any] = {}  # settings changed by user code, by name

    def enter(self) -> dict[str, Any]:
        """Apply the settings of user code; returns the run's settings."""
        ours = {setting.name: _read(setting) for setting in SETTINGS}
        for setting in SETTINGS:
            if setting.name in self.theirs and self.theirs[setting.name] != ours[setting.name]:
                _write(setting, self.theirs[setting.name])
        return ours

    def leave(self, ours: dict[str, Any]) -> None:
        """Save the settings of user code and restore the run's settings."""
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
    except Exception:  # a version of torch without this setting
        return UNKNOWN


def _write(setting: Setting, value: Any) -> None:
    if value is not UNKNOWN:
        with suppress(Exception):
            setting.write(value)


_apart = _Apart()


@contextmanager
def apart() -> Iterator[None]:
    """Isolate one call of user code; a nested call does nothing more. Other threads wait until it ends."""
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


# -- exits of the process -----------------------------------------------------------------------------------------


@contextmanager
def exits_told() -> Iterator[None]:
    """Make `os._exit` and `os.exec*` end this process with a message and the exit code of a faulty reward.

    Processes that the code forks are not affected.
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
    words = f"tether: code that the recipe names called {call}, which would have ended the run without a message\n"
    with suppress(OSError):
        os.write(2, words.encode("utf-8", "replace"))
    end_process(EXIT_CODE)
