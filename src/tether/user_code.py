"""Running code that a recipe names: isolated from the run's state, and within a time limit.

A time limit for code that runs in this process: a reward's function, a rule, a chat template.

A thread watches the clock. At the limit it has `TimeLimitError` raised in the code that ran over: by a signal in the
main thread, which also ends a blocking call such as `time.sleep` or a regular expression, and as an asynchronous
exception in any other thread. A timer of the operating system stands beside it, for code that keeps Python's lock. The
error is a BaseException and is raised again every second, so `except Exception` does not swallow it. Code that swallows
it all the same is ended with the process, `GRACE` seconds after the limit.

Running code that a recipe names, such as a reward or a task, so that it changes and ends nothing but itself.

`apart()` surrounds every call. What the code does to the process (working folder, environment, torch's threads and
default dtype, signal handlers, ...) is undone when the call returns, and done again for its next call: the code keeps
what it set up, and the run keeps its own. Random generators are shared on purpose: Tether draws from none of them.

`exits_told()` surrounds a run. An `os._exit` or `os.exec*` of such code would end the process with whatever exit code
it likes, 0 included; it ends with a sentence and the exit code of a faulty reward instead.
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

GRACE = 15.0  # seconds past a limit, after which the process is ended
AGAIN = 1.0  # seconds after which the error is raised again
EXIT_CODE = 5  # of tether.errors.DataError
SIGNAL = getattr(signal, "SIGVTALRM", None)  # users' code has SIGALRM for limits of its own
_end_process = os._exit


class TimeLimitError(BaseException):
    """The code took longer than its limit."""


class _Watch:
    """One limit at a time in each thread: the soonest. No lock is held on leaving one, for that may be interrupted."""

    def __init__(self) -> None:
        self.limits: dict[int, tuple[float, str]] = {}  # by thread: when it ends, and what is ended
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.pid = 0

    def begin(self, until: float, what: str) -> tuple[float, str] | None:
        """Watch this thread; returns the limit that this one stands in for."""
        me = threading.get_ident()
        with self.changed:
            if self.thread is None or self.pid != os.getpid():  # a fork has no threads
                self.pid = os.getpid()
                self.thread = threading.Thread(target=self._run, name="tether-time-limit", daemon=True)
                try:
                    self.thread.start()
                except RuntimeError:  # no memory for one: what is short is told where it is needed
                    self.thread = None
            before = self.limits.get(me)
            self.limits[me] = (until, what) if before is None or until < before[0] else before
            self.changed.notify()
        return before

    def end(self, before: tuple[float, str] | None) -> None:
        """Back to the limit before."""
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
        os.write(2, f"\ntether: {what} took longer than its time limit and did not let itself be ended\n".encode())
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
    """Raise TimeLimitError in the block once it has taken `seconds`; None or 0: no limit. `what` names the code."""
    if not seconds:
        yield
        return
    in_main = threading.current_thread() is threading.main_thread()
    if SIGNAL is not None and in_main and signal.getsignal(SIGNAL) is not _raise:
        # Left in place afterwards: a signal that is under way must never meet the default, which ends the process.
        signal.signal(SIGNAL, _raise)
    before = _watch.begin(time.monotonic() + seconds, what)
    timed = SIGNAL is not None and in_main
    try:
        if timed:  # code that keeps Python's lock, such as a regular expression, keeps the watching thread from running
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN)
        yield
    finally:
        _watch.end(before)
        if timed and before is None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


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
