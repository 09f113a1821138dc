"""Progress of long work: a progress bar on a terminal, plain lines in a file or a pipe.

All progress goes to standard error. Standard output carries only results and JSON. A plain line has no control
characters and no carriage return, and is flushed at once. The first and the last step always print a line. Between
them, a step prints one if at least `EVERY` seconds have passed since the previous line.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from tether.redact import redact

EVERY = 10.0  # minimum seconds between two plain lines
SHOWN = ("score", "loss", "accuracy", "kl_ref_k3", "approx_kl", "entropy", "clip_fraction", "explained_variance")
HELD_OUT = ("held_out/score", "held_out/loss", "held_out/accuracy")


def on_terminal() -> bool:
    """Whether standard error is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def say(text: str) -> None:
    """Write one line to standard error. A closed pipe or a full disk raises nothing."""
    with suppress(OSError, ValueError):  # closed or full
        print(_plain(redact(text)), file=sys.stderr, flush=True)


def _plain(text: str) -> str:
    """Replace line breaks and control characters by spaces."""
    return "".join(letter if letter.isprintable() or letter == "\t" else " " for letter in text.replace("\n", " "))


def numbers_of(metrics: Mapping[str, float]) -> str:
    """The most important metrics of a step, and its throughput in tokens per second."""
    shown = [f"{name} {metrics[name]:.3g}" for name in (*SHOWN, *HELD_OUT) if name in metrics]
    seconds, tokens = metrics.get("seconds/step", 0.0), metrics.get("tokens/learned", 0.0)
    rate = [f"{tokens / seconds:,.0f} tokens/s"] if seconds > 0 and tokens > 0 else []
    return "  ".join(shown + rate)


def clock_time(seconds: float) -> str:
    """Format a duration: 12 s, 3 min 05 s, 2 h 03 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class PlainProgress:
    """Progress as plain lines: `ppo 12/100  4 min 10 s left  score 0.61  2,310 tokens/s`."""

    def __init__(
        self,
        title: str,
        total: int,
        done: int = 0,
        *,
        every: float = EVERY,
        write: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.total, self.every = title, total, every
        self._write, self._clock = write, clock
        self._began, self._began_at = clock(), done
        self._last_line: float | None = None
        self._shown = -1

    def advance(self, done: int, numbers: str = "") -> None:
        """Report that `done` steps are complete; writes a line if one is due."""
        now = self._clock()
        due = self._last_line is None or now - self._last_line >= self.every or done >= self.total
        if not due or done == self._shown:
            return
        self._last_line, self._shown = now, done
        self._write(
            "  ".join(part for part in (f"{self.title} {done}/{self.total}", self._left(done), numbers) if part)
        )

    def _left(self, done: int) -> str:
        taken, passed = done - self._began_at, self._clock() - self._began
        if done >= self.total:
            return f"took {clock_time(passed)}"
        return f"{clock_time(passed / taken * (self.total - done))} left" if taken > 0 else ""

    def doing(self, words: str) -> None:
        """Write what the current step does, if no line was written for `3 * every` seconds."""
        now = self._clock()
        if self._last_line is not None and now - self._last_line >= 3 * self.every:
            self._last_line = now
            self._write(f"{self.title} {max(self._shown, 0)}/{self.total}  {words}")


@contextmanager
def working(
    what: str,
    *,
    quiet: bool = False,
    announce: bool = True,
    spinner: bool = True,
    every: float = EVERY,
    write: Callable[[str], None] = say,
) -> Iterator[None]:
    """Show that work without steps goes on: a spinner on a terminal, otherwise a line every `every` seconds.

    `announce` also writes a line at the start. Set `spinner=False` where a progress bar is already on the terminal.
    """
    terminal = write is say and on_terminal()
    if quiet or (terminal and not spinner):
        yield
        return
    if terminal:
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status(escape(_plain(what))):
            yield
        return
    if announce:
        write(what)
    began, ended = time.monotonic(), threading.Event()

    def tick() -> None:
        while not ended.wait(every):
            write(f"{what}: {clock_time(time.monotonic() - began)} so far")

    thread = threading.Thread(target=tick, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
