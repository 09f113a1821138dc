"""A time limit for code that runs in this process: a reward's function, a rule, a chat template.

A thread watches the clock. At the limit it has `TimeLimitError` raised in the code that ran over: by a signal in the
main thread, which also ends a blocking call such as `time.sleep` or a regular expression, and as an asynchronous
exception in any other thread. A timer of the operating system stands beside it, for code that keeps Python's lock. The
error is a BaseException and is raised again every second, so `except Exception` does not swallow it. Code that swallows
it all the same is ended with the process, `GRACE` seconds after the limit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
