"""The hostile suite's frame: `make attack` runs it, `make test` does not.

Every hostile input is one pytest case, ended by a time limit, and talks to loopback only. `command` runs one command of
Tether in a fork of this process and says how it ended; `refusal` states what every refusal has in common. What needs a
process of its own from the start (limits, pipes) takes `process` instead. The last line counts cases and findings.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

LIMIT = 5.0  # seconds until a command has said what is wrong
HUNG = 40  # seconds until a case is ended from outside
MAX_SENTENCE = 700  # characters of a message
ROOT = Path(__file__).resolve().parents[2]
# What no refusal may say: it is the input that is wrong.
BLAME = ("Traceback (most recent call last)", "a bug in Tether", "object at 0x", "unrecognized arguments")
BEGAN = time.monotonic()
END = os._exit


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float  # of processor time in a fork: a busy machine is no finding, and what hangs is killed

    @property
    def message(self) -> str:
        """The sentence on stderr, without the name of the program."""
        last = [line for line in self.err.splitlines() if line.startswith("tether: ")]
        return last[-1].removeprefix("tether: ") if last else ""


@pytest.fixture(scope="session")
def imported() -> None:
    """Import what commands need once, so that the first case's seconds are its own."""
    for name in (
        "train.run",
        "plan.plan",
        "evaluation.measure",
        "evaluation.sample_answers",
        "models.gguf_export",
        "rollout.native",
    ):
        import_module(f"tether.{name}")


@pytest.fixture(autouse=True)
def limited(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a case that hangs; `@pytest.mark.hang_limit(seconds)` gives one more time."""
    mark = request.node.get_closest_marker("hang_limit")
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> NoReturn:
        raise HungError(f"did not end within {mark.args[0] if mark else HUNG} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(mark.args[0] if mark else HUNG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class HungError(BaseException):
    """A case took too long; no `except Exception` on its way may hide that."""


@pytest.fixture
def command(imported: None, tmp_path: Path) -> Callable[..., Ended]:
    """Run one command in a fork of this process, in `tmp_path`: `command("plan", "recipe.yaml")`.

    A fork has torch imported already, ends as the real command ends, and is killed where it hangs. `before()` runs in
    it first; `out` is the file that is its standard output, by default one that is read back.
    """

    def run(*words: str | Path, before: Callable[[], object] | None = None, out: str | None = None) -> Ended:
        files = [tmp_path / f".{name}" for name in ("out", "err")]
        sys.stdout.flush()
        sys.stderr.flush()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            run_fork([str(word) for word in words], [Path(out) if out else files[0], files[1]], tmp_path, before)
        try:
            code, seconds = wait_for(child, began)
        except HungError as error:
            raise HungError(f"{error}: {files[1].read_text('utf-8', 'replace')[-6000:]}") from None
        said = ["" if out and file == files[0] else file.read_text("utf-8", "replace") for file in files]
        return Ended(code, said[0], said[1], seconds)

    return run


def run_fork(words: list[str], files: list[Path], folder: Path, before: Callable[[], object] | None) -> NoReturn:
    """Be the command; never returns."""
    code = 99
    try:
        signal.alarm(0)
        for number, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if before is not None:
            before()
        code = entry(words)
    except BaseException:
        traceback.print_exc()
    finally:
        END(code)


def entry(words: list[str]) -> int:
    """What the console script does: the command, then whatever Python does at its end."""
    from tether.cli import main

    code = main(words)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120  # as Python itself says
    return code


def wait_for(child: int, began: float) -> tuple[int, float]:
    """The exit code of a fork and the seconds of processor time it took; one that hangs is killed."""
    try:
        while time.monotonic() - began < HUNG:
            ended, status, used = os.wait4(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            time.sleep(0.005)
    except HungError:
        pass
    os.kill(child, signal.SIGUSR1)  # its stacks go to its standard error
    time.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    used = os.wait4(child, 0)[2]
    raise HungError(f"did not end within {HUNG} seconds, {used.ru_utime + used.ru_stime:.1f} of them on a processor")


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., Ended]:
    """Run one command as a process of its own, in `tmp_path`; further arguments go to `subprocess.run`."""

    def run(*words: str | Path, **options: object) -> Ended:
        began = time.monotonic()
        settings: dict = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": HUNG, **options}
        done = subprocess.run([sys.executable, "-m", "tether", *map(str, words)], check=False, **settings)
        return Ended(done.returncode, done.stdout or "", done.stderr or "", time.monotonic() - began)

    return run


@pytest.fixture
def refusal() -> Callable[..., str]:
    """Assert that a command ended in one clear sentence, and return that sentence."""
    return check_refusal


def check_refusal(ended: Ended, *codes: int, within: float = LIMIT) -> str:
    """The sentence of a refusal: the expected exit code, in time, and blaming nobody but the input."""
    said = ended.err[-2000:]
    assert ended.code in (codes or (2,)), f"exit {ended.code}: {said}"
    assert ended.seconds < within, f"{ended.seconds:.1f} s: {said}"
    assert ended.message, f"no sentence: {said!r}"
    for words in BLAME:
        assert words not in ended.err, said
    assert len(ended.message) <= MAX_SENTENCE, f"{len(ended.message)} characters: {ended.message}"
    assert all(char == "\n" or char.isprintable() for char in ended.err), f"control characters: {said!r}"
    return ended.message


# -- the summary --------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "hang_limit(seconds): end the case after this many seconds instead of the usual")


def pytest_unconfigure(config: pytest.Config) -> None:
    """One last line: how many cases, how many findings, how long."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    count = {name: len(reporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    findings = count["failed"] + count["error"]
    skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
    seconds = time.monotonic() - BEGAN
    print(f"attack: {findings + count['passed']} cases, {findings} findings{skipped}, {seconds:.0f} s")
